"""The folder of one run: who is writing it, what has become of it, and everything that is written into it.

config.yaml     the whole configuration
run.json        how it was made: status, fingerprint, versions, commit, times; "complete" is written last
metrics.jsonl   strict JSON, one line per step; step 0 is the validation before training
rollouts/       step_00020_train.jsonl, step_00020_validation.jsonl: responses and their rewards
bad_batches/    step_00007_update_1.jsonl: what an update failed with, or was skipped for; see training/updates
checkpoints/    the last two, until the run is complete
policy/         the weights after the last step
best/           DPO's best ones; see training/dpo
engine.log      what vLLM's processes printed
"""

import json
import os
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout

from rlhelpers import paths
from rlhelpers.files import (
    NotWrittenError,
    append,
    json_lines,
    remove_leftovers,
    strict_json,
    to_disk,
    write_atomically,
)
from rlhelpers.training.checkpoint import Checkpoint, newest, remove_later
from rlhelpers.training.provenance import provenance
from rlhelpers.training.settings import RunSettings

# --- an end in order -------------------------------------------------------------------------------------------------


class Terminated(BaseException):
    """SIGTERM, which a cluster sends some seconds before it kills, as an exception in the main thread."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Let SIGTERM leave the block as an exception does, so that files are whole and records say what happened; then end
    the process by it (exit status 143 in a shell).  Further ones are ignored meanwhile.

    Does nothing in other threads than the main one, and where somebody else handles SIGTERM already.
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


# --- what has become of a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunState:
    """status: "absent", "running" (a process holds its lock), "complete", "failed", or "killed": by SIGTERM, or by what
      left no time to say so.
    fingerprint: of the configuration that it was begun with; None where run.json does not say.
    """

    status: str
    fingerprint: str | None = None


def run_state(folder: Path) -> RunState:
    """Return what has become of the run in a folder.  A run that works there is not disturbed."""
    lock = lock_file(folder)
    try:
        # Under the lock, or a run could end between the look at its lock and the look at its status.
        with FileLock(lock).acquire(timeout=0) if lock.exists() else nullcontext():
            about, there = read_about(folder), folder.exists()
    except Timeout:
        return RunState("running", read_about(folder).get("fingerprint"))
    if not there:
        return RunState("absent")
    ended = about.get("status") in ("complete", "failed")
    return RunState(about["status"] if ended else "killed", about.get("fingerprint"))


def read_about(folder: Path) -> dict[str, Any]:
    """Return run.json; empty where there is none that can be read, or its fingerprint is no text."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and isinstance(about.get("fingerprint"), str | None) else {}


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def writer_file(folder: Path) -> Path:
    """The file that says who holds the lock."""
    return folder.with_name(f".{folder.name}.writer")


def _by_whom(folder: Path) -> str:
    try:
        return f" ({writer_file(folder).read_text(encoding='utf-8')})"
    except OSError:  # it has got the lock just now
        return ""


def free_name(folder: Path) -> Path:
    """Return the next name under which a folder can be moved aside."""
    number = 1
    while (name := folder.with_name(f"{folder.name}.earlier-{number}")).exists():
        number += 1
    return name


# --- what is written -------------------------------------------------------------------------------------------------


