"""What sampling one step ahead gains: the same runs by the loop itself, with and without it, in turns."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rlhelpers import paths
from rlhelpers.bench.conditions import conditions
from rlhelpers.bench.engines import vllm_threads
from rlhelpers.bench.rounds import Spread, in_turns
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.loop import train

ROUNDS = 2
STEPS = 10


@dataclass(frozen=True)
class TimedRun:
    """A finished run's metrics, one row for each step without validation, and the threads of its engine."""

    steps: pd.DataFrame
    threads: int | None


def bench_ahead(rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, Any]:
    """Train off-policy on the tiny model with the vLLM server; returns the report.

    Its runs go to a temporary folder.  Raises ValueError where vLLM is not installed.
    """
    found = conditions()
    configs = {name: configuration(ahead, steps) for name, ahead in (("in turn", False), ("one step ahead", True))}
    turns = {name: partial(_run, config) for name, config in configs.items()}
    with temporary_runs():
        runs = in_turns(turns, rounds)
    return report(found, configs["in turn"], runs)


def configuration(ahead: bool, steps: int) -> RunConfig:
    """Notebook 06's sixteen updates for each batch; the first and the last step alone are validated, and cheaply."""
    return make_config(
        experiment="bench",
        estimator="offpolicy_clip",
        engine="vllm-server",
        rollouts_ahead=ahead,
        train_batch_size=8,
        gradient_accumulation_steps=1,
        num_rollout_steps=steps,
        eval_every=steps,
        n_val_examples=16,
    )


@contextmanager
def temporary_runs() -> Iterator[None]:
    """Runs that start inside leave nothing."""
    before = paths.RUNS
    with tempfile.TemporaryDirectory(prefix="rlhelpers-bench-") as folder:
        paths.RUNS = Path(folder)
        try:
            yield
        finally:
            paths.RUNS = before


def _run(config: RunConfig, number: int) -> TimedRun:
    folder = train(config.model_copy(update={"seed": number}))
    return TimedRun(read_metrics(folder).loc[1:], vllm_threads(folder / "engine.log"))


def report(found: Mapping[str, Any], config: RunConfig, runs: Mapping[str, Sequence[TimedRun]]) -> dict[str, Any]:
    """Everything that was measured, for a file.  `ratio`: of the seconds of all steps to those of the first kind,
    round by round; below 1 is faster."""
    base = [step_seconds(run.steps).sum() for run in next(iter(runs.values()))]
    return {
        "conditions": dict(found),
        "threads": {"trainer": torch.get_num_threads(), "server": next(iter(runs.values()))[0].threads},
        "estimator": config.estimator.name,
        "steps": config.num_rollout_steps,
        "updates_per_step": config.updates_per_step,
        "runs": {name: summary(kind, base) for name, kind in runs.items()},
    }


def summary(runs: Sequence[TimedRun], base: Sequence[float]) -> dict[str, Any]:
    """Of the runs of one kind.  The first step samples two batches and the last none where they are sampled ahead, so
    that single steps compare from the second to the last but one."""
    totals = [step_seconds(run.steps).sum() for run in runs]
    between = [run.steps.iloc[1:-1] for run in runs]
    return {
        "seconds_per_step": asdict(Spread.of([s for rows in between for s in step_seconds(rows)])),
        "seconds_sampling": asdict(Spread.of([s for rows in between for s in rows["seconds_sampling"]])),
        "all_steps": asdict(Spread.of(totals)),
        "run_seconds": totals,
        "ratio": asdict(Spread.of([total / b for total, b in zip(totals, base, strict=True)])),
        "response_length": pd.concat([run.steps["response_length"] for run in runs]).mean(),
        "mismatch_mean": pd.concat([run.steps["mismatch_mean"] for run in runs]).mean(),
    }


def step_seconds(steps: pd.DataFrame) -> pd.Series:
    """Of each step, its validation left out."""
    return steps["seconds_sampling"] + steps["seconds_training"] + steps["seconds_syncing"]
