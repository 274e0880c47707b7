"""Run folders as tables."""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlhelpers.checks import check_kind, check_one_of, check_whole


def read_metrics(folder: Path) -> pd.DataFrame:
    """metrics.jsonl of a run: one row per step, indexed by `step`; a value that a step does not have is NaN.

    Raises FileNotFoundError when the folder holds no run, ValueError naming a line that is not JSON, a step that does
    not come after the one before, or a file without any.
    """
    check_kind((str, Path), "a run's folder", folder=folder)
    file = Path(folder) / "metrics.jsonl"
    metrics = pd.DataFrame(read_jsonl(file))
    if "step" not in metrics:
        raise ValueError(f"{file}: it has no step")
    metrics = metrics.set_index("step").astype(float)
    late = metrics.index[1:][~(metrics.index[1:] > metrics.index[:-1])]
    if len(late):
        raise ValueError(f"{file}: step {late[0]} stands after a step that is not before it")
    return metrics


def seconds_by_part(metrics: pd.DataFrame) -> pd.Series:
    """Where the time of a run went, in seconds of wall clock: `sampling`, `training` (its grading too), `syncing`,
    `validation`, and `rest`, which is what is done to keep responses and metrics.

    metrics: as read_metrics gives them.  Loading model and task, before step 0, is in none.  Validation has no clock of
    its own: it is what its steps take beyond the median rest of the others, and so needs a step without one.
    """
    clocks = ["seconds_sampling", "seconds_training", "seconds_syncing"]
    timed = metrics.reindex(columns=clocks).fillna(0.0)
    other = metrics["seconds"] - timed.sum(axis=1)
    validated = metrics["val_reward"].notna()
    usual = other[~validated].median()
    parts = timed.sum().rename(lambda name: name.removeprefix("seconds_"))
    validation = (other[validated] - usual).sum()
    return pd.concat([parts, pd.Series({"validation": validation, "rest": other.sum() - validation})])


def table_of_times(runs: Mapping[str, Sequence[Path]]) -> pd.DataFrame:
    """A column for each name, of medians over the folders of its runs, in seconds: the parts (see seconds_by_part), the
    `whole run`, and `one step`, which is the median step without validation."""
    check_kind(Mapping, "folders by name", runs=runs)
    columns = {name: [read_metrics(folder) for folder in folders] for name, folders in runs.items()}
    return pd.DataFrame({name: pd.DataFrame(map(_times, found)).median() for name, found in columns.items()})


def _times(metrics: pd.DataFrame) -> pd.Series:
    step = metrics.loc[metrics["val_reward"].isna(), "seconds"].median()
    return pd.concat([seconds_by_part(metrics), pd.Series({"whole run": metrics["seconds"].sum(), "one step": step})])


def read_rollouts(folder: Path, step: int, split: str) -> pd.DataFrame:
    """The responses that a run kept of one step; `split` is "train" or "validation"."""
    check_kind((str, Path), "a run's folder", folder=folder)
    check_whole(0, step=step)
    check_one_of(("train", "validation"), split=split)
    return pd.DataFrame(read_jsonl(Path(folder) / "rollouts" / f"step_{step:05d}_{split}.jsonl"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """A row for each line.  A last line that was cut off, by a kill or while it is written, is left out with a warning;
    ValueError names any other that is not JSON."""
    rows = []
    with open(path, "rb") as lines:  # decoded one by one: it may be cut off within a letter
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    warnings.warn(f"{path}, line {number}: it was cut off, and is left out", stacklevel=2)
                    break
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows
