"""Whether a run fits into a machine's memory and disks, and which settings would make it fit."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhelpers.doctor.machine import Gpu, Machine
from rlhelpers.doctor.memory import GIB, Demand, cache_gib, predict_memory
from rlhelpers.models import download_command
from rlhelpers.training.config import RunConfig

TIGHT = 0.9  # of what is free: above it, fragmentation or another program may end the run
CPU_PARAMETERS = 2e8  # with more of them a step on a CPU takes hours
SMALL_CARD = Gpu("a card of 24 GB", 23.5, 23.0, (8, 9))
CHECKPOINTS = 3 * 3  # weights and two moments; two are kept, and a third is written before the older one goes
RESPONSE_BYTES = 8  # per token of prompt and response in a run's files: the text, and the names of the fields


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about a warning or a problem.  A problem stops the run, a warning does not."""

    status: Literal["ok", "warning", "problem"]
    name: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found} -> {self.remedy}" if self.remedy else self.found


def judge(is_fine: bool, name: str, found: str, remedy: str, otherwise: str = "problem") -> Finding:
    """A finding that is ok or has a remedy."""
    return Finding("ok", name, found) if is_fine else Finding(otherwise, name, found, remedy)


def wants_gpu(machine: Machine, config: RunConfig) -> bool:
    """Whether the policy belongs on a GPU: one is there or asked for, or the model is too big for a CPU."""
    model = machine.architecture
    big = model is not None and model.parameters > CPU_PARAMETERS
    return config.device.startswith("cuda") or (config.device == "auto" and (bool(machine.gpus) or big))


def policy_index(config: RunConfig) -> int:
    return int(config.device.partition(":")[2] or 0)


def server_index(config: RunConfig) -> int:
    return policy_index(config) + 1 if config.engine_gpu is None else config.engine_gpu


