"""Many runs at once, on this machine or on a Ray cluster, and what a person sees of them until all have ended.

A run is a process of its own, so a thread for each is enough here: it starts the process, or a task of Ray that does,
and waits.
"""

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from multiprocessing.pool import AsyncResult, ThreadPool  # its threads end with the process, also while they wait
from pathlib import Path
from typing import Any, NamedTuple

import joblib
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhelpers import paths
from rlhelpers.sweep.run import BUSY, COMPLETE, FAILED, KILLED, RUNNING, STOPPED, WAITING, Run, Sweep, execute, note

INTERRUPTED = 130  # exit status of what Ctrl-C ended
SECONDS = 0.5  # between two looks
COLOURS = {COMPLETE: "green", RUNNING: "cyan", FAILED: "red", KILLED: "red", BUSY: "yellow", STOPPED: "yellow"}


class Workers(NamedTuple):
    """`execute` does one run and returns its state and detail; `number` of them work at once."""

    execute: Callable[[Run, Sweep], tuple[str, str]]
    number: int
    share_cores: bool


def on_this_machine(jobs: int) -> Workers:
    """`jobs` runs at once, each with an equal share of the cores as OMP_NUM_THREADS, where that is not set."""
    return Workers(execute, jobs, share_cores=True)


def on_ray(jobs: int | None, gpus_per_run: float) -> Workers:
    """A task of Ray for each run, on the cluster that RAY_ADDRESS or Ray's own record names, else on a Ray of our own.

    Each has `gpus_per_run` GPUs of its own, which Ray names in CUDA_VISIBLE_DEVICES.  `jobs` of them work at once, or
    as many as there is room for.  Raises ModuleNotFoundError without Ray, ValueError where the cluster is too small.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ModuleNotFoundError("engine: Ray is not installed here; pip install --editable '.[ray]'") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    room = sum(_room(node["Resources"], gpus_per_run) for node in ray.nodes() if node["Alive"])
    if not room:
        raise ValueError(f"gpus_per_run: got {gpus_per_run:g}; no machine of this cluster has as many GPUs")
    remote = ray.remote(num_cpus=1, num_gpus=gpus_per_run, max_retries=0)(_execute_in_task)

    def execute_there(run: Run, sweep: Sweep) -> tuple[str, str]:
        task = remote.remote(run, sweep)
        while not ray.wait([task], timeout=1)[0]:
            if sweep.stop.exists() and not sweep.record(run).exists():
                ray.cancel(task)  # it waits for room, which may never come
        try:
            return ray.get(task)
        except ray.exceptions.TaskCancelledError:
            return WAITING, ""

    return Workers(execute_there, min(jobs or room, room), share_cores=False)


def _room(resources: dict[str, Any], gpus_per_run: float) -> int:
    """How many runs one machine takes."""
    cores = int(resources.get("CPU", 0))
    return min(cores, int(resources.get("GPU", 0) / gpus_per_run)) if gpus_per_run else cores


def _execute_in_task(run: Run, sweep: Sweep) -> tuple[str, str]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep decides what Ctrl-C in its terminal means
    return execute(run, sweep)


def sweep(runs: Sequence[Run], workers: Workers, resume: bool = False) -> int:
    """Do the runs that are not complete.  Return the exit status: 0 all are complete, 1 they are not, 130 after Ctrl-C.

    A record of each run is kept in data/runs/sweeps, executed notebooks and logs in data/runs/notebooks.
    """
    left = [run for run in runs if run.state != COMPLETE]
    number = max(1, min(workers.number, len(left)))
    folder = paths.RUNS / "sweeps" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}"
    folder.mkdir(parents=True)
    shared = Sweep(folder, resume, os.getcwd(), _environment(workers, number))
    with _stopped_by_signals(shared.stop), ThreadPool(number) as pool, _board(runs) as show:
        results = [(run, pool.apply_async(_attempt, (workers.execute, run, shared))) for run in left]
        _watch(results, shared, show)
    is_stopped = shared.stop.exists()
    for run in left:
        if run.state == BUSY and run.folder and run.is_trained():
            run.state, run.detail = COMPLETE, "by another process, meanwhile"
        elif run.state == WAITING:
            run.state, run.detail = "not started", ""
        elif run.state in (FAILED, KILLED):
            run.detail += f"\n  log: {run.log}"
    print("\n".join([*as_lines([run for run in runs if run.state != COMPLETE]), counts(runs)]), flush=True)
    return INTERRUPTED if is_stopped else int(any(run.state != COMPLETE for run in runs))


def _environment(workers: Workers, number: int) -> dict[str, str]:
    """What the runs need of it, wherever they work."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("RLHELPERS_")}
    if workers.share_cores and number > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, joblib.cpu_count() // number))
    return environment


