"""Tasks by name."""

import os.path
from pathlib import Path

from rlhelpers import paths
from rlhelpers.checks import check_whole, refused
from rlhelpers.tasks.grading import judge_answer
from rlhelpers.tasks.gsm8k import load_gsm8k, read_problems
from rlhelpers.tasks.gym import check_gym, load_gym
from rlhelpers.tasks.task import Problem, Task

ACCEPTED = "tiny, gsm8k, gym/<name>, or a folder with train.jsonl and validation.jsonl"


def load_task(name: str, n_train_examples: int, n_val_examples: int) -> Task:
    """The task called `name`, cut to its first examples.

    "tiny": the embedded word problems; "gsm8k"; "gym/<name>": a data set of reasoning-gym; or a folder, of the working
    directory unless its path is absolute, with `train.jsonl` and `validation.jsonl` in GSM8K's format.  Raises
    ValueError for an unknown name, and when a number of examples is negative, not whole, or more than the task has;
    FileNotFoundError where data must be fetched first.
    """
    if not isinstance(name, str):
        raise refused("task", name, ACCEPTED)
    check_whole(0, n_train_examples=n_train_examples, n_val_examples=n_val_examples)
    if name.startswith("gym/"):
        return load_gym(name.removeprefix("gym/"), n_train_examples, n_val_examples)
    if name == "gsm8k":
        train, validation = load_gsm8k()
    elif name == "tiny":
        train, validation = read_folder(paths.TINY)
    elif os.path.isdir(name):  # not is_dir, which raises OSError for a name too long for a file
        train, validation = read_folder(Path(name))
    else:
        where = f"there is no folder {Path(name).absolute()}"
        raise ValueError(f"task: got {name[:200]!r}, and {where[:300]}; accepted is {ACCEPTED}")
    return Task(
        name,
        _first("n_train_examples", train, n_train_examples, name),
        _first("n_val_examples", validation, n_val_examples, name),
        judge_answer,
    )


def check_task(name: str, n_train_examples: int, n_val_examples: int) -> None:
    """Raise what load_task would, but for the problems of a gym, which take a while to make: of them only the name is
    looked up."""
    if isinstance(name, str) and name.startswith("gym/"):
        check_gym(name.removeprefix("gym/"))
    else:
        load_task(name, n_train_examples, n_val_examples)


def read_folder(folder: Path) -> tuple[list[Problem], list[Problem]]:
    files = [folder / "train.jsonl", folder / "validation.jsonl"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"task: got {str(folder)!r}; it has no {' and no '.join(missing)}")
    train, validation = map(read_problems, files)
    return train, validation


def _first(field: str, problems: list[Problem], count: int, task: str) -> list[Problem]:
    if count > len(problems):
        raise ValueError(f"{field}: got {count}; task {task!r} has {len(problems)}")
    return problems[:count]
