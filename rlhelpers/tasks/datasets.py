"""Data files that a reader brings, and what they hold: problems, instructions, pairs of which one is preferred.

CSV, JSON and JSON lines in UTF-8, gzipped where the name ends in .gz.  An error names the file and the line.
"""

import csv
import gzip
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlhelpers.checks import check_text
from rlhelpers.files import json_lines, write_atomically

HH = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True)
class Problem:
    """A question and its ground truth (a short string such as "18")."""

    question: str
    answer: str

    def __post_init__(self):
        check_text(question=self.question, answer=self.answer)


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one instruction.  `source` says where the preference comes from."""

    instruction: str
    chosen: str
    rejected: str
    source: str


def read_text(path: Path) -> str:
    """Read a file.  Raises FileNotFoundError, and ValueError for what is not UTF-8, or not gzipped as its name says."""
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


def read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """Read the rows that are not blank, each with the number of its first line.

    A field may span lines.  Raises ValueError where a quote is not closed, and for a file without rows.
    """
    rows, first_line = [], 1
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for row in reader:
            if row:
                rows.append((first_line, row))
            first_line = reader.line_num + 1
    except csv.Error as error:
        accepted = "the file must be CSV with commas and double quotes"
        raise ValueError(f"{path}, line {first_line}: {error}; {accepted}") from error
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def read_objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSON array or of JSON lines, each with the number of its line (in an array: its index + 1).

    Raises ValueError for anything else, for half of a surrogate pair, and for a file without objects.
    """
    text = read_text(path)
    found = _array(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    has_escapes = "\\u" in text  # one search of the whole file
    for number, value in found:
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: got {str(value)[:40]!r}; accepted is a JSON object")
        if has_escapes and not _is_unicode(value):
            raise ValueError(f"{path}, line {number}: got half of a surrogate pair; accepted is what UTF-8 can hold")
    if not found:
        raise ValueError(f"{path}: holds no objects")
    return found


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


def text_field(path: Path, number: int, row: dict[str, Any], name: str) -> str:
    """Return `row[name]`.  Raises ValueError unless it is a text that is not blank."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        got = f"got {value!r}" if name in row else "it is missing"
        raise ValueError(f"{path}, line {number}: {name}: {got}; accepted is a text that is not empty")
    return value


def read_texts(path: Path, *names: str) -> list[dict[str, str]]:
    """Read these fields of every object of a file, each a text, which may be empty.  Other fields are dropped.

    Raises what read_objects does, and ValueError for a field that is missing or no text.
    """
    objects = read_objects(path)
    for number, row in objects:
        for name in names:
            if not isinstance(row.get(name), str):
                got = f"got {row[name]!r:.40}" if name in row else "it is missing"
                raise ValueError(f"{path}, line {number}: {name}: {got}; accepted are texts as {', '.join(names)}")
    return [{name: row[name] for name in names} for _, row in objects]


def write_texts(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write the JSON lines that read_texts reads; create the folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json_lines(rows))


def read_instructions(path: Path) -> list[tuple[str, str]]:
    """Read (prompt, response) of every object of a file.  Raises what read_texts does."""
    return [(row["prompt"], row["response"]) for row in read_texts(path, "prompt", "response")]


def load_pairs(path: str | Path) -> list[PreferencePair]:
    """Load pairs from a folder with the files of Anthropic's HH, or from a file that `write_pairs` wrote."""
    path = Path(path)
    names = [field.name for field in fields(PreferencePair)]
    return load_hh(path) if path.is_dir() else [PreferencePair(**row) for row in read_texts(path, *names)]


def write_pairs(path: Path, pairs: Iterable[PreferencePair]) -> None:
    """Write the JSON lines that load_pairs reads."""
    write_texts(path, map(asdict, pairs))


def files_of_pairs(path: str | Path) -> list[Path]:
    """Return the files that load_pairs reads."""
    return [Path(path, f"{name}.jsonl.gz") for name in HH] if Path(path).is_dir() else [Path(path)]


def load_hh(folder: str | Path) -> list[PreferencePair]:
    """Load the single-turn conversations of Anthropic's HH (arXiv:2204.05862): four files with `chosen` and `rejected`.

    A conversation is kept where both texts are one message of the human, the same one, and one of the assistant.
    White space around messages is dropped.  `source` is the file's name without its endings.
    Raises FileNotFoundError naming the missing files, and ValueError naming file and line.
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
    """Return the human's message and the assistant's; None for more turns or another form."""
    before, human, rest = conversation.partition(HUMAN)
    instruction, assistant, response = rest.partition(ASSISTANT)
    has_more = (HUMAN in rest) or (ASSISTANT in response)
    return None if has_more or before.strip() or not (human and assistant) else (instruction.strip(), response.strip())


def pair_solutions(rows: Iterable[Mapping[str, Any]], source: str) -> list[PreferencePair]:
    """Pair right with wrong solutions of the same problem, each used once: k right ones of G make min(k, G - k) pairs.

    rows: dictionaries with `question`, `response`, `reward` and `finish_reason`, as training.evaluation makes them.
    """
    found = defaultdict(lambda: ([], []))
    for row in rows:
        if row["finish_reason"] == "stop":  # DPO appends the end of the text, which a truncated response lacks
            found[row["question"]][row["reward"] == 1.0].append(row["response"])
    return [
        PreferencePair(question, chosen, rejected, source)
        for question, (wrong, right) in found.items()
        for chosen, rejected in zip(right, wrong, strict=False)
    ]
