"""Checks of arguments: an error names the argument, the value, and what is accepted."""

import math
from collections.abc import Sequence
from numbers import Real

from torch import Tensor


def check_same_length(**lists: Sequence) -> None:
    """Raise ValueError unless all lists have one common, positive length."""
    for name, values in lists.items():
        if isinstance(values, str):
            raise ValueError(f"{name}: got the text {values[:40]!r}; accepted is a list")
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"{found}; all must have the same length, at least 1")


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one common shape (batch, length)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        found = ", ".join(f"{name} has {shape}" for name, shape in shapes.items())
        raise ValueError(f"{found}; all must have the same shape, (batch, length)")


def check_positive(name: str, value: float, accepted: str = "a finite number above 0") -> None:
    """Raise ValueError unless `value` is a finite number above 0 (True and "1" are none)."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}: got {value!r}; accepted is {accepted}")


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
