"""Whether the GPUs of a machine, and the software beside them, do for a run."""

from collections.abc import Iterator

from packaging.version import Version

from rlhelpers.doctor.finding import Finding
from rlhelpers.doctor.fit import policy_index, server_index, wants_gpu
from rlhelpers.doctor.machine import Machine
from rlhelpers.training.config import RunConfig

# CUDA's major version -> the oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility)
DRIVERS = {"11": "450", "12": "525", "13": "580"}
BF16 = (8, 0)  # the first compute capability with bf16 arithmetic, and the first that flash-attention 2 runs on


def examine_gpus(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """The policy's GPU and the server's; where the policy is to be on one, also driver, NCCL, bf16, attention."""
    yield from _policy_gpu(machine, config)
    if not wants_gpu(machine, config):
        return
    yield from _driver(machine)
    if config.engine == "vllm-server":
        yield from _server_gpu(machine, config)
    index = policy_index(config)
    if index < len(machine.gpus):
        capability = machine.gpus[index].capability
        yield _bf16(capability, config)
        yield _flash_attention(capability, machine.versions.get("flash-attn"))


def _policy_gpu(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    index = policy_index(config)
    if config.device == "cpu":
        yield Finding("ok", "GPU", "not used: device is cpu")
    elif index < len(machine.gpus):
        yield _describe(machine, index, "GPU")
    elif machine.gpus:
        found = f"device={config.device}, but the GPUs are 0 to {len(machine.gpus) - 1}"
        yield Finding("problem", "GPU", found, "set device=auto")
    elif wants_gpu(machine, config):
        yield Finding("problem", "GPU", *_why_no_gpu(machine))
    elif machine.cards:
        yield Finding("warning", "GPU", *_why_no_gpu(machine))
    else:
        yield Finding("ok", "GPU", "none: the policy trains on the CPU")


def _describe(machine: Machine, index: int, name: str) -> Finding:
    gpu = machine.gpus[index]
    return Finding("ok", name, f"{index}: {gpu.name}, {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free")


def _why_no_gpu(machine: Machine) -> tuple[str, str]:
    """What was found and the remedy, where torch can use no GPU."""
    if not machine.cards:
        return "none that NVIDIA's driver shows", "use a machine with one, or --preset tiny, which any CPU can run"
    cards = f"{', '.join(machine.cards)}: torch cannot use it"
    if machine.torch_cuda is None:
        return f"{cards}, being built for the CPU", "pip install --force-reinstall torch==2.13.0"
    if _old_driver(machine):
        return f"{cards} with this driver", "see the driver"
    if machine.visible_devices is not None:
        return f"{cards} with CUDA_VISIBLE_DEVICES={machine.visible_devices!r}", "unset CUDA_VISIBLE_DEVICES"
    return cards, 'python -c "import torch; torch.cuda.init()" says why'


def _old_driver(machine: Machine) -> str | None:
    """The oldest driver that torch's CUDA runs with, where the driver is older."""
    oldest = DRIVERS.get((machine.torch_cuda or "").partition(".")[0])
    return oldest if oldest and machine.driver and Version(machine.driver) < Version(oldest) else None


def _driver(machine: Machine) -> Iterator[Finding]:
    if machine.driver is None:
        return
    found = f"{machine.driver}, torch's CUDA {machine.torch_cuda or 'none'}"
    if oldest := _old_driver(machine):
        # Where torch sees the GPU all the same, a compatibility package is at work.
        status = "warning" if machine.gpus else "problem"
        remedy = f"update NVIDIA's driver to {oldest} or newer, or install a torch built for an older CUDA"
        yield Finding(status, "driver", found, remedy)
    else:
        yield Finding("ok", "driver", found)


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
    if machine.nccl:
        yield Finding("ok", "NCCL", machine.nccl)
    else:
        remedy = "pip install --force-reinstall torch==2.13.0, whose Linux build for CUDA brings it"
        yield Finding("problem", "NCCL", "torch has none", remedy)


def _bf16(capability: tuple[int, int], config: RunConfig) -> Finding:
    found = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= BF16:
        return Finding("ok", "bf16", found)
    if config.engine == "torch":
        return Finding("warning", "bf16", f"{found}: bf16 is emulated, slowly", "use a card of 8.0 or newer (Ampere)")
    return Finding(
        "problem",
        "bf16",
        f"{found}: vLLM refuses bf16",
        "use a card of 8.0 or newer, or set engine=torch sleep_level=0 kv_cache_gib=1",
    )


def _flash_attention(capability: tuple[int, int], version: str | None) -> Finding:
    if version is None:
        return Finding("ok", "flash-attn", "not installed: torch's own attention (sdpa) is used")
    if capability < BF16:
        return Finding("problem", "flash-attn", f"{version} does not run on this card", "pip uninstall flash-attn")
    return Finding("ok", "flash-attn", version)
