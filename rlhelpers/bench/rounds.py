"""Measuring in turns: what else the machine does then falls on all alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

import psutil

T = TypeVar("T")


def in_turns(contestants: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """A B C A B C ...: what each contestant gives in the rounds 1, 2, ..., `rounds`."""
    results = {name: [] for name in contestants}
    for number in range(1, rounds + 1):
        for name, contestant in contestants.items():
            results[name].append(contestant(number))
    return results


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Raises ValueError where there are none."""
        if not values:
            raise ValueError("values: got none; accepted is one for each round, at least one")
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def compare_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """For each contestant the spread of its `seconds`, the `ratio` to those of the first, round by round, above 1 where
    it is slower, and the number of `rounds`."""
    base = next(iter(seconds.values()))
    return {
        name: {
            "seconds": asdict(Spread.of(rows)),
            "ratio": asdict(Spread.of([s / b for s, b in zip(rows, base, strict=True)])),
            "rounds": len(rows),
        }
        for name, rows in seconds.items()
    }


class Clock:
    """A context manager.  Afterwards `seconds` of wall clock, and `cores`: how many of them were busy on average with
    this process and those below it."""

    def __enter__(self) -> Self:
        self._cpu_seconds, self._started = cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self._started
        after = cpu_seconds()
        self.cores = sum(after[pid] - self._cpu_seconds.get(pid, 0.0) for pid in after) / self.seconds


def cpu_seconds() -> dict[int, float]:
    """CPU time so far of this process and of each one below it that lives."""
    found = {}
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended, or is about to
            continue
        found[process.pid] = times.user + times.system
    return found
