"""Random choices of a run.  Each depends on seed, purpose and step alone, so that a resumed run makes the same."""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


def draw_batch(items: Sequence[T], batch: int, size: int, seed: int) -> list[T]:
    """Return the `batch`-th batch of an endless stream in which every epoch is a new shuffle."""
    places = (divmod(position, len(items)) for position in range(batch * size, (batch + 1) * size))
    return [items[_shuffled(len(items), seed, epoch)[index]] for epoch, index in places]


@lru_cache(maxsize=2)  # every batch asks for that of its epoch
def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(derive_seed(seed, "epoch", epoch)).sample(range(count), count)


def derive_seed(seed: int, purpose: str, number: int) -> int:
    """Return a seed for one use of randomness in a run, the same in every run with this seed."""
    return random.Random(f"{seed}/{purpose}/{number}").getrandbits(63)
