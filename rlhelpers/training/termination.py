"""SIGTERM, which a cluster sends some seconds before it kills."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(BaseException):
    """SIGTERM, as an exception in the main thread."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """SIGTERM inside leaves the block as an exception does, so that files are whole and records say what happened; then
    the process ends by it after all (exit status 143 in a shell).

    Further ones change nothing meanwhile.  In other threads than the main one, and where somebody else handles SIGTERM
    already, nothing is different.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("SIGTERM")
