"""Whole runs by the loop itself: with and without sampling one step ahead; and a long one, watched from outside."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import psutil
import torch

from rlhelpers import paths
from rlhelpers.bench.engines import vllm_threads
from rlhelpers.bench.measure import MIB, Spread, in_turns
from rlhelpers.bench.report import Report, conditions
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.loop import train

ROUNDS = 2
STEPS, LONG_STEPS = 10, 2000
# Two updates a step and old log-probs; validations, responses and checkpoints now and then, as in a run that matters.
LONG = {
    "quick": True,
    "experiment": "bench_long",
    "device": "cpu",
    "estimator": "offpolicy_clip",
    "n_train_examples": 8,
    "n_val_examples": 2,
    "group_size": 2,
    "rollout_batch_size": 4,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_tokens": 4,
    "eval_every": 50,
    "rollouts_every": 50,
    "checkpoint_every": 100,
}
AHEAD_NOTES = [
    "seconds per step: without validation, over the steps from the second to the last but one.",
    "all steps: seconds of a run, its first and last step too; the time ratio is theirs.",
    "sampling: seconds that the trainer waits for rollouts.",
    "mismatch mean: one step ahead, the samples are those of the policy before its last updates.",
    "This is the time of a step, not what a step teaches: that takes runs with several seeds.",
]


# A process that trains and imports nothing else.
PROGRAM = """
import json, sys
from pathlib import Path
from rlhelpers import paths
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
paths.RUNS = Path(sys.argv[1])
train(make_config(**json.loads(sys.argv[2])))
"""


class TimedRun(NamedTuple):
    """A finished run's metrics, one row for each step but step 0, and the threads of its engine."""

    steps: pd.DataFrame
    threads: int | None

    @property
    def seconds(self) -> pd.Series:
        """Of each step, without its validation."""
        return self.steps[["seconds_sampling", "seconds_training", "seconds_syncing"]].sum(axis=1)


def bench_ahead(rounds: int = ROUNDS, steps: int = STEPS) -> Report:
    """Train off-policy on the tiny model with the vLLM server, in a temporary folder.  Raise ValueError where vLLM is
    not installed."""
    found = conditions()
    configs = {name: configuration(ahead, steps) for name, ahead in (("in turn", False), ("one step ahead", True))}
    before = paths.RUNS
    with tempfile.TemporaryDirectory(prefix="rlhelpers-bench-") as folder:
        paths.RUNS = Path(folder)
        try:
            runs = in_turns({name: partial(_run, config) for name, config in configs.items()}, rounds)
        finally:
            paths.RUNS = before
    return ahead_report(found, configs["in turn"], runs)


def configuration(ahead: bool, steps: int) -> RunConfig:
    """Return notebook 06's sixteen updates for each batch; only the first and the last step are validated, cheaply."""
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


def _run(config: RunConfig, number: int) -> TimedRun:
    folder = train(config.model_copy(update={"seed": number}))
    return TimedRun(read_metrics(folder).loc[1:], vllm_threads(folder / "engine.log"))


def ahead_report(found: Mapping[str, Any], config: RunConfig, runs: Mapping[str, Sequence[TimedRun]]) -> Report:
    """Make a row for each kind of run."""
    totals = {name: [run.seconds.sum() for run in kind] for name, kind in runs.items()}
    first, base = next(iter(runs.values())), next(iter(totals.values()))
    rows = []
    for name, kind in runs.items():
        # One step ahead, the first step samples two batches and the last none.
        sampling = [run.steps["seconds_sampling"].iloc[1:-1] for run in kind]
        row = {
            "rollouts": name,
            "seconds_per_step": Spread.of([s for run in kind for s in run.seconds.iloc[1:-1]]),
            "sampling": Spread.of([s for run in sampling for s in run]),
            "all_steps": Spread.of(totals[name]),
            "time_ratio": Spread.of_ratios(totals[name], base),
        }
        means = pd.concat([run.steps for run in kind])[["response_length", "mismatch_mean"]].mean()
        rows.append(row | means.to_dict() | {"run_seconds": totals[name]})
    settings = {
        "trainer_threads": torch.get_num_threads(),
        "server_threads": first[0].threads,
        "estimator": config.estimator.name,
        "steps": config.num_rollout_steps,
        "updates_per_step": config.updates_per_step,
        "rounds": len(first),
    }
    return Report("ahead", found, settings, rows, AHEAD_NOTES)


def bench_long(steps: int = LONG_STEPS, **settings: Any) -> Report:
    """Run small steps in a process of its own; look at it after a twentieth and half of the steps and after all.  Raise
    RuntimeError where the run fails."""
    found, settings = conditions(), LONG | {"num_rollout_steps": steps} | settings
    config = make_config(**settings)
    log = paths.RUNS / config.experiment / config.variant / f"seed={config.seed}" / "metrics.jsonl"
    shutil.rmtree(log.parent, ignore_errors=True)  # else an earlier run's lines would be taken for this one's
    started = time.perf_counter()
    arguments = [sys.executable, "-c", PROGRAM, str(paths.RUNS), json.dumps(settings)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    rows = _watch(process, log, [steps // 20, steps // 2, steps])
    if process.wait():
        raise RuntimeError(f"long: the run ended with exit status {process.returncode}")
    logged = read_metrics(log.parent).index.tolist()
    seen = {
        "seconds": time.perf_counter() - started,
        "steps_in_the_log": len(logged) - 1,  # without step 0, the validation before training
        "each_step_once": logged == list(range(steps + 1)),
    }
    return Report("long", found, seen | {"configuration": settings}, rows)


def _watch(process: subprocess.Popen, log: Path, marks: Sequence[int]) -> list[dict[str, float]]:
    """Return the first reading at or after each mark, or the last one before the process ended."""
    readings: list[dict[str, float]] = []
    latest: dict[str, float] = {}
    while process.poll() is None and len(readings) < len(marks):
        with suppress(FileNotFoundError, psutil.Error):  # it has not begun to log, or has just ended
            step, seen = log.read_bytes().count(b"\n") - 1, psutil.Process(process.pid)
            latest = {"after_step": step, "memory_MiB": seen.memory_info().rss / MIB}
            latest |= {"open_files": seen.num_fds(), "threads": seen.num_threads()}
        if latest.get("after_step", 0) >= marks[len(readings)]:
            readings.append(latest)
        time.sleep(0.02)
    return readings + [latest] * (len(marks) - len(readings))
