"""Processes of the tests: waiting for them, and seeing that they are gone."""

import time
from collections.abc import Callable

import psutil


def wait_until(is_true: Callable[[], object], seconds: float = 60) -> None:
    """Returns when it is true; fails the test after a time that no machine needs."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A dead process that its parent has not asked for, a zombie, is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
