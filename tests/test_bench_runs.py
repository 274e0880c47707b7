"""Benches of whole runs: their settings, what they leave, and the report; never how fast anything is."""

import pandas as pd
import pytest

from rlhelpers import cli, paths
from rlhelpers.bench import runs
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import conditions

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_runs_of_bench_ahead_differ_in_one_setting():
    in_turn, ahead_of = (runs.configuration(value, 10).model_dump(mode="json") for value in (False, True))
    assert {name for name in in_turn if in_turn[name] != ahead_of[name]} == {"rollouts_ahead", "variant"}
    assert in_turn["engine"] == "vllm-server" and in_turn["estimator"]["name"] == "offpolicy_clip"


def timed(sampling, training):
    steps = pd.DataFrame({"seconds_sampling": sampling, "seconds_training": training, "seconds_syncing": 0.0})
    return runs.TimedRun(steps.assign(response_length=40.0, mismatch_mean=1e-6), 1)


def test_ahead_from_numbers():
    measured = {
        "in turn": [
            timed([2.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0]),
            timed([3.0, 3.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0]),
        ],
        "one step ahead": [
            timed([2.0, 0.0, 0.0, 0.0], [4.0, 4.0, 5.0, 4.0]),
            timed([3.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 3.0]),
        ],
    }
    report = runs.ahead_report(conditions(), runs.configuration(False, 4), measured)
    first, second = report.rows
    assert first["seconds_per_step"] == Spread(6.5, 6.0, 7.0)
    assert second["seconds_per_step"] == Spread(4.0, 4.0, 5.0)  # neither the first step nor the last
    assert second["run_seconds"] == [19.0, 18.0]
    assert second["time_ratio"].low == pytest.approx(18 / 28) and second["time_ratio"].high == pytest.approx(19 / 24)
    assert (
        report.settings["updates_per_step"] == 16 and report.settings["steps"] == 4 and report.settings["rounds"] == 2
    )


def test_bench_ahead_runs_the_loop_and_leaves_nothing(monkeypatch, roots):
    """With the torch engine in the server's place, which cannot sample runs."""
    quick = {"quick": True, "device": "cpu", "n_val_examples": 2, "rollout_batch_size": 16, "train_batch_size": 16}
    config = runs.make_config(**quick, max_tokens=8, num_rollout_steps=3)
    monkeypatch.setattr(runs, "configuration", lambda ahead_of, steps: config)
    monkeypatch.setattr(runs, "vllm_threads", lambda log: 1)
    report = runs.bench_ahead(rounds=1, steps=3)
    assert report.rows[0]["time_ratio"] == Spread(1.0, 1.0, 1.0)
    assert roots[0] == paths.RUNS and not roots[0].exists()


def test_bench_ahead_needs_vllm(monkeypatch, roots, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "ahead"]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err
