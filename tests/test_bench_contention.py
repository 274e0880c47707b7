"""The bench of contention: its workers, its turns and its report; never how fast anything is."""

import os
import subprocess
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

import pytest

from rlhelpers.bench import contention
from rlhelpers.bench.measure import Spread

NAMES = list(contention.SETTINGS)


def test_the_report_from_numbers(monkeypatch):
    own, ours = NAMES
    numbers = {
        (own, False): [0, 1.0, 2.0],  # the first is the warm-up
        (own, True): [0, 10.0, 10.0],
        (ours, False): [0, 1.0, 1.0],
        (ours, True): [0, 1.5, 2.0],
    }
    names = iter(NAMES)
    monkeypatch.setattr(contention, "start", lambda stack, variables: next(names))
    monkeypatch.setattr(contention, "_measure", lambda name, busy, number: numbers[name, busy].pop(0))
    made = contention.bench_contention(rounds=2)
    assert [row["waiting"] for row in made.rows] == NAMES
    assert made.rows[0]["busy_by_quiet"] == Spread(7.5, 5.0, 10.0)
    assert made.rows[1]["busy_by_quiet"] == Spread(1.75, 1.5, 2.0)
    assert made.rows[1]["quiet_by_default"] == Spread(0.75, 0.5, 1.0) and made.settings == {"rounds": 2}


def echo(number):
    """The number, and 1 more where OpenMP's own default is set."""
    return number + float(os.environ["GOMP_SPINCOUNT"] == "300000")


@pytest.mark.slow
def test_each_setting_has_its_own_process_and_all_end(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setattr(contention, "take_step", echo)
    monkeypatch.setattr(contention, "AWAKE", 0.0)
    busy, start = [], subprocess.Popen
    monkeypatch.setattr(contention.subprocess, "Popen", lambda *given: busy.append(start(*given)) or busy[-1])
    own, ours = contention.bench_contention(rounds=2).rows
    assert own["quiet_seconds"] == own["busy_seconds"] == Spread(2.5, 2.0, 3.0)
    assert ours["quiet_seconds"] == ours["busy_seconds"] == Spread(1.5, 1.0, 2.0)
    assert len(busy) == 2 * 3  # one for each setting, in the warm-up and in two rounds
    assert all(process.poll() is not None for process in busy) and os.environ["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.slow
def test_a_worker_that_ends_is_an_error(monkeypatch):
    monkeypatch.setattr(contention, "take_step", os._exit)
    with ExitStack() as stack, pytest.raises(BrokenProcessPool, match="terminated abruptly"):
        contention._measure(contention.start(stack, {}), False, 1)


@pytest.mark.slow
def test_a_worker_takes_steps(monkeypatch):
    settings = {"group_size": 4, "rollout_batch_size": 8, "train_batch_size": 8, "max_tokens": 8, "n_val_examples": 4}
    make = contention.make_config
    monkeypatch.setattr(contention, "make_config", lambda **given: make(**given, **settings))
    assert contention.take_step(1) > 0 and contention.take_step(2) > 0
    contention._case.cache_clear()
