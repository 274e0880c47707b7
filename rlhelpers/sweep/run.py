"""The runs of a plan that are not complete, each in a process of its own, watched until all have ended."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhelpers import paths
from rlhelpers.sweep.board import Row, show, summary
from rlhelpers.sweep.parallel import Workers
from rlhelpers.sweep.plan import Entry
from rlhelpers.sweep.workers import (
    BUSY,
    COMPLETE,
    FAILED,
    KILLED,
    RUNNING,
    WAITING,
    Job,
    is_complete,
    log_of,
    work,
)

INTERRUPTED = 130  # exit status of what Ctrl-C ended


def sweep(entries: Sequence[Entry], workers: Workers, resume: bool = False) -> int:
    """Run what is not complete.  Returns the exit status: 0 when all is complete, 1 when not, 130 after Ctrl-C.

    What becomes of each run is kept in data/runs/sweeps, executed notebooks and logs in data/runs/notebooks.
    """
    folder = paths.RUNS / "sweeps" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"
    folder.mkdir(parents=True)
    jobs = {i: _job(e, folder, i, resume) for i, e in enumerate(entries) if e.state != COMPLETE}
    stop = folder / "stop"
    with _stopped_by_signals(stop), show(lambda: _rows(entries, jobs)):
        _work_off(list(jobs.values()), workers, stop)
    _read(entries, jobs)
    for entry in entries:
        if entry.state == BUSY and entry.planned and is_complete(entry.planned.folder, entry.planned.fingerprint):
            entry.state, entry.detail = COMPLETE, "by another process, meanwhile"
        elif entry.state == WAITING:
            entry.state = "not started"
    print(summary([Row(e.name, e.state, _with_log(e)) for e in entries]), flush=True)
    if stop.exists():
        return INTERRUPTED
    return int(any(entry.state != COMPLETE for entry in entries))


def _work_off(jobs: Sequence[Job], workers: Workers, stop: Path) -> None:
    """All of them.  Where workers die, other workers go on with the runs that were not begun."""
    while (left := [job for job in jobs if not job.claim.exists()]) and not stop.exists():
        try:
            workers(work, left)
        except Exception as error:
            if not any(job.claim.exists() for job in left):  # they cannot even begin
                raise
            _mark_lost(jobs, error)
    _mark_lost(jobs)


def _with_log(entry: Entry) -> str:
    if entry.state in (FAILED, KILLED):
        return f"{entry.detail}\n  log: {log_of(entry.output)}"
    return entry.detail


def _job(entry: Entry, folder: Path, number: int, resume: bool) -> Job:
    goes_on = resume and entry.can_resume  # where there is nothing to go on with, it begins
    return Job(
        notebook=entry.notebook.resolve(),
        parameters=entry.parameters | ({"resume": True} if goes_on else {}),
        output=entry.output,
        folder=entry.planned and entry.planned.folder,
        fingerprint=entry.planned and entry.planned.fingerprint,
        state_file=folder / f"{number:03d}.json",
        stop=folder / "stop",
        sweep_pid=os.getpid(),
        cwd=os.getcwd(),
        environment={name: value for name, value in os.environ.items() if name.startswith("RLHELPERS_")},
    )


def _mark_lost(jobs: Sequence[Job], error: Exception | None = None) -> None:
    """When no worker is left, what says that it is running has lost its own."""
    for job in jobs:
        facts = _facts(job)
        if facts and facts["state"] == RUNNING:
            why = f"its worker died{f': {type(error).__name__}' if error else ''}"
            job.state_file.write_text(json.dumps(facts | {"state": KILLED, "detail": why}), encoding="utf-8")


def _facts(job: Job) -> dict[str, Any] | None:
    try:
        return json.loads(job.state_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _read(entries: Sequence[Entry], jobs: Mapping[int, Job]) -> None:
    for i, job in jobs.items():
        if facts := _facts(job):
            entries[i].state, entries[i].detail = facts["state"], facts["detail"]


def _rows(entries: Sequence[Entry], jobs: Mapping[int, Job]) -> list[Row]:
    _read(entries, jobs)
    return [Row(e.name, e.state, _progress(e) if e.state == RUNNING else e.detail) for e in entries]


def _progress(entry: Entry) -> str:
    """How far a run is that works: from its metrics, once they are of this run."""
    if entry.planned is None:
        return ""
    try:
        lines = (entry.planned.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return ""
    return f"step {last['step']}/{entry.planned.steps}"


@contextmanager
def _stopped_by_signals(stop: Path) -> Iterator[None]:
    """The first SIGINT or SIGTERM makes the runs stop, close and say so; another one ends this at once.

    Also where SIGINT was ignored, as in what a shell starts with &.
    """

    def ask(number, frame):
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()
        print("Stopping the runs; once more does not wait for them.", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
