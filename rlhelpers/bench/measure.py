"""How a bench measures: contestants in turns, seconds by the clock, memory at its fullest moment, tokens that a model
reads."""

import gc
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from rlhelpers.models import cache_argument

T = TypeVar("T")
INTERVAL = 1e-3  # seconds between two looks at a process's memory
MIB, GIB = 2**20, 2**30


def in_turns(contestants: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call the contestants A B C A B C ... with the numbers 1 to `rounds`; return the results of each.

    What else the machine does meanwhile falls on all alike.
    """
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
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], base: Sequence[float]) -> Self:
        """The ratios of each round; not the ratio of the medians, in which the rounds would be mixed."""
        return cls.of([value / b for value, b in zip(values, base, strict=True)])


def compare_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Spread]]:
    """Return for each contestant its `seconds` and its `time_ratio` to the first one."""
    base = next(iter(seconds.values()))
    return {
        name: {"seconds": Spread.of(rows), "time_ratio": Spread.of_ratios(rows, base)} for name, rows in seconds.items()
    }


class Clock:
    """A context manager.  Afterwards `seconds` of wall clock, and `cores`: how many were busy on average with this
    process and its children."""

    def __enter__(self) -> Self:
        self._cpu_seconds, self._started = _cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self._started
        after = _cpu_seconds()
        self.cores = sum(after[pid] - self._cpu_seconds.get(pid, 0.0) for pid in after) / self.seconds


def _cpu_seconds() -> dict[int, float]:
    """CPU time so far of this process and of each living one below it, by process id."""
    found, own = {}, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        with suppress(psutil.Error):  # it ended, or is about to
            found[process.pid] = sum(process.cpu_times()[:2])  # user and system
    return found


class PeakMemory:
    """A context manager.  Afterwards `extra`: the bytes of RAM of this process at its peak, less those before.

    It looks every millisecond and misses a shorter peak.  Memory that was freed before counts as held while the
    allocator keeps it: to compare, measure each thing once, in a process of its own.
    """

    def __enter__(self) -> Self:
        gc.collect()
        self._process, self._done = psutil.Process(), threading.Event()
        self._before = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.extra = self._peak - self._before

    def _watch(self) -> None:
        done = False
        while not done:
            done = self._done.wait(INTERVAL)
            self._peak = max(self._peak, self._process.memory_info().rss)


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Return the function's result from a new process; function, arguments and result are pickled."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Call the function; return the bytes of tensors at their fullest moment, beyond those that were there before.

    On CUDA torch's allocator counts.  On the CPU torch's profiler notes every block, which is slow; what a library
    takes without torch's allocator is not seen.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        trace = json.loads(Path(folder, "trace.json").read_text("utf-8"))
    events = [event for event in trace["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    return max(accumulate((event["args"]["Bytes"] for event in events), initial=0))


class Read(NamedTuple):
    """One forward pass: `rows` of `width` tokens, padding included, which see `past` tokens of a cache before them."""

    rows: int
    width: int
    past: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[list[Read]]:
    """Give a list that gets every forward pass inside."""
    reads = []

    def note(module, _, arguments) -> None:
        cache = arguments.get(cache_argument(model))
        reads.append(Read(*arguments["input_ids"].shape, 0 if cache is None else cache.get_seq_length()))

    hook = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield reads
    finally:
        hook.remove()
