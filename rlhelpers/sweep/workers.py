"""One run of a sweep: a notebook executed by papermill in a process of its own.

`python -m rlhelpers.sweep.workers NOTEBOOK OUTPUT PARAMETERS` is that process.  It goes on as long as its standard
input is open, and so ends, and its kernel with it, when whoever started it wants that or is gone.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from rlhelpers.files import write_atomically

# States of a run.
WAITING, RUNNING, COMPLETE = "waiting", "running", "complete"
FAILED, KILLED, BUSY, STOPPED = "failed", "killed", "busy elsewhere", "stopped"

KERNEL_DIED = 3  # exit status
STARTS = 3  # of a kernel, at most
SECONDS_TO_STOP = 20
WRITTEN_BY_ANOTHER = "another process is writing this run"  # what RunRecords says


@dataclass(frozen=True)
class Job:
    """What a worker, perhaps on another machine, must know of a run.  All paths lie in folders that it sees too."""

    notebook: Path
    parameters: dict[str, Any]
    output: Path  # the executed notebook; its log is beside it
    folder: Path | None  # of the run that it trains
    fingerprint: str | None
    state_file: Path
    stop: Path  # where this file is, nothing goes on
    sweep_pid: int
    cwd: str
    environment: dict[str, str]

    @property
    def claim(self) -> Path:
        """The file of the worker that has taken it."""
        return self.state_file.with_suffix(".taken")


def work(jobs: Sequence[Job]) -> None:
    """What a worker does: the runs that no other worker of the sweep has taken, one after the other."""
    is_worker, parent, stop = os.getpid() != jobs[0].sweep_pid, os.getppid(), jobs[0].stop
    if is_worker:  # the sweep decides what Ctrl-C in its terminal means
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def is_left() -> bool:  # the sweep was killed
        return is_worker and os.getppid() != parent

    for job in jobs:
        if stop.exists() or is_left():
            break
        with contextlib.suppress(FileExistsError):
            job.claim.touch(exist_ok=False)
            run(job, lambda: stop.exists() or is_left())
    if is_left():
        os._exit(1)


def run(job: Job, must_stop: Callable[[], bool]) -> None:
    """Execute the notebook.  What becomes of it stands in the state file: nothing that happens in it is raised."""
    job.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(job.output.with_name(f".{job.output.stem}.lock"), timeout=0):
            if job.folder and is_complete(job.folder, job.fingerprint):
                _note(job, COMPLETE, "by another process, meanwhile")
            else:
                _note(job, *_execute(job, must_stop))
    except Timeout:
        _note(job, BUSY)


def log_of(output: Path) -> Path:
    return output.with_suffix(".log")


def is_complete(folder: Path, fingerprint: str | None) -> bool:
    """Whether a folder holds the complete run of this fingerprint."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return about.get("status") == COMPLETE and about.get("fingerprint") == fingerprint


def _note(job: Job, state: str, detail: str = "") -> None:
    facts = {"run": job.output.stem, "state": state, "detail": detail, "time": _now()}
    facts |= {"machine": socket.gethostname(), "pid": os.getpid()}
    write_atomically(job.state_file, json.dumps(facts))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _execute(job: Job, must_stop: Callable[[], bool]) -> tuple[str, str]:
    """Returns the state and what is to be said of it."""
    _note(job, RUNNING)
    command = [sys.executable, "-m", "rlhelpers.sweep.workers", str(job.notebook), str(job.output)]
    with open(log_of(job.output), "a", encoding="utf-8") as log:
        log.write(f"--- {_now()} {job.notebook} {job.parameters} {sys.executable}\n")
        log.flush()
        process = subprocess.Popen(
            [*command, as_json(job.parameters)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=job.cwd,
            env=os.environ | job.environment,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )
        try:
            is_stopped = _wait(process, must_stop)
        finally:  # whatever happens here, it does not outlive this
            _end(process)
        state, detail = _outcome(job, process.returncode, is_stopped)
        log.write(f"--- {_now()} {state} {detail}\n")
    return state, detail


def as_json(parameters: Mapping[str, Any]) -> str:
    """inf as a text, which the check of the notebook's parameters reads as well: they become part of the executed
    notebook, and JSON has no such number."""
    told = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in parameters.items()
    }
    return json.dumps(told, allow_nan=False)


def _wait(process: subprocess.Popen, must_stop: Callable[[], bool]) -> bool:
    """Until it ends, or must: then True."""
    while process.poll() is None:
        if must_stop():
            return True
        time.sleep(0.2)
    return False


def _end(process: subprocess.Popen) -> None:
    """Ask it to end, and after a while insist."""
    process.stdin.close()
    try:
        process.wait(SECONDS_TO_STOP + 10)
    except subprocess.TimeoutExpired:
        _kill_with_children(process.pid)
        process.wait()


def _outcome(job: Job, status: int, is_stopped: bool) -> tuple[str, str]:
    last = _last_line(log_of(job.output))
    if status == 0:
        if job.folder is None or is_complete(job.folder, job.fingerprint):
            return COMPLETE, ""
        return FAILED, f"the notebook ended and {job.folder} is not the complete run that was planned"
    if is_stopped:
        return STOPPED, ""
    if status == KERNEL_DIED:
        return KILLED, "its kernel died"
    if status < 0:
        return KILLED, f"by {signal.Signals(-status).name}"
    return (BUSY, "") if WRITTEN_BY_ANOTHER in last else (FAILED, last)


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _kill_with_children(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def main(notebook: str, output: str, parameters: str) -> int:
    """The process of one run.  Returns its exit status."""
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


def until_it_starts(execute: Callable[[], Any]) -> None:
    """Kernels that start at the same time may choose the same port, and then one does not start: it is tried again.
    What fails later is not."""
    from nbclient.exceptions import DeadKernelError

    for attempt in range(1, STARTS + 1):
        try:
            execute()
            return
        except DeadKernelError:
            raise
        except RuntimeError as error:  # of jupyter_client, before the first cell
            print(f"RuntimeError: {error} (start {attempt} of {STARTS})", flush=True)
            if attempt == STARTS:
                raise


def _stop_when_left() -> None:
    """When standard input ends: interrupt the kernel, as Jupyter's stop button does, so that the run closes its engine
    and its records; what still lives after SECONDS_TO_STOP is killed."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    for _ in range(4):
        for kernel in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                kernel.send_signal(signal.SIGINT)
        time.sleep(SECONDS_TO_STOP / 4)  # one that comes between two cells is lost
    _kill_with_children(os.getpid())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
