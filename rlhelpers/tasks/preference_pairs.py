"""Pairs of responses of which one is preferred: of Anthropic's HH, of files, and of right and wrong solutions."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlhelpers.tasks.data_files import read_texts, write_texts

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
