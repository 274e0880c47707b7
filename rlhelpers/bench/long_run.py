"""A long run of small steps, watched from outside: whether memory or open files grow with their number, and whether
every step stands in the log once."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rlhelpers import paths
from rlhelpers.bench.conditions import conditions
from rlhelpers.training.config import make_config

STEPS = 2000
# Two updates a step and old log-probs; validations, responses and checkpoints now and then, as in a run that matters.
SETTINGS = {
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
PROGRAM = """
import json, sys
from pathlib import Path
from rlhelpers import paths
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
paths.RUNS = Path(sys.argv[1])
train(make_config(**json.loads(sys.argv[2])))
"""


def bench_long(steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    """Measure in a process of its own, after a twentieth and half of the steps and after all; returns the report.
    Raises RuntimeError where the run fails."""
    found, settings = conditions(), SETTINGS | {"num_rollout_steps": steps} | settings
    config = make_config(**settings)
    log = paths.RUNS / config.experiment / config.variant / f"seed={config.seed}" / "metrics.jsonl"
    shutil.rmtree(log.parent, ignore_errors=True)  # an earlier one, whose lines are not to be taken for this one's
    started = time.perf_counter()
    arguments = [sys.executable, "-c", PROGRAM, str(paths.RUNS), json.dumps(settings)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    readings = _watch(process, log, [steps // 20, steps // 2, steps])
    if process.wait():
        raise RuntimeError(f"long: the run ended with exit status {process.returncode}")
    with open(log, encoding="utf-8") as lines:
        logged = [json.loads(line)["step"] for line in lines]
    return {
        "conditions": found,
        "settings": settings,
        "seconds": time.perf_counter() - started,
        "lines": len(logged) - 1,  # without step 0, the validation before training
        "each_step_once": logged == list(range(steps + 1)),
        "readings": readings,
    }


def _watch(process: subprocess.Popen, log: Path, marks: Sequence[int]) -> list[dict[str, float]]:
    """The first reading at or after each mark, or the last one before the process ended."""
    readings: list[dict[str, float]] = []
    latest: dict[str, float] = {}
    while process.poll() is None and len(readings) < len(marks):
        latest = _read(process, log) or latest
        if latest.get("step", 0) >= marks[len(readings)]:
            readings.append(latest)
        time.sleep(0.02)
    return readings + [latest] * (len(marks) - len(readings))


def _read(process: subprocess.Popen, log: Path) -> dict[str, float] | None:
    """What the process has now; None where it has just ended, or not begun to log."""
    try:
        step = log.read_bytes().count(b"\n") - 1
        seen = psutil.Process(process.pid)
        return {
            "step": step,
            "rss_mib": seen.memory_info().rss / 2**20,
            "open_files": seen.num_fds(),
            "threads": seen.num_threads(),
        }
    except (FileNotFoundError, psutil.Error):
        return None
