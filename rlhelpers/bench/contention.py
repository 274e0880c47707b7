"""A step of the default run on a quiet machine, and beside a process that keeps a core busy.

OpenMP's threads spin at every barrier.  Where another process has their core, the others wait for them, and spin too.
GOMP_SPINCOUNT (KMP_BLOCKTIME of LLVM's OpenMP) says how long they spin before they sleep.  It is read when torch is
loaded, so each setting is measured in a process of its own.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial

from rlhelpers.bench.case import Case
from rlhelpers.bench.measure import Clock, Spread, in_turns
from rlhelpers.bench.report import Report, conditions
from rlhelpers.bench.step import package
from rlhelpers.training.config import make_config

ROUNDS = 5
OWN = "OpenMP's own default"
SETTINGS = {
    OWN: {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"},  # GNU's in spins, LLVM's in milliseconds
    "as the package sets it": {},
}
AWAKE = 0.3  # seconds until the busy process is at work
NOTES = [
    "A step of the default run: sampling, grading and training.  busy: beside one process that keeps a core busy.",
    "busy by quiet: seconds beside the busy process divided by those without it, round by round.",
    "quiet by default: seconds on the quiet machine divided by those with OpenMP's own default, round by round.",
]


def bench_contention(rounds: int = ROUNDS) -> Report:
    """Measure step 1, 2, ... of the default run, each from the initial weights."""
    found = conditions()
    with ExitStack() as stack:
        workers = {name: start(stack, variables) for name, variables in SETTINGS.items()}
        turns = {
            (name, busy): partial(_measure, pool, busy) for busy in (False, True) for name, pool in workers.items()
        }
        in_turns(turns, 1)
        measured = in_turns(turns, rounds)
    quiet, busy = ({name: measured[name, is_busy] for name in SETTINGS} for is_busy in (False, True))
    rows = [
        {
            "waiting": name,
            "quiet_seconds": Spread.of(quiet[name]),
            "busy_seconds": Spread.of(busy[name]),
            "busy_by_quiet": Spread.of_ratios(busy[name], quiet[name]),
            "quiet_by_default": Spread.of_ratios(quiet[name], quiet[OWN]),
        }
        for name in SETTINGS
    ]
    return Report("contention", found, {"rounds": rounds}, rows, NOTES)


def start(stack: ExitStack, variables: Mapping[str, str]) -> ProcessPoolExecutor:
    """Start a process with these variables, which ends with the stack."""
    before = dict(os.environ)
    pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
    os.environ.update(variables)
    try:
        pool.submit(os.getpid).result()  # the process is started by its first task
    finally:
        os.environ.clear()
        os.environ.update(before)
    return pool


def _measure(pool: ProcessPoolExecutor, busy: bool, number: int) -> float:
    with ExitStack() as stack:
        if busy:
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(other.kill)
            time.sleep(AWAKE)
        return pool.submit(take_step, number).result()


@cache
def _case() -> Case:
    return Case.of(make_config(experiment="bench", device="cpu"))


def take_step(number: int) -> float:
    """Return the seconds of step `number` of the default run, from the initial weights."""
    clock = Clock()
    package(_case(), _case().model(), number, clock)
    return clock.seconds
