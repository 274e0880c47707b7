"""What has become of a run, and who is writing it."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@dataclass(frozen=True)
class RunState:
    """`status`: "absent", "running" (a process holds its lock), "complete", "failed", or "killed": by SIGTERM, or by
    what left no time to say so.  `fingerprint`: of the configuration that it was begun with; None where run.json does
    not say."""

    status: str
    fingerprint: str | None = None


def run_state(folder: Path) -> RunState:
    """What has become of the run in a folder.  A run that works there is not disturbed."""
    lock = lock_file(folder)
    try:
        # Under the lock, for else a run could end between the look at its lock and the look at its status.
        with FileLock(lock).acquire(timeout=0) if lock.exists() else nullcontext():
            about, there = read_about(folder), folder.exists()
    except Timeout:
        return RunState("running", read_about(folder).get("fingerprint"))
    if not there:
        return RunState("absent")
    ended = about.get("status") in ("complete", "failed")
    return RunState(about["status"] if ended else "killed", about.get("fingerprint"))


def by_whom(folder: Path) -> str:
    try:
        return f" ({writer_file(folder).read_text(encoding='utf-8')})"
    except OSError:  # it has got the lock just now
        return ""


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def writer_file(folder: Path) -> Path:
    """Says who holds the lock."""
    return folder.with_name(f".{folder.name}.writer")


def read_about(folder: Path) -> dict[str, Any]:
    """run.json; empty where there is none that can be read, or whose fingerprint is none."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) and isinstance(about.get("fingerprint"), str | None) else {}
