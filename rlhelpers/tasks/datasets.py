"""Data files that a reader brings: CSV, JSON and JSON lines in UTF-8, gzipped where the name ends in .gz.  What is
wrong with one is said with its line.

Instructions and responses in the template of Alpaca (tatsu-lab/stanford_alpaca), which is a file in `templates/`.

Documents end to end, cut into pieces of one length: every position of a batch is a token to learn from.

Pairs of responses of which one is preferred: of Anthropic's HH, of files, and of right and wrong solutions."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhelpers.checks import check_text
from rlhelpers.files import json_lines, write_atomically
from rlhelpers.tasks.answers import Boxes, parse_gsm8k_response
from rlhelpers.tasks.prompts import SLOT, TEMPLATES, Prompt

if TYPE_CHECKING:  # transformers takes seconds to import
    pass


Row = tuple[int, list[str]]


def read_text(path: Path) -> str:
    """Raises FileNotFoundError, or ValueError for what is not UTF-8, or not gzipped though its name says so."""
    if not path.is_file():
        raise FileNotFoundError(f"data: got {str(path)!r}; there is no such file")
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {error}; the file must be gzipped, as its name says") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: {error.reason}; the file must be UTF-8") from error


def read_csv(path: Path) -> list[Row]:
    """The rows that are not blank, each with the number of its first line; a field may span lines.  Raises ValueError
    where a quote is not closed, and for a file without rows."""
    rows, begins = [], 1
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                rows.append((begins, row))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {begins}: {error}; the file must be CSV with commas and double quotes"
        ) from error
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def read_objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSON array or of JSON lines, each with the number of its line (in an array: its own number).
    Raises ValueError for anything else, for half of a surrogate pair, and for a file without objects."""
    text = read_text(path)
    found = _array(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    escapes = "\\u" in text  # looked for once: it is the whole file
    for number, value in found:
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: got {str(value)[:40]!r}; accepted is a JSON object")
        if escapes and not _is_unicode(value):
            raise ValueError(f"{path}, line {number}: got half of a surrogate pair; accepted is what UTF-8 can hold")
    if not found:
        raise ValueError(f"{path}: holds no objects")
    return found


def read_texts(path: Path, *fields: str) -> list[dict[str, str]]:
    """These fields of every object of a file, each a text, which may be empty; other fields are left behind.  Raises
    what read_objects does, and ValueError for a field that is missing or no text."""
    objects = read_objects(path)
    for number, row in objects:
        for name in fields:
            if not isinstance(row.get(name), str):
                got = f"got {row[name]!r:.40}" if name in row else "it is missing"
                raise ValueError(f"{path}, line {number}: {name}: {got}; accepted are texts as {', '.join(fields)}")
    return [{name: row[name] for name in fields} for _, row in objects]


def write_texts(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write JSON lines, which read_texts reads; the folder is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json_lines(rows))


def text_field(path: Path, number: int, row: dict[str, Any], name: str) -> str:
    """`row[name]`.  Raises ValueError unless it is there and a text that is not blank."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        got = f"got {value!r}" if name in row else "it is missing"
        raise ValueError(f"{path}, line {number}: {name}: {got}; accepted is a text that is not empty")
    return value


def _array(path: Path, text: str) -> list[tuple[int, Any]]:
    try:
        return list(enumerate(json.loads(text), start=1))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}; the file must be JSON") from error
    except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits
        raise ValueError(f"{path}: {error}; the file must be JSON") from error


def _lines(path: Path, text: str) -> list[tuple[int, Any]]:
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            found += [(number, json.loads(line))] if line.strip() else []
        except (ValueError, RecursionError) as error:  # also an integer of more than 4,300 digits
            raise ValueError(f"{path}, line {number}: {error}; a line must be one JSON object") from error
    return found


def _is_unicode(value: dict[str, Any]) -> bool:
    """JSON may escape half of a surrogate pair, which no tokenizer reads and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


INSTRUCTION, RESPONSE = "{prompt}", "{response}"


def read_template(path: Path) -> str:
    """What stands before the response, with `{question}` where the instruction goes.

    The one rule for white space: line ends are "\\n" whatever the file has, and what follows the slot of the response
    belongs to the file, not to the template.  Raises ValueError where the file is missing, has not one `{prompt}` and
    one `{response}`, or has more than white space behind the latter.
    """
    accepted = f"accepted is a UTF-8 text with one {INSTRUCTION} and, at its end, one {RESPONSE}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # with universal line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"template: {path} cannot be read ({error!r}); {accepted}") from error
    before, _, behind = text.partition(RESPONSE)
    if text.count(RESPONSE) != 1 or before.count(INSTRUCTION) != 1 or behind.strip():
        raise ValueError(f"template: got {path}; {accepted}")
    return before.replace(INSTRUCTION, SLOT)


def find_last_number(response: str) -> Boxes:
    """The last number as the only box: the answer of a response that was told of no form."""
    number = parse_gsm8k_response(response)
    return Boxes(number is not None, () if number is None else (number,), int(number is not None), number)


ALPACA = Prompt("alpaca", read_template(TEMPLATES / "alpaca.txt"), None, find_last_number)
"""ALPACA(instruction) is the text before the response.  As the prompt of a `Grader`, it takes the last number."""


def render(instruction: str, response: str) -> str:
    """The document that a model is tuned on.  Both texts are kept as they are, with braces and white space.
    Raises ValueError for what is no text."""
    check_text(instruction=instruction, response=response)
    return ALPACA(instruction) + response


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """(prompt, response) of every line of a file of JSON objects with these two texts, plain or gzipped.

    Raises FileNotFoundError where it is missing, and ValueError naming file and line.
    """
    return [(row["prompt"], row["response"]) for row in read_texts(path, "prompt", "response")]


HH = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one instruction; `source` says where the preference comes from."""

    instruction: str
    chosen: str
    rejected: str
    source: str


FIELDS = tuple(field.name for field in fields(PreferencePair))


def load_pairs(path: str | Path) -> list[PreferencePair]:
    """From a folder with the files of HH, or from a file that `write_pairs` wrote."""
    path = Path(path)
    return load_hh(path) if path.is_dir() else [PreferencePair(**row) for row in read_texts(path, *FIELDS)]


def write_pairs(path: Path, pairs: Iterable[PreferencePair]) -> None:
    write_texts(path, map(asdict, pairs))


def files_of_pairs(path: str | Path) -> list[Path]:
    """The files that load_pairs reads."""
    return [Path(path, f"{name}.jsonl.gz") for name in HH] if Path(path).is_dir() else [Path(path)]


def load_hh(folder: str | Path) -> list[PreferencePair]:
    """The single-turn conversations of Anthropic's HH (arXiv:2204.05862), from the gzipped JSON lines of HH, each with
    the texts `chosen` and `rejected`; `source` is the file's name without its endings.

    A conversation counts where both texts are one message of the human, the same one, and one of the assistant.  White
    space around messages is not part of them.  Raises FileNotFoundError naming the missing files, and ValueError
    naming file and line.
    """
    files = files_of_pairs(folder)
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{folder}: no {', '.join(missing)}; the four files of Anthropic's HH are needed")
    pairs = []
    for name, file in zip(HH, files, strict=True):
        for row in read_texts(file, "chosen", "rejected"):
            chosen, rejected = _single_turn(row["chosen"]), _single_turn(row["rejected"])
            if chosen and rejected and chosen[0] == rejected[0]:
                pairs.append(PreferencePair(chosen[0], chosen[1], rejected[1], name))
    return pairs


def _single_turn(conversation: str) -> tuple[str, str] | None:
    """The human's message and the assistant's; None for a conversation of more turns or in another form."""
    before, human, rest = conversation.partition(HUMAN)
    instruction, assistant, response = rest.partition(ASSISTANT)
    more = (HUMAN in rest) or (ASSISTANT in response)
    return None if more or before.strip() or not (human and assistant) else (instruction.strip(), response.strip())


def pair_solutions(rows: Iterable[Mapping[str, Any]], source: str) -> list[PreferencePair]:
    """Right solutions beside wrong ones of the same problem, each in one pair: k right ones of G make min(k, G - k).

    rows: as training.evaluation.rows_to_read gives them.  What was cut off at the token limit is left out: DPO appends
    the end of the text to each response, and there is none.
    """
    found = defaultdict(lambda: ([], []))
    for row in rows:
        if row["finish_reason"] == "stop":
            found[row["question"]][row["reward"] == 1.0].append(row["response"])
    return [
        PreferencePair(question, chosen, rejected, source)
        for question, (wrong, right) in found.items()
        for chosen, rejected in zip(right, wrong, strict=False)
    ]