class RunRecords:
    """A context manager: enters as "running", leaves as "complete", "failed", or, by SIGTERM, "killed".

    checkpoint: where a run goes on; None for one that begins.
    news: what the reader should be told about that.
    tracked: the last step that a tracker may know already.
    """

    def __init__(self, config: RunSettings):
        self.config, self.fingerprint = config, config.fingerprint
        self.folder = paths.RUNS / config.experiment / config.variant / f"seed={config.seed}"
        self.about: dict[str, Any] = {}
        self.checkpoint: Checkpoint | None = None
        self.news: list[str] = []
        self.tracked = -1

    def __enter__(self) -> Self:
        """Open the folder.  With `resume`, an unfinished run of this configuration is cut back to its last checkpoint.
        Else the folder is new, and an earlier run of the same name is moved aside.

        Raises RuntimeError, which names the folder, while another process is writing to it.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(lock_file(self.folder))
        try:
            self._lock.acquire(timeout=1)  # run_state holds it for a moment
        except Timeout:
            raise RuntimeError(
                f"{self.folder}: another process is writing this run{_by_whom(self.folder)}; choose another experiment "
                "or variant, or wait for it"
            ) from None
        try:
            write_atomically(writer_file(self.folder), f"process {os.getpid()} on {socket.gethostname()}")
            if self.config.resume:
                self.checkpoint = self._find_checkpoint()
            if self.checkpoint is None:
                self._begin()
            else:
                self._go_on(self.checkpoint)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                self._write_about(status="complete", finished=_now())
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            else:
                status = "killed" if isinstance(error, Terminated) else "failed"
                with suppress(NotWrittenError):  # on a full disk it stays "running", which without a lock is "killed"
                    self._write_about(status=status, finished=_now(), error=f"{kind.__name__}: {error}")
        finally:
            writer_file(self.folder).unlink(missing_ok=True)
            self._lock.release()

    def says_complete(self) -> bool:
        """Return whether a run with `resume` has nothing left to do, and print so."""
        if not self.config.resume or run_state(self.folder) != RunState("complete", self.fingerprint):
            return False
        # It may have been killed over its last act, the removal of its checkpoints.
        with suppress(Timeout), FileLock(lock_file(self.folder)).acquire(timeout=0):
            if read_about(self.folder).get("status") == "complete":
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        print(f"{self.folder.relative_to(paths.RUNS)} is complete: nothing is trained.")
        return True

    def _begin(self) -> None:
        settings = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        if self.folder.exists():
            aside = free_name(self.folder)
            self.folder.rename(aside)
            if self.config.resume:
                self.news.append(f"There is no checkpoint to go on from: begins anew; what was here is {aside.name}.")
        (self.folder / "rollouts").mkdir(parents=True)
        write_atomically(self.folder / "config.yaml", settings)
        facts = {"id": uuid.uuid4().hex[:12], "fingerprint": self.fingerprint, "started": _now()}
        self._write_about(status="running", **facts, **provenance())

    def _find_checkpoint(self) -> Checkpoint | None:
        """Return that of an unfinished run of this configuration; None without such a run or a whole checkpoint."""
        about = read_about(self.folder)
        if about.get("fingerprint") != self.fingerprint or about.get("status") not in ("running", "failed", "killed"):
            return None
        checkpoint = newest(self.folder / "checkpoints", self.fingerprint, self.news.append)
        if checkpoint is not None and list(self._logged())[: checkpoint.step + 1] != list(range(checkpoint.step + 1)):
            self.news.append(f"The checkpoint of step {checkpoint.step} is not used: metrics.jsonl lacks steps before.")
            return None
        return checkpoint

    def _go_on(self, checkpoint: Checkpoint) -> None:
        """Cut the records back to the checkpoint.  A run that is killed meanwhile can be resumed as before."""
        step, logged, about = checkpoint.step, self._logged(), read_about(self.folder)
        resumed = about.get("resumed", [])
        self.tracked = max([*logged, *(entry["logged"] for entry in resumed)])
        changed = {name: value for name, value in provenance().items() if value != about.get(name)}
        resumed.append({"time": _now(), "step": step, "logged": self.tracked} | changed)
        if changed:
            self.news.append(f"Goes on with other {', '.join(changed)} than before: its numbers may differ for that.")
        self.about = {name: value for name, value in about.items() if name not in ("finished", "error")}
        # What was remarked after the checkpoint was of steps that are done again.
        remarks = [*checkpoint.carried["remarks"], *self.news]
        self._write_about(status="running", resumed=resumed, remarks=remarks)
        kept = "".join(line for at, line in logged.items() if at <= step)
        write_atomically(self.folder / "metrics.jsonl", kept)
        for file in (self.folder / "rollouts").glob("step_*.jsonl"):
            if int(file.name.split("_")[1]) > step:
                file.unlink()
        remove_later(self.folder / "checkpoints", step)
        for folder in (self.folder, self.folder / "checkpoints"):
            remove_leftovers(folder)

    def _logged(self) -> dict[int, str]:
        """Return the whole lines of metrics.jsonl by their step, up to a damaged one."""
        try:
            *lines, _ = (self.folder / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        logged = {}
        for line in lines:
            try:
                logged[json.loads(line)["step"]] = line.decode("utf-8") + "\n"
            except (ValueError, TypeError, KeyError):
                break
        return logged

    def keep(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint of the step that was logged last.  The log of that step is on the disk before it."""
        to_disk(self.folder / "metrics.jsonl")
        checkpoint.save(self.folder / "checkpoints")

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    def pop_checkpoint(self) -> Checkpoint:
        """Return the checkpoint and forget it: it is three times as large as the weights."""
        checkpoint, self.checkpoint = self.checkpoint, None
        return checkpoint

    @property
    def remarks(self) -> list[str]:
        return self.about.get("remarks", [])

    def remark(self, text: str) -> None:
        """Write down what a reader of the results must know."""
        self._write_about(remarks=[*self.remarks, text])

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one step to metrics.jsonl."""
        append(self.folder / "metrics.jsonl", json_lines([metrics]))

    def write_rollouts(self, step: int, split: str, rows: Iterable[dict[str, Any]]) -> None:
        """Write the responses of one step.  split: "train" or "validation"."""
        append(self.folder / "rollouts" / f"step_{step:05d}_{split}.jsonl", json_lines(rows))

    def write_bad_batch(self, step: int, part: str, rows: Iterable[dict[str, Any]]) -> Path:
        """Write the responses of a part of a step that went wrong; return the file.  A resumed run keeps it."""
        file = self.folder / "bad_batches" / f"step_{step:05d}_{part}.jsonl"
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json_lines(rows))
        return file

    def _write_about(self, **facts: Any) -> None:
        self.about |= facts
        write_atomically(self.folder / "run.json", strict_json(self.about, indent=2) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
