"""Values of all kinds, compared and shown: tensors, formulas, numbers, and dicts and tuples of them."""

import math
import textwrap
from collections.abc import Mapping
from numbers import Real
from typing import Any

import sympy
import torch

RELATIVE, ABSOLUTE = 1e-4, 1e-6


def agree(got: Any, wanted: Any) -> bool:
    """Equal up to float rounding.  A dict may hold more than is wanted; True and 1 are the same, as in a mask."""
    if isinstance(wanted, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != wanted.shape:
            return False
        return torch.allclose(got.double(), wanted.double(), RELATIVE, ABSOLUTE, equal_nan=True)
    if isinstance(wanted, sympy.Basic):
        return isinstance(got, sympy.Basic | Real) and sympy.simplify(got - wanted) == 0
    if isinstance(wanted, Mapping):
        return isinstance(got, Mapping) and all(key in got and agree(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, tuple | list):
        same_length = isinstance(got, tuple | list) and len(got) == len(wanted)
        return same_length and all(agree(g, w) for g, w in zip(got, wanted, strict=True))
    if isinstance(wanted, Real) and isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(wanted, Real) and isinstance(got, Real):
        return math.isclose(got, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(got) is type(wanted) and got == wanted


def show(value: Any) -> str:
    """Short enough for one line: tensors as rounded lists, functions by name, long texts cut."""
    return textwrap.shorten(_plain(value), 300, placeholder=" ...")


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)
