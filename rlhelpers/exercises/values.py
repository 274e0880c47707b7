"""Values of all kinds, compared and shown: tensors, formulas, numbers, and dicts and tuples of them."""

import math
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch

LONGEST = 300
RELATIVE, ABSOLUTE = 1e-4, 1e-6


def agree(got: Any, wanted: Any) -> bool:
    """Equal up to float rounding.  A dict may hold more than is wanted; a number may be Python's, numpy's or a tensor
    of one element without dimensions; True and 1 are the same, as in a mask."""
    got, wanted = _as_python(got), _as_python(wanted)
    if isinstance(wanted, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != wanted.shape or got.is_complex():
            return False
        return torch.allclose(got.double(), wanted.double(), RELATIVE, ABSOLUTE, equal_nan=True)
    if is_formula(wanted):
        import sympy

        # nsimplify: 2.0 in an exponent is as good as 2.
        return isinstance(got, sympy.Expr | Real) and sympy.simplify(sympy.nsimplify(got - wanted)) == 0
    if isinstance(wanted, Mapping):
        return isinstance(got, Mapping) and all(key in got and agree(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, tuple | list):
        same_length = isinstance(got, tuple | list) and len(got) == len(wanted)
        return same_length and all(agree(g, w) for g, w in zip(got, wanted, strict=True))
    if isinstance(wanted, Real):
        return isinstance(got, Real) and math.isclose(got, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(got) is type(wanted) and got == wanted


def is_formula(value: Any) -> bool:
    """Of sympy, which is not imported to find that out: where there is a formula, it was."""
    return "sympy" in sys.modules and isinstance(value, sys.modules["sympy"].Basic)


def _as_python(value: Any) -> Any:
    """Scalars of torch and numpy as Python's."""
    is_scalar = isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0
    return value.item() if is_scalar else value


def show(value: Any) -> str:
    """Short enough for a line or two: tensors as rounded lists, functions by name, long texts cut."""
    text = _plain(_as_python(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def describe(value: Any) -> str:
    """Type and shape, for two values that look alike and are not."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def _plain(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return repr(value)
