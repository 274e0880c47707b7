"""GSM8K (arXiv:2110.14168): 7,473 grade-school word problems to train on and 1,319 to test on."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from rlhelpers import paths
from rlhelpers.files import write_atomically
from rlhelpers.tasks.datasets import Problem, read_objects, text_field
from rlhelpers.tasks.grading import read_truth

MARK = "####"
# split -> (rows, sha256 of the file that openai/gsm8k publishes, one JSON object a line)
FILES = {
    "train": (7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test": (1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}


def load_gsm8k() -> tuple[list[Problem], list[Problem]]:
    """Load train and test problems from `data/gsm8k`, or else from the folder that RLHELPERS_GSM8K names."""
    named = os.environ.get("RLHELPERS_GSM8K")
    folders = [paths.GSM8K, *([Path(named)] if named else [])]
    for folder in folders:
        if all((folder / f"{split}.jsonl").is_file() for split in FILES):
            return read_problems(folder / "train.jsonl"), read_problems(folder / "test.jsonl")
    looked = " and ".join(str(folder) for folder in folders)
    raise FileNotFoundError(
        f"GSM8K: no train.jsonl and test.jsonl in {looked}; run `rlhelpers fetch gsm8k`, "
        "or set RLHELPERS_GSM8K to a folder that holds them"
    )


def read_problems(path: Path) -> list[Problem]:
    """Read JSON lines `{"question", "answer"}`.  Raises FileNotFoundError, and ValueError naming file and line."""
    problems = []
    for number, row in read_objects(path):
        question, solution = (text_field(path, number, row, name) for name in ("question", "answer"))
        try:
            problems.append(Problem(question.strip(), final_answer(solution)))
        except ValueError as error:
            form = f'{{"question": ..., "answer": "... {MARK} N"}}'
            raise ValueError(f"{path}, line {number}: {error}; a line is {form}") from error
    return problems


def final_answer(solution: str) -> str:
    """Return what follows the last `####`, stripped.  Raises ValueError where it is no ground truth."""
    _, mark, answer = solution.rpartition(MARK)
    if not mark:
        raise ValueError(f"no {MARK} in {solution[-60:]!r}")
    read_truth(answer)
    return answer.strip()


def fetch_gsm8k(folder: Path = paths.GSM8K) -> None:
    """Download both files with the `datasets` library, check rows and checksums, then write them to `folder`.

    Raises ConnectionError where the hub cannot be reached, and ValueError for other content than the published one.
    """
    from datasets import load_dataset  # here, because nothing else needs it

    try:
        texts = {split: jsonl_text(load_dataset("openai/gsm8k", "main", split=split)) for split in FILES}
    except ConnectionError as error:
        instead = "RLHELPERS_GSM8K can name a folder that has train.jsonl and test.jsonl"
        raise ConnectionError(f"{error}; {instead}") from None
    for split, text in texts.items():
        check_file(split, text)
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        write_atomically(folder / f"{split}.jsonl", text)


def jsonl_text(rows: Iterable[dict]) -> str:
    """Write rows as GSM8K's files have them."""
    return "".join(json.dumps({"question": r["question"], "answer": r["answer"]}) + "\n" for r in rows)


def check_file(split: str, text: str) -> None:
    """Raise ValueError unless `text` is the published file of this split."""
    rows, checksum = FILES[split]
    found = text.count("\n"), hashlib.sha256(text.encode("utf-8")).hexdigest()
    if found != (rows, checksum):
        raise ValueError(f"gsm8k {split}: got {found[0]} rows, sha256 {found[1]}; wanted {rows} rows, {checksum}")
