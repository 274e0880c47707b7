"""How much memory something takes beyond what the process held before."""

import gc
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Self, TypeVar

import psutil

T = TypeVar("T")
INTERVAL = 1e-3  # seconds


class PeakMemory:
    """A context manager.  Afterwards `held`, bytes of RAM that this process had before, and `extra`, how many more it
    had at its peak inside.

    Looks every millisecond, so that a shorter peak is missed.  What the process freed before counts as held as long as
    the allocator keeps it: to compare, measure each thing in a process of its own, and once.
    """

    def __enter__(self) -> Self:
        gc.collect()
        self._process, self._done = psutil.Process(), threading.Event()
        self.held = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self._look()
        self.extra = self._peak - self.held

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss)


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result, from a new process; function, arguments and result are pickled."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
