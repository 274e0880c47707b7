"""The bench of contention: its workers, its turns and its report; never how fast anything is."""

import io
import subprocess
import sys

import pytest

from rlhelpers.bench import contention
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import conditions

NAMES = list(contention.SETTINGS)


def test_the_report_from_numbers():
    own, ours = NAMES
    measured = {
        (own, False): [1.0, 2.0],
        (own, True): [10.0, 10.0],
        (ours, False): [1.0, 1.0],
        (ours, True): [1.5, 2.0],
    }
    made = contention.report(conditions(), measured)
    assert [row["waiting"] for row in made.rows] == NAMES
    assert made.rows[0]["busy_by_quiet"] == Spread(7.5, 5.0, 10.0)
    assert made.rows[1]["busy_by_quiet"] == Spread(1.75, 1.5, 2.0)
    assert made.rows[1]["quiet_by_default"] == Spread(0.75, 0.5, 1.0) and made.settings == {"rounds": 2}


ECHO = """
import os, sys
for line in sys.stdin:
    print(float(line) + (os.environ.get("GOMP_SPINCOUNT") == "300000"), flush=True)
"""


@pytest.fixture
def echoes(monkeypatch):
    """Workers that answer the number of the step, and 1 more where OpenMP's own default is set."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    start = subprocess.Popen
    started = []

    def popen(arguments, **settings):
        if arguments[1] == "-m":
            arguments = [sys.executable, "-c", ECHO]
        started.append(start(arguments, **settings))
        return started[-1]

    monkeypatch.setattr(contention.subprocess, "Popen", popen)
    monkeypatch.setattr(contention, "AWAKE", 0.0)
    return started


@pytest.mark.slow
def test_each_setting_has_a_process_of_its_own_and_all_end(echoes):
    own, ours = contention.bench_contention(rounds=2).rows
    assert own["quiet_seconds"] == own["busy_seconds"] == Spread(2.5, 2.0, 3.0)
    assert ours["quiet_seconds"] == ours["busy_seconds"] == Spread(1.5, 1.0, 2.0)
    assert len(echoes) == 2 + 2 * 3  # a busy process for each setting, in the warm-up and in two rounds
    assert all(process.poll() is not None for process in echoes)


@pytest.mark.slow
def test_a_worker_that_ends_is_an_error(monkeypatch):
    monkeypatch.setattr(contention, "__name__", "rlhelpers.no_such_module")
    with contention.worker({}) as process, pytest.raises(RuntimeError, match=r"contention: the process .* status 1"):
        contention._measure(process, False, 1)


@pytest.mark.slow
def test_a_worker_takes_a_step_for_each_line(monkeypatch, capsys):
    settings = {"group_size": 4, "rollout_batch_size": 8, "train_batch_size": 8, "max_tokens": 8, "n_val_examples": 4}
    make = contention.make_config
    monkeypatch.setattr(contention, "make_config", lambda **given: make(**given, **settings))
    contention.take_steps(io.StringIO("1\n2\n"))
    assert len([float(line) > 0 for line in capsys.readouterr().out.split()]) == 2