def examine_memory(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """A finding for each demand of the run, and one for vLLM's cache."""
    model = machine.architecture
    if model is None:
        if machine.model_error is None:
            yield Finding("warning", "memory", "not predicted: the model is not here", download_command(config.model))
        return
    on_gpu = wants_gpu(machine, config)
    for demand in predict_memory(config, model, on_gpu, machine.prompt_tokens):
        yield _judge(demand, machine, config)
    if config.engine != "torch":
        least, size = _longest_response(machine, config, on_gpu), config.kv_cache_gib
        found = f"kv_cache_gib={size} holds {int(size / least)} of the longest responses"
        yield judge(size >= least, "vLLM's cache", found, f"set kv_cache_gib={math.ceil(10 * least) / 10}")


def examine_disks(machine: Machine, config: RunConfig) -> Iterator[Finding]:
    """Room for the run's folder, for the model's download, and in shared memory for vLLM's weights or NCCL."""
    model = machine.architecture
    on_gpu = wants_gpu(machine, config)
    weights = model.parameters * (2 if on_gpu else 4) / GIB if model else 0.0
    kept = (config.num_rollout_steps // config.rollouts_every + 1) * (config.rollout_batch_size + config.n_val_examples)
    responses = kept * (machine.prompt_tokens + config.max_tokens) * RESPONSE_BYTES / GIB
    run = (1 + CHECKPOINTS) * weights + responses
    yield _room("disk", "data/runs", run, machine.disk_gib, "free some, or move data/runs by a link")
    if machine.model_from == "hub" and model:
        size = model.parameters * 4 / GIB  # at most: many models are published in float32
        yield _room("disk", "the model", size, machine.hub_disk_gib, "free some, or set HF_HOME to a larger disk")
    if config.engine != "torch" and not on_gpu and machine.system == "Linux":
        remedy = "give the container more: docker run --shm-size=8g"
        yield _room("/dev/shm", "the weights", weights, machine.shm_gib or 0.0, remedy)
    if config.engine == "vllm-server" and on_gpu and machine.system == "Linux":
        # NCCL's processes talk through it; a container has 64 MB unless told otherwise.
        yield _room("/dev/shm", "NCCL", 1.0, machine.shm_gib or 0.0, "docker run --shm-size=8g", "warning")


def _room(name: str, what: str, need: float, free: float, remedy: str, otherwise: str = "problem") -> Finding:
    found = f"{what}: about {_gib(need)} GiB needed, {_gib(free)} free"
    return judge(need <= free, name, found, remedy, otherwise)


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"


def _free_and_total(demand: Demand, machine: Machine, config: RunConfig) -> tuple[float, float] | None:
    """GiB of the place that a demand is for; None where the GPU is missing."""
    if demand.place == "RAM":
        return machine.ram_gib, machine.ram_gib
    index = policy_index(config) if demand.place == "GPU" else server_index(config)
    return (machine.gpus[index].free_gib, machine.gpus[index].total_gib) if index < len(machine.gpus) else None


def _judge(demand: Demand, machine: Machine, config: RunConfig) -> Finding:
    name = f"{demand.place}, {demand.phase}"
    parts = ", ".join(f"{part} {size:.1f}" for part, size in demand.parts.items() if size >= 0.05)
    place = _free_and_total(demand, machine, config)
    if place is None:
        return Finding("warning", name, f"would take {demand.total:.1f} GiB ({parts})", _small_card(machine, config))
    free, total = place
    found = f"{demand.total:.1f} of {free:.1f} GiB free ({parts})"
    if demand.total <= TIGHT * free:
        return Finding("ok", name, found)
    if max(demand.total, free) < TIGHT * total:
        remedy = "end what else is on this card: nvidia-smi shows it"
    elif change := settings_that_fit(machine, config):
        remedy = f"set {_as_settings(change)}"
    else:
        remedy = "no setting is enough: more memory, or a smaller model"
    return Finding("warning" if demand.total <= free else "problem", name, found, remedy)


def _as_settings(change: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in change.items())


def _small_card(machine: Machine, config: RunConfig) -> str:
    """The settings that make the run fit on the smallest card that the workbook supports."""
    imagined = replace(machine, gpus=(SMALL_CARD,) * (1 + max(policy_index(config), server_index(config))))
    change = settings_that_fit(imagined, config)
    if change is None:
        return "use a card with more than 24 GB"
    return "a card of 24 GB is enough" + (f" with {_as_settings(change)}" if change else "")


def settings_that_fit(machine: Machine, config: RunConfig) -> dict[str, Any] | None:
    """The cheapest change of settings that meets every demand on a place that exists; None where no change does."""

    def fits(demand: Demand, changed: RunConfig) -> bool:
        place = _free_and_total(demand, machine, changed)
        return place is None or demand.total <= TIGHT * place[0]

    on_gpu = wants_gpu(machine, config)
    for change in _changes(config, machine, on_gpu):
        changed = config.model_copy(update=change)
        demands = predict_memory(changed, machine.architecture, on_gpu, machine.prompt_tokens)
        if all(fits(demand, changed) for demand in demands):
            return change
    return None


def _changes(config: RunConfig, machine: Machine, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """From the least loss of time to the most; none changes what is learned, except for rounding.

    Sleep, smaller microbatches, gradient checkpointing, a smaller cache, another engine.
    """
    batch = config.train_batch_size
    more = range(config.gradient_accumulation_steps + 1, batch + 1)
    microbatches = [{}, *({"gradient_accumulation_steps": steps} for steps in more if batch % steps == 0)]
    may_checkpoint = config.components == "package" and not config.gradient_checkpointing
    checkpointing = [{}, {"gradient_checkpointing": True}] if may_checkpoint else [{}]
    deeper = range(config.sleep_level + 1, 3) if config.engine == "vllm" and on_gpu else ()
    sleep = [{}, *({"sleep_level": level} for level in deeper)]
    least = _longest_response(machine, config, on_gpu)
    if config.engine != "torch":
        sizes = [config.kv_cache_gib / cut for cut in (2, 4, 8)]
        engines = [{}, *({"kv_cache_gib": size} for size in sizes if size >= least)]
    else:
        engines = [{}, {"engine": "vllm", "kv_cache_gib": math.ceil(4 * least), "sleep_level": 1}][: 1 + on_gpu]
    yield from (e | s | m | c for e in engines for c in checkpointing for m in microbatches for s in sleep)


def _longest_response(machine: Machine, config: RunConfig, on_gpu: bool) -> float:
    """Its keys and values, in GiB."""
    model = machine.architecture
    return cache_gib(model, 1, min(machine.prompt_tokens + config.max_tokens, model.context), 2 if on_gpu else 4)