@contextlib.contextmanager
def _stopped_by_signals(stop: Path) -> Iterator[None]:
    """The first SIGINT or SIGTERM makes the runs stop and close; another one ends the sweep at once.

    SIGINT does so too where it was ignored, as in what a shell starts with &.
    """

    def ask(number, frame):
        if stop.exists():
            raise KeyboardInterrupt
        stop.touch()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _attempt(execute: Callable[[Run, Sweep], tuple[str, str]], run: Run, shared: Sweep) -> tuple[str, str]:
    try:
        return execute(run, shared)
    except Exception as error:  # a machine of the cluster is gone, a disk is full
        outcome = KILLED, f"its worker died: {type(error).__name__}: {' '.join(f'{error}'.split())[:300]}"
        with contextlib.suppress(OSError):
            note(run, shared, *outcome)
        return outcome


def _watch(results: Sequence[tuple[Run, AsyncResult]], shared: Sweep, show: Callable[[], None]) -> None:
    """Keep the states up to date, and show them, until all runs have ended."""
    is_told = False
    while not all([_has_ended(run, result, shared) for run, result in results]):
        show()
        if shared.stop.exists() and not is_told:
            print("Stopping the runs; once more does not wait for them.", flush=True)
            is_told = True
        time.sleep(SECONDS)
    show()


def _has_ended(run: Run, result: AsyncResult, shared: Sweep) -> bool:
    if has_ended := result.ready():
        run.state, run.detail = result.get()
    elif shared.record(run).exists():
        run.state, run.detail = RUNNING, _progress(run)
    return has_ended


def _progress(run: Run) -> str:
    """How far a run is, from its metrics, once they are of this run."""
    try:
        lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return f"step {json.loads(lines[-1])['step']}/{run.steps}"
    except (OSError, ValueError, IndexError, TypeError):
        return ""


@contextlib.contextmanager
def _board(runs: Sequence[Run]) -> Iterator[Callable[[], None]]:
    """Yield what shows the runs: a table that is kept up to date in a terminal, else a line for each change."""
    console = Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(as_table(runs, console.height - 4), refresh=True)
        return
    shown = [run.state for run in runs]

    def show_changes() -> None:
        for i, run in enumerate(runs):
            if shown[i] != run.state:
                shown[i] = run.state
                print(f"{run.state:10} {run.name}  {run.detail}".rstrip(), flush=True)

    yield show_changes


def as_table(runs: Sequence[Run], height: int) -> Table:
    """At most `height` runs: those that are complete or wait give way to the others."""
    order = sorted(range(len(runs)), key=lambda i: runs[i].state in (COMPLETE, WAITING))
    table = Table(caption=counts(runs), box=None, caption_justify="left", pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for run in (runs[i] for i in sorted(order[: max(1, height)])):
        table.add_row(Text(run.name), Text(run.state, style=COLOURS.get(run.state, "")), Text(run.detail))
    return table


def as_lines(runs: Sequence[Run]) -> list[str]:
    width = max((len(run.state) for run in runs), default=0)
    return [f"{run.state:{width}}  {run.name}  {run.detail}".rstrip() for run in runs]


def counts(runs: Sequence[Run]) -> str:
    return ", ".join(f"{n} {state}" for state, n in Counter(run.state for run in runs).items())
