"""The training step of the course's model at its real size, with random weights: its speed beside the card's own, and
its memory beside what was predicted."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, Olmo2Config, PreTrainedModel

from rlhelpers.bench.case import Rows, difference, make_up_rows
from rlhelpers.bench.measure import GIB, Clock, compare_seconds, in_turns, peak_bytes, reading, synchronize
from rlhelpers.bench.report import Report, conditions
from rlhelpers.bench.variants import GradientKeeper, Variant, compile_parts, ladder, training_flops
from rlhelpers.doctor.fit import TIGHT
from rlhelpers.doctor.machine import OLMO_1B
from rlhelpers.doctor.memory import Architecture, activation_bytes, logit_bytes
from rlhelpers.models import can_share, choose_device, make_optimizer
from rlhelpers.training.config import make_config

ROUNDS = 3
MULTIPLICATIONS, RATE_ROUNDS = 20, 5
# |g - g'| / |g'| of the gradient g of a variant and g' of the plain step; and of the loss, in nats per token.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.1}
LOSS_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

NOTES = [
    "One step of Dr. GRPO and AdamW; without signal: groups that earn nothing.",
    "A variant with a + has what those above it have, but for checkpointing.  torch.compile comes after the others.",
    "utilisation: of the matrix rate, which is FLOP/s in the product of two square matrices in that dtype.",
    "GiB: the fullest moment, with weights and optimizer, measured and as rlhelpers doctor counts it, without what "
    "CUDA itself takes.",
    "gradient difference: |g - g'| / |g'| from the plain step's; loss difference: in nats per token.",
]


class Scale(NamedTuple):
    """`model`: sizes of Olmo2Config.  Prompts and responses have from shortest to longest tokens; of the `groups`,
    `without_signal` earn nothing.  `matrix`: the side of the matrices that measure the device."""

    model: Mapping[str, Any]
    groups: int
    group_size: int
    prompt_tokens: tuple[int, int]
    response_tokens: tuple[int, int]
    without_signal: int
    matrix: int


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 192}
SMALL |= {"vocab_size": 2000, "max_position_embeddings": 128, "tie_word_embeddings": False}
SCALES = {"cuda": Scale(OLMO_1B, 8, 8, (128, 256), (128, 512), 2, 8192)}
SCALES |= {"cpu": Scale(SMALL, 4, 4, (20, 40), (10, 40), 1, 256)}


@dataclass(frozen=True)
class Bench:
    """What all variants share.  `microbatch_size` in rows."""

    model: PreTrainedModel
    architecture: Architecture
    optimizer: Optimizer
    rows: Rows
    microbatch_size: int

    @property
    def device(self) -> torch.device:
        return self.model.device

    def train(self, variant: Variant, optimizer: Any = None) -> tuple:
        result = variant.train(self.model, optimizer or self.optimizer, self.rows, self.microbatch_size)
        synchronize(self.device)
        return result


def bench_gpu(device: str = "auto", rounds: int = ROUNDS) -> Report:
    """Measure every variant of the step.

    A variant that computes something else than the plain step, does not fit, or cannot be compiled has its reason in
    the report and no speed.  Raise ValueError for a device that is not there or has too little memory, RuntimeError
    where the plain step itself fails.
    """
    device = torch.device(choose_device(device))
    scale, on_gpu = SCALES[device.type], device.type == "cuda"
    bench = prepare(scale, device)
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    found = conditions() | {"device": name, "cuda": torch.version.cuda}
    rate = matrix_rate(device, bench.model.dtype, scale.matrix)
    variants = ladder(on_gpu)
    plain = GradientKeeper(bench.model)
    loss, _ = bench.train(variants[0], plain)
    work, seconds, failed = {}, {}, {}
    for compiled in (False, True):
        if compiled:
            compile_parts(bench.model)
        chosen = {variant.name: variant for variant in variants if variant.compiled == compiled}
        for name, variant in chosen.items():
            try:
                work[name] = check(bench, variant, loss.item(), plain.gradients)
            except Exception as error:  # no memory, no compiler, another gradient: each has its own kind of error
                failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                bench.model.zero_grad()
                if on_gpu:
                    torch.cuda.empty_cache()
        seconds |= in_turns({n: partial(_seconds, bench, v) for n, v in chosen.items() if n in work}, rounds)
    if variants[0].name in failed:
        why = failed[variants[0].name]
        raise RuntimeError(f"gpu: the plain step, which the others are compared with, failed: {why}")
    settings = {
        "device": found["device"],
        "matrix_rate": rate,
        "parameters": bench.architecture.parameters,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "groups": scale.groups,
        "group_size": scale.group_size,
        "without_signal": scale.without_signal,
        "tokens": bench.rows.tokens,
        "microbatch_size": bench.microbatch_size,
        "rounds": rounds,
    }
    times, rows = compare_seconds(seconds), []
    for name, done in work.items():
        median = times[name]["seconds"].median
        speed = {"tokens_per_second": bench.rows.tokens / median, "utilisation": done["flops"] / median / rate}
        rows.append({"variant": name, **times[name], **speed, **done})
    rows += [{"variant": name, "not_measured": reason} for name, reason in failed.items()]
    return Report("gpu", found, settings, rows, NOTES)


def prepare(scale: Scale, device: torch.device) -> Bench:
    """Return the model with random weights, in bf16 on a GPU and in float32 on the CPU, and an optimizer that moves
    nothing, so that every step is the same."""
    config, on_gpu = Olmo2Config(**scale.model), device.type == "cuda"
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    architecture = Architecture.of(config)
    lengths = scale.prompt_tokens, scale.response_tokens
    rows = make_up_rows(architecture.vocabulary, scale.groups, scale.group_size, *lengths, scale.without_signal)
    can_share(model)  # found out once for a model
    optimizer = make_optimizer(model, make_config(learning_rate=1e-30))
    size = rows_that_fit(architecture, scale, torch.cuda.mem_get_info(device)[0]) if on_gpu else scale.group_size
    return Bench(model, architecture, optimizer, rows, size)


def rows_that_fit(model: Architecture, scale: Scale, free: float) -> int:
    """Return how many rows of a group the plain step, which holds most, can take at a time in bf16.  `free`: bytes,
    with the weights there."""
    number, longest = 2, scale.prompt_tokens[1] + scale.response_tokens[1]
    free = TIGHT * free - 4 * model.parameters * number  # gradients, two moments, and the plain gradient, which is kept
    of_a_row = activation_bytes(model, longest, number) + logit_bytes(model, longest, number)
    fitting = [n for n in range(1, scale.group_size + 1) if scale.group_size % n == 0 and n * of_a_row <= free]
    if not fitting:
        raise ValueError("device: it has too little memory for the plain step, also with one row at a time")
    return fitting[-1]


def check(bench: Bench, variant: Variant, loss: float, gradients: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return what the variant did, of which this is the warm-up too.  Raise ValueError where its loss or gradient is
    another than the plain step's."""
    kept = GradientKeeper(bench.model)
    with reading(bench.model) as reads:
        own_loss, metadata = bench.train(variant, kept)
    off, apart = difference(kept.gradients, gradients), abs(own_loss.item() - loss)
    limits = LIMITS[bench.model.dtype], LOSS_LIMITS[bench.model.dtype]
    if not (off <= limits[0] and apart <= limits[1]):
        raise ValueError(
            f"the gradient differs from the plain step's by {off:.2g} of its norm, and the loss by {apart:.2g}; "
            f"accepted are {limits[0]} and {limits[1]}"
        )
    kept.gradients = None
    bench.train(variant)  # the moments of the optimizer are there from now on
    model, number = bench.architecture, bench.model.dtype.itemsize
    state = 3 * model.parameters * number
    predicted = state + model.parameters * number + variant.predicted_bytes(model, number, reads)
    return {
        "tokens_read": sum(read.tokens for read in reads),
        "flops": training_flops(model, reads, variant.scored_tokens(bench.rows, reads)),
        "GiB": (state + peak_bytes(partial(bench.train, variant), bench.device)) / GIB,
        "predicted_GiB": predicted / GIB,
        "gradient_difference": off,
        "loss_difference": apart,
        "loss": own_loss.item(),
        "grad_norm": metadata["grad_norm"],
    }


def _seconds(bench: Bench, variant: Variant, number: int) -> float:
    with Clock() as clock:
        bench.train(variant)
    return clock.seconds


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the floating-point operations per second of the product of two square matrices; the best of some
    rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = left @ right
    rates = []
    for _ in range(RATE_ROUNDS):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(MULTIPLICATIONS):
            torch.mm(left, right, out=out)
        synchronize(device)
        rates.append(2 * size**3 * MULTIPLICATIONS / (time.perf_counter() - started))
    return max(rates)
