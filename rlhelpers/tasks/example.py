"""What a benchmark asks, and what its answers are worth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Example:
    """`fields`: what of its row in the data file is kept beside an answer.  `instruction`: what the model is asked.
    `ground_truth`: None where another model judges the answer."""

    fields: Mapping[str, Any]
    instruction: str
    ground_truth: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """`metric`: what its scores are called.  `read`: the examples of a file or folder.

    `parse`: the answer that a text gives, or None; `is_right(answer, ground truth)`.  Both are None where another model
    judges; then `judge_file` is the name of the file that the judge reads, and `to_judge(rows, generator)` its text,
    where `rows` have the fields of an example and the model's `output`, and `generator` is the model's name.
    """

    name: str
    metric: str
    read: Callable[[Path], list[Example]]
    parse: Callable[[str], str | None] | None = None
    is_right: Callable[[str, str], bool] | None = None
    judge_file: str | None = None
    to_judge: Callable[[list[dict[str, Any]], str], str] | None = None
