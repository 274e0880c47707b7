"""How long a reader waits before anything happens: the imports, and the command's help."""

import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

from rlhelpers.bench.measure import Spread, in_turns
from rlhelpers.bench.report import Report, conditions

ROUNDS = 5
MODULES = (
    "rlhelpers",
    "rlhelpers.cli",
    "rlhelpers.tasks",
    "rlhelpers.kernels",
    "rlhelpers.rollouts",
    "rlhelpers.training.loop",
    "rlhelpers.exercises",
    "rlhelpers.evidence.figures",
)
PROGRAMS = (
    {"python": "import sys", "torch": "import torch, sys"}
    | {module: f"import {module}, sys" for module in MODULES}
    | {"rlhelpers --help": "import rlhelpers.cli, sys\ntry: rlhelpers.cli.main(['--help'])\nexcept SystemExit: pass"}
)


class Start(NamedTuple):
    """CPU seconds of a whole process, and whether torch was in it."""

    seconds: float
    has_torch: bool


NOTES = [
    "CPU seconds: of a whole process, median (lowest to highest) of rounds in turns, after a warm-up.",
    "beyond: the median above that of python, or of torch where torch is imported.",
]


def bench_imports(rounds: int = ROUNDS) -> Report:
    """Measure each import in a process of its own."""
    found = conditions()
    turns = {name: partial(start, program) for name, program in PROGRAMS.items()}
    in_turns(turns, 1)  # files are read from the disk, and compiled
    measured = in_turns(turns, rounds)
    seconds = {name: Spread.of([start.seconds for start in starts]) for name, starts in measured.items()}
    base = {False: seconds["python"].median, True: seconds["torch"].median}
    rows = []
    for name, spread in seconds.items():
        has_torch = measured[name][0].has_torch
        beyond = spread.median - base[has_torch]
        rows.append({"start": name, "CPU_seconds": spread, "torch": has_torch, "beyond": beyond})
    return Report("imports", found, {"rounds": rounds}, rows, NOTES)


def start(program: str, number: int) -> Start:
    """Raise RuntimeError with the last line of what the process said where it failed."""
    before = os.times()
    arguments = [sys.executable, "-c", f"{program}\nprint('torch' in sys.modules)"]
    done = subprocess.run(arguments, capture_output=True, encoding="utf-8")
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"imports: {program!r} failed: {done.stderr.strip().splitlines()[-1]}")
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(seconds, done.stdout.endswith("True\n"))
