"""Read the folder that an evaluation left, and sum it up."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhelpers.checks import is_number, shown
from rlhelpers.evidence.statistics import Interval, bootstrap_interval, proportion_interval
from rlhelpers.tasks.datasets import read_objects

Row = dict[str, Any]
ERRORS_SHOWN = 10
ABOUT = ("benchmark", "model", "metric", "seconds")
FIELDS = ("output", "finish_reason", "tokens", "prediction")


@dataclass(frozen=True)
class Report:
    """The sum of an evaluation.

    metric, interval: name and value; the value is None before a judge has spoken, or where no verdict could be read.
    unparsed: answers that could not be parsed, which count as wrong; or verdicts, which are left out of the metric.
    empty, truncated: answers without text, and generations that max_tokens cut.
    errors: at most ten rows that score less than a half, drawn at random.
    """

    benchmark: str
    model: str
    metric: str
    interval: Interval | None
    examples: int
    unparsed: int
    empty: int
    truncated: int
    seconds: float
    tokens: int
    errors: list[Row]

    @property
    def examples_per_second(self) -> float:
        return self.examples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def __str__(self) -> str:
        value = "no scores" if self.interval is None else f"{self.metric} {self.interval}"
        return (
            f"{self.model} on {self.benchmark}: {value}\n"
            f"{self.unparsed} of {self.examples} unparsed, {self.empty} empty, {self.truncated} cut at max_tokens\n"
            f"{self.seconds:.1f} s: {self.examples_per_second:.2f} examples/s, {self.tokens_per_second:.0f} tokens/s"
        )


def read_report(folder: Path, seed: int = 0) -> Report:
    """Sum up an evaluation.  `seed` decides which errors are shown.

    The scores are those of `judged.jsonl`, or of the one `*/annotations.json` that the alpaca_eval tool left, or else
    those of `responses.jsonl`.  Intervals are Wilson's where every score is 0 or 1, and else the bootstrap's.
    Raises FileNotFoundError or ValueError for a folder that holds no evaluation.
    """
    rows, about, judged = read_rows(folder), _about(folder / "evaluation.json"), _judged(folder)
    scored, parsed = (rows, "prediction") if judged is None else (judged, "score")
    scores = [row["score"] for row in scored if row["score"] is not None]
    is_waiting = judged is None and not scores  # for a judge
    wrong = [row for row in scored if row["score"] is not None and row["score"] < 0.5]
    return Report(
        benchmark=about["benchmark"],
        model=about["model"],
        metric=about["metric"],
        interval=_interval(scores) if scores else None,
        examples=len(rows),
        unparsed=0 if is_waiting else sum(row[parsed] is None for row in scored),
        empty=sum(not row["output"] for row in rows),
        truncated=sum(row["finish_reason"] == "length" for row in rows),
        seconds=about["seconds"],
        tokens=sum(row["tokens"] for row in rows),
        errors=random.Random(seed).sample(wrong, min(ERRORS_SHOWN, len(wrong))),
    )


def read_rows(folder: Path) -> list[Row]:
    """Read the lines of `responses.jsonl`.  Raises ValueError for one that no evaluation wrote."""
    return _scored(folder / "responses.jsonl", *FIELDS)


def _about(path: Path) -> Row:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file; every evaluation has one")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        seconds = [about[name] for name in ABOUT][-1]
        if not (is_number(seconds) and seconds > 0):
            raise ValueError(f"seconds: got {shown(seconds)}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error!r}; accepted is what an evaluation wrote: {', '.join(ABOUT)}") from error
    return about


def _judged(folder: Path) -> list[Row] | None:
    """Read what a judge said; None before it has spoken."""
    if (folder / "judged.jsonl").is_file():
        return _scored(folder / "judged.jsonl")
    found = sorted(folder.glob("*/annotations.json"))
    if len(found) > 1:
        raise ValueError(f"{folder}: has {len(found)} annotations.json, of several annotators; accepted is one")
    return annotation_scores(found[0]) if found else None


def _scored(path: Path, *fields: str) -> list[Row]:
    rows = read_objects(path)
    for number, row in rows:
        if missing := [name for name in (*fields, "score") if name not in row]:
            raise ValueError(f"{path}, line {number}: {', '.join(missing)}: missing; every evaluation has it")
        score = row["score"]
        if score is not None and not (is_number(score) and 0 <= score <= 1):
            raise ValueError(f"{path}, line {number}: score: got {shown(score)}; accepted are 0 to 1 and null")
    return [row for _, row in rows]


def annotation_scores(path: Path) -> list[Row]:
    """Read the annotations of the alpaca_eval tool, with the `score` of the model, which is the tool's `output_2`.

    1.0 where it is preferred, 0.0 where the reference is, 0.5 for a draw; None where the tool read no preference.
    """
    rows = []
    for number, row in read_objects(path):
        preference = row.get("preference")
        if preference is not None and not (is_number(preference) and 1 <= preference <= 2):
            got = f"{path}, annotation {number}: preference: got {preference!r}"
            raise ValueError(f"{got}; accepted are 1 to 2 and null")
        rows.append(row | {"score": None if preference is None else preference - 1.0})
    return rows


def _interval(scores: list[float]) -> Interval:
    is_proportion = set(scores) <= {0.0, 1.0}
    return proportion_interval(scores, of="example") if is_proportion else bootstrap_interval(scores, of="example")
