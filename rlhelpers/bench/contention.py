"""A step of the default run on a quiet machine, and beside a process that keeps a core busy.

OpenMP's threads spin at every barrier.  Where another process has their core, the others wait for them, and spin too:
how long they do so before they sleep (GOMP_SPINCOUNT; KMP_BLOCKTIME of LLVM's OpenMP) decides how much slower a step
gets.  It is read when torch is loaded, so each setting is measured in a process of its own.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

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
BUSY = "while True: pass"
AWAKE = 0.3  # seconds until the busy process is at work

Turn = tuple[str, bool]
"""A setting's name, and whether a core is busy."""


def bench_contention(rounds: int = ROUNDS) -> Report:
    """Measure step 1, 2, ... of the default run, each from the initial weights."""
    found = conditions()
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(variables)) for name, variables in SETTINGS.items()}
        turns = {
            (name, busy): partial(_measure, process, busy)
            for busy in (False, True)
            for name, process in workers.items()
        }
        in_turns(turns, 1)
        measured = in_turns(turns, rounds)
    return report(found, measured)


@contextmanager
def worker(variables: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Start a process that takes a step for each line that it is given; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # at the end its input is closed, and it ends
        yield process


def _measure(process: subprocess.Popen, busy: bool, number: int) -> float:
    """Return the seconds of step `number`.  Raise RuntimeError where the worker ended."""
    with ExitStack() as stack:
        if busy:
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(other.kill)
            time.sleep(AWAKE)
        print(number, file=process.stdin, flush=True)
        answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"contention: the process that takes the steps ended with exit status {process.wait()}")
    return float(answer)


def take_steps(lines: Iterator[str]) -> None:
    """Print the seconds of the step that each line numbers."""
    case = Case.of(make_config(experiment="bench", device="cpu"))
    for line in lines:
        clock = Clock()
        package(case, case.model(), int(line), clock)
        print(clock.seconds, flush=True)


def report(found: Mapping[str, Any], measured: Mapping[Turn, Sequence[float]]) -> Report:
    """Make a row for each setting."""
    rows = [
        {
            "waiting": name,
            "quiet_seconds": Spread.of(measured[name, False]),
            "busy_seconds": Spread.of(measured[name, True]),
            "busy_by_quiet": Spread.of_ratios(measured[name, True], measured[name, False]),
            "quiet_by_default": Spread.of_ratios(measured[name, False], measured[OWN, False]),
        }
        for name in SETTINGS
    ]
    notes = [
        "A step of the default run: sampling, grading and training.  busy: beside one process that keeps a core busy.",
        "busy by quiet: seconds beside the busy process divided by those without it, round by round.",
        "quiet by default: seconds on the quiet machine divided by those with OpenMP's own default, round by round.",
    ]
    return Report("contention", found, {"rounds": len(measured[OWN, False])}, rows, notes)


if __name__ == "__main__":
    take_steps(sys.stdin)
