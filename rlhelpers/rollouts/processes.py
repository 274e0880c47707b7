"""Processes beside this one: a server with its log, ports, output, and waits that end."""

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
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from rlhelpers.rollouts.engine import EngineDeadError

T = TypeVar("T")
SECONDS_TO_STOP = 15
SECONDS_FOR_A_PORT = 3  # a server whose owner was killed ends within two
OWNER = "RLHELPERS_VLLM_OWNER"


class ServerProcess:
    """Runs `command` until `stop`, or until this process exits.  Its output is appended to `log`."""

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
                start_new_session=True,  # a process group of its own, so that its children end with it
            )
        self.pid = self._process.pid
        atexit.register(self.stop)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that this process wrote."""
        with open(self.log, "rb") as file:
            file.seek(self._start)
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End the whole process group: by SIGTERM, and after SECONDS_TO_STOP by SIGKILL.  Safe to call twice."""
        deadline = time.monotonic() + SECONDS_TO_STOP
        try:
            self._signal(signal.SIGTERM)
            while self._group_lives() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:  # also after an interrupt
            self._signal(signal.SIGKILL)
            self._process.wait(SECONDS_TO_STOP)
            atexit.unregister(self.stop)

    def _group_lives(self) -> bool:
        self._process.poll()  # a zombie counts as a member until it is waited for
        return self._signal(0)

    def _signal(self, number: int) -> bool:
        """Return False where the group is gone."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def owner_environment() -> dict[str, str]:
    """Return the variable that makes this process the owner of vLLM's processes; see `end_with_owner`."""
    return {OWNER: str(os.getpid())}


def end_with_owner() -> None:
    """End this process when its owner, an ancestor, is gone; do nothing where it has none.

    A process that is killed cannot end its children, and vLLM's would keep a GPU's memory for ever.
    """
    owner = int(os.environ.get(OWNER) or os.getpid())
    if owner != os.getpid():
        threading.Thread(target=_watch, args=(owner,), daemon=True).start()


def _watch(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        # An ancestor: a later process with the owner's number is none.
        owner = next((process for process in psutil.Process().parents() if process.pid == pid), None)
        # is_running compares ticks since the machine started: the clock may be set while this runs.
        while owner is not None and owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    os._exit(1)  # at once, whatever this process does


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the child processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send standard output and error to `log`: this process's, and that of children which start inside."""
    log.parent.mkdir(parents=True, exist_ok=True)
    # Not closed: loggers that are made inside go on writing to it.
    file = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    try:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        with redirect_stdout(file), redirect_stderr(file):  # in a notebook, sys.stdout is no file
            yield
    finally:
        for number, copy in enumerate(before, start=1):
            os.dup2(copy, number)
            os.close(copy)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def wait_for_port(host: str, port: int) -> None:
    """Wait until a port is free: a process that has just ended may hold it for a moment.

    Raises ValueError naming the port after SECONDS_FOR_A_PORT.
    """
    deadline = time.monotonic() + SECONDS_FOR_A_PORT
    while not is_free(host, port):
        if time.monotonic() > deadline:
            raise ValueError(f"port: {port} is taken by another program; None takes a free one")
        time.sleep(0.1)


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections that linger do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def with_timeout(action: Callable[[], T], seconds: float = math.inf, is_dead: Callable[[], bool] = lambda: False) -> T:
    """Return the action's result, or raise its error.

    Raises EngineDeadError after `seconds`, and when `is_dead` says that nobody will answer any more.  The action runs
    in a thread of its own, which is left behind if it never returns.
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
