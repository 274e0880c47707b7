"""Waiting for another process without waiting for ever."""

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlhelpers.rollouts.engine import EngineDeadError

T = TypeVar("T")


def bounded(action: Callable[[], T], seconds: float = math.inf, is_dead: Callable[[], bool] = lambda: False) -> T:
    """The action's result, or its error.  It has a thread of its own, which is left behind where it never returns.

    Raises EngineDeadError after `seconds`, or when `is_dead` says that nobody will answer any more.
    """
    outcome = {}

    def run():
        try:
            outcome["result"] = action()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while True:
        dead = is_dead()  # asked before the last look, so that an answer that came just in time counts
        thread.join(min(1.0, max(0.0, deadline - time.monotonic())))
        if "error" in outcome:
            raise outcome["error"]
        if not thread.is_alive():
            return outcome["result"]
        if dead:
            raise EngineDeadError("the engine's process is gone")
        if time.monotonic() >= deadline:
            raise EngineDeadError(f"the engine did not answer within {seconds} s")
