"""A server in a process group of its own, with its log in a file.

Waiting for another process without waiting for ever."""

import atexit
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

from rlhelpers.rollouts.engine import EngineDeadError

SECONDS_TO_STOP = 15
SECONDS_FOR_A_PORT = 3  # a server whose owner was killed ends within two


class ServerProcess:
    """Runs `command` until `stop`, or until this process exits.  What it prints is appended to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.log = Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._start = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that its children end with it
            )
        self.pid = self._process.pid
        atexit.register(self.stop)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 20) -> str:
        """The last lines that this process wrote."""
        with open(self.log, "rb") as file:
            file.seek(self._start)
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole group: politely, and after a while by force.  Safe to call twice."""
        deadline = time.monotonic() + SECONDS_TO_STOP
        try:
            self._signal(signal.SIGTERM)
            while self._group_lives() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:  # an interrupt does not save it
            self._signal(signal.SIGKILL)
            self._process.wait(SECONDS_TO_STOP)
            atexit.unregister(self.stop)

    def _group_lives(self) -> bool:
        self._process.poll()  # a dead child that nobody has asked for still counts as a member
        return self._signal(0)

    def _signal(self, number: int) -> bool:
        """False where the group is gone."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """What this process and children that start inside write to their standard output and error goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not closed: loggers that are made inside go on writing to it.
    file = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    try:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with redirect_stdout(file), redirect_stderr(file):  # which in a notebook are no files
            yield
    finally:
        for number, copy in enumerate(before, start=1):
            os.dup2(copy, number)
            os.close(copy)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def wait_for_port(host: str, port: int) -> None:
    """What a process has just left may be busy for a moment.  Raises ValueError naming the port."""
    deadline = time.monotonic() + SECONDS_FOR_A_PORT
    while not is_free(host, port):
        if time.monotonic() > deadline:
            raise ValueError(f"port: {port} is taken by another program; None takes a free one")
        time.sleep(0.1)


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was left a moment ago is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


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
