"""A task, and tasks by name: problems to train on, problems to validate on, and the verifier of answers."""

import os.path
from dataclasses import dataclass
from pathlib import Path

from rlhelpers import paths
from rlhelpers.checks import check_callable, check_list, check_text, check_whole, refused
from rlhelpers.tasks.datasets import Problem
from rlhelpers.tasks.grading import Verifier, verify_answer
from rlhelpers.tasks.gsm8k import load_gsm8k, read_problems
from rlhelpers.tasks.gym import check_gym, load_gym

ACCEPTED = "tiny, gsm8k, gym/<name>, or a folder with train.jsonl and validation.jsonl"


@dataclass(frozen=True)
class Task:
    """`verify(answer, ground_truth)` returns "right" or the reason why the answer is not (grading.REASONS)."""

    name: str
    train: list[Problem]
    validation: list[Problem]
    verify: Verifier

    def __post_init__(self):
        check_text(name=self.name)
        check_list(train=self.train, validation=self.validation)
        check_callable(verify=self.verify)


def load_task(name: str, n_train_examples: int, n_val_examples: int) -> Task:
    """Load a task, cut to its first examples.

    name: "tiny", the embedded word problems; "gsm8k"; "gym/<name>", a data set of reasoning-gym; or a folder (of the
    working directory unless its path is absolute) with `train.jsonl` and `validation.jsonl` in GSM8K's format.
    Raises ValueError for an unknown name and for a number of examples that is negative, not whole, or more than the
    task has; FileNotFoundError where data must be fetched first.
    """
    if not isinstance(name, str):
        raise refused("task", name, ACCEPTED)
    check_whole(0, n_train_examples=n_train_examples, n_val_examples=n_val_examples)
    if name.startswith("gym/"):
        return Task(name, *load_gym(name.removeprefix("gym/"), n_train_examples, n_val_examples))
    if name == "gsm8k":
        train, validation = load_gsm8k()
    elif name == "tiny":
        train, validation = _read_folder(paths.TINY)
    elif os.path.isdir(name):  # not is_dir, which raises OSError for a name too long for a file
        train, validation = _read_folder(Path(name))
    else:
        where = f"there is no folder {Path(name).absolute()}"
        raise ValueError(f"task: got {name[:200]!r}, and {where[:300]}; accepted is {ACCEPTED}")
    train = _first("n_train_examples", train, n_train_examples, name)
    return Task(name, train, _first("n_val_examples", validation, n_val_examples, name), verify_answer)


def check_task(name: str, n_train_examples: int, n_val_examples: int) -> None:
    """Raise what load_task would raise.  Of a gym only the name is checked: its problems take a while to make."""
    if isinstance(name, str) and name.startswith("gym/"):
        check_gym(name.removeprefix("gym/"))
    else:
        load_task(name, n_train_examples, n_val_examples)


def _read_folder(folder: Path) -> tuple[list[Problem], list[Problem]]:
    train, validation = files = folder / "train.jsonl", folder / "validation.jsonl"
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"task: got {str(folder)!r}; it has no {' and no '.join(missing)}")
    return read_problems(train), read_problems(validation)


def _first(field: str, problems: list[Problem], count: int, task: str) -> list[Problem]:
    if count > len(problems):
        raise ValueError(f"{field}: got {count}; task {task!r} has {len(problems)}")
    return problems[:count]
