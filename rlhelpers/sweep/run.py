"""One run of a sweep: papermill executes a notebook in a process of its own.

`python -m rlhelpers.sweep.run NOTEBOOK OUTPUT PARAMETERS` is that process.  It ends, and its kernel with it, when its
standard input is closed: by whoever started it, or because that process is gone.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from rlhelpers import paths
from rlhelpers.files import write_atomically

# States of a run.
WAITING, RUNNING, COMPLETE = "waiting", "running", "complete"
FAILED, KILLED, BUSY, STOPPED = "failed", "killed", "busy elsewhere", "stopped"

KERNEL_DIED = 3  # exit status
STARTS = 3  # of a kernel, at most
SECONDS_TO_STOP = 20
WRITTEN_BY_ANOTHER = "another process is writing this run"  # what RunRecords says


@dataclass
class Run:
    """A notebook with some parameters.  `folder`, `fingerprint` and `steps` are those of the run that it trains.

    `folder` is None where the notebook trains nothing.
    """

    notebook: Path
    parameters: dict[str, Any]
    can_resume: bool = False
    folder: Path | None = None
    fingerprint: str | None = None
    steps: int = 0
    state: str = WAITING
    detail: str = ""
    output: Path = field(init=False)  # the executed notebook

    def __post_init__(self):
        self.notebook = self.notebook.absolute()  # a worker has another working directory
        # The name of the output says the parameters and belongs to no other combination.
        text = ",".join([self.notebook.stem, *([describe(self.parameters)] if self.parameters else [])])
        self.output = paths.RUNS / "notebooks" / f"{paths.file_name(text, unique=True)}.ipynb"

    @property
    def name(self) -> str:
        return f"{self.notebook.stem} {describe(self.parameters)}".strip()

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def is_trained(self) -> bool:
        """Return whether its folder holds the complete run that was planned."""
        try:
            about = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
            return (about["status"], about["fingerprint"]) == (COMPLETE, self.fingerprint)
        except (OSError, ValueError, TypeError, KeyError):
            return False


@dataclass(frozen=True)
class Sweep:
    """What all runs of a sweep share.  `folder` keeps a record of each run."""

    folder: Path
    resume: bool
    cwd: str
    environment: dict[str, str]

    @property
    def stop(self) -> Path:
        """While this file exists, nothing goes on."""
        return self.folder / "stop"

    def record(self, run: Run) -> Path:
        return self.folder / f"{run.output.stem}.json"


def describe(parameters: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in parameters.items())


def as_json(parameters: Mapping[str, Any]) -> str:
    """Return the parameters as JSON, which has no infinity: it becomes the text "inf", which notebooks read as well."""
    finite = {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in parameters.items()}
    return json.dumps(finite, allow_nan=False)


def execute(run: Run, sweep: Sweep) -> tuple[str, str]:
    """Execute the notebook.  Return the state of the run, and what a person should know about it.

    Whatever happens in the notebook is a state and not an error.
    """
    if sweep.stop.exists():
        return WAITING, ""
    run.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(run.output.with_name(f".{run.output.stem}.lock"), timeout=0):
            if run.folder and run.is_trained():
                outcome = COMPLETE, "by another process, meanwhile"
            else:
                note(run, sweep, RUNNING)
                outcome = _execute(run, sweep)
    except Timeout:
        outcome = BUSY, ""
    note(run, sweep, *outcome)
    return outcome


def note(run: Run, sweep: Sweep, state: str, detail: str = "") -> None:
    """Write the record of a run."""
    facts = {"run": run.output.stem, "state": state, "detail": detail, "time": _now()}
    write_atomically(sweep.record(run), json.dumps(facts | {"machine": socket.gethostname(), "pid": os.getpid()}))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _execute(run: Run, sweep: Sweep) -> tuple[str, str]:
    # Where there is no checkpoint, a run with `resume` begins.
    parameters = run.parameters | ({"resume": True} if sweep.resume and run.can_resume else {})
    command = [sys.executable, "-m", "rlhelpers.sweep.run", run.notebook, run.output, as_json(parameters)]
    with open(run.log, "a", encoding="utf-8") as log:
        log.write(f"--- {_now()} {run.notebook} {parameters} {sys.executable}\n")
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=sweep.cwd,
            env=os.environ | sweep.environment,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        try:
            while process.poll() is None and not sweep.stop.exists():
                time.sleep(0.2)
            is_stopped = process.returncode is None
        finally:  # whatever happens here, the process does not outlive it
            _end(process)
        state, detail = _outcome(run, process.returncode, is_stopped)
        log.write(f"--- {_now()} {state} {detail}\n")
    return state, detail


def _end(process: subprocess.Popen) -> None:
    process.stdin.close()
    try:
        process.wait(SECONDS_TO_STOP + 10)
    except subprocess.TimeoutExpired:
        _kill_with_children(process.pid)
        process.wait()


def _outcome(run: Run, status: int, is_stopped: bool) -> tuple[str, str]:
    if status == 0:
        if run.folder is None or run.is_trained():
            return COMPLETE, ""
        return FAILED, f"the notebook ended and {run.folder} is not the complete run that was planned"
    if is_stopped:
        return STOPPED, ""
    if status == KERNEL_DIED:
        return KILLED, "its kernel died"
    if status < 0:
        return KILLED, f"by {signal.Signals(-status).name}"
    last = _last_line(run.log)
    return (BUSY, "") if WRITTEN_BY_ANOTHER in last else (FAILED, last)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _kill_with_children(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def main(notebook: str, output: str, parameters: str) -> int:
    """The process of one run.  Return its exit status."""
    from nbclient.exceptions import DeadKernelError
    from papermill import PapermillExecutionError, execute_notebook

    threading.Thread(target=_stop_when_left, daemon=True).start()
    try:
        until_it_starts(
            lambda: execute_notebook(
                notebook,
                output,
                json.loads(parameters),
                kernel_name="python3",  # of this environment, whatever it was saved with
                progress_bar=False,
                stdout_file=sys.stdout,
                stderr_file=sys.stderr,
            )
        )
    except DeadKernelError as error:
        print(f"DeadKernelError: {error}", flush=True)
        return KERNEL_DIED
    except PapermillExecutionError as error:
        print(f"{error}\n{error.ename}: {' '.join(error.evalue.split())}", flush=True)
        return 1
    return 0


def until_it_starts(start: Callable[[], Any]) -> None:
    """Try three times to start a kernel: two that start at once may choose the same port, and then one fails.

    What fails after the start is not tried again.
    """
    from nbclient.exceptions import DeadKernelError

    for attempt in range(1, STARTS + 1):
        try:
            return start()
        except DeadKernelError:
            raise
        except RuntimeError as error:  # of jupyter_client, before the first cell
            print(f"RuntimeError: {error} (start {attempt} of {STARTS})", flush=True)
            if attempt == STARTS:
                raise


def _stop_when_left() -> None:
    """When standard input ends: interrupt the kernel, as Jupyter's stop button does, so that the run closes its engine
    and its records.  Kill what is still alive after SECONDS_TO_STOP."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    for _ in range(4):
        for kernel in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                kernel.send_signal(signal.SIGINT)
        time.sleep(SECONDS_TO_STOP / 4)  # an interrupt between two cells is lost
    _kill_with_children(os.getpid())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
