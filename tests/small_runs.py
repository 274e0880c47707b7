"""A run of a second, what it leaves, and when two of them are the same."""

import json
from pathlib import Path

from killable import PUSH

from rlhelpers.evidence.runs import read_metrics

# Two updates for each batch of rollouts, of which the second needs the old policy; checkpoints after 2, 4 and 5.
SMALL = {
    "quick": True,
    "device": "cpu",
    "n_train_examples": 8,
    "n_val_examples": 2,
    "rollout_batch_size": 16,
    "train_batch_size": 8,
    "max_tokens": 8,
    "num_rollout_steps": 5,
    "checkpoint_every": 2,
    "eval_every": 2,
    "learning_rate": 1e-2,
    "estimator": PUSH,
    "variant": "killed",
}
FOLDER = Path("quick", "killed", "seed=0")


def without_times(folder):
    metrics = read_metrics(folder)
    return metrics.drop(columns=[name for name in metrics if "seconds" in name])


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def assert_same(resumed, whole):
    assert without_times(resumed).equals(without_times(whole))
    for name in ("rollouts", "policy"):
        assert contents(resumed / name) == contents(whole / name)
    assert not (resumed / "checkpoints").exists() and not list(resumed.glob("*.tmp"))
    assert read_about(resumed)["status"] == "complete"


def read_about(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))
