"""What a model read, the arithmetic in it, and how fast a device does arithmetic at best."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlhelpers.doctor.memory import Architecture
from rlhelpers.models import cache_argument

MULTIPLICATIONS = 20
ROUNDS = 5


@dataclass(frozen=True)
class Read:
    """One forward pass: `rows` of `width` tokens, padding included, which see `past` tokens of a cache before them."""

    rows: int
    width: int
    past: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@contextmanager
def reading(model: PreTrainedModel) -> Iterator[list[Read]]:
    """A list that gets every forward pass inside."""
    reads = []

    def note(module, _, arguments) -> None:
        cache = arguments.get(cache_argument(model))
        reads.append(Read(*arguments["input_ids"].shape, 0 if cache is None else cache.get_seq_length()))

    hook = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield reads
    finally:
        hook.remove()


def microbatches(reads: Sequence[Read]) -> list[list[Read]]:
    """The forward passes of each: it begins without a cache."""
    found: list[list[Read]] = []
    for read in reads:
        if not read.past:
            found.append([])
        found[-1].append(read)
    return found


def training_flops(model: Architecture, reads: Sequence[Read], scored: int) -> int:
    """Floating-point operations of the matrix products, forward and backward, nothing computed twice: 2 for each weight
    and token forward, and as many again for the gradient to the input and for that to the weight; and the same for
    attention's two products, whose masked half counts too, as in the usual definition of model FLOPs (arXiv:2204.02311,
    appendix B).  `scored`: at how many tokens there were logits."""
    layer = model.hidden * (2 * model.hidden + 2 * model.key_values + 3 * model.intermediate)
    weights = sum(read.tokens for read in reads) * model.layers * layer + scored * model.hidden * model.vocabulary
    attention = sum(2 * read.tokens * (read.past + read.width) for read in reads) * model.layers * model.hidden
    return 3 * 2 * (weights + attention)


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations per second of the product of two square matrices; the best of some rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = left @ right
    rates = []
    for _ in range(ROUNDS):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(MULTIPLICATIONS):
            torch.mm(left, right, out=out)
        synchronize(device)
        rates.append(2 * size**3 * MULTIPLICATIONS / (time.perf_counter() - started))
    return max(rates)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
