"""Run folders as tables."""

import json
from pathlib import Path
from typing import Any

import pandas as pd


def read_metrics(folder: Path) -> pd.DataFrame:
    """metrics.jsonl of a run: one row per step, indexed by `step`; a value that a step does not have is NaN.

    Raises FileNotFoundError when the folder holds no run, ValueError naming a line that is not JSON.
    """
    rows = read_jsonl(Path(folder) / "metrics.jsonl")
    return pd.DataFrame(rows).set_index("step").astype(float)


def read_rollouts(folder: Path, step: int, split: str) -> pd.DataFrame:
    """The responses that a run kept of one step; `split` is "train" or "validation"."""
    return pd.DataFrame(read_jsonl(Path(folder) / "rollouts" / f"step_{step:05d}_{split}.jsonl"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows
