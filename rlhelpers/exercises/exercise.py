"""An exercise: a function for the reader to write, and what is true of it.

Each property has inputs, from small to large, on which a function that lacks it differs from one that has it.  So one
rule judges all: on each input, the reader's function must give what the reference gives.
"""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

Inputs = Sequence[dict[str, Any]] | Callable[[], Iterable[dict[str, Any]]]
"""Keyword arguments, the smallest first; or a function that makes them, where that takes time."""


@dataclass(frozen=True)
class Exercise:
    """Call it with the reader's function to print the report; `repairs` judges the repair of a silent bug.

    `properties`: inputs under the sentence that they show.  `mistakes`: usual wrong functions, under the sentence that
    names them; the report names the one that gives what the reader's function gives.  `observe(function, inputs)` is
    what is compared: the value, unless the exercise says more, such as a gradient.  The reference is never shown.
    """

    name: str
    reference: Callable
    properties: Mapping[str, Inputs]
    mistakes: Mapping[str, Callable] = field(default_factory=dict)
    observe: Callable[[Callable, dict[str, Any]], Any] = lambda function, inputs: function(**inputs)

    def __call__(self, function: Callable) -> float:
        """Print one line per property.  Return the share that holds, which nbgrader reads as partial credit."""
        if not self._is_written(function):
            print(f"{self.name}: not written yet")
            return 0.0
        print(self.name)
        held = [self._report(function, statement) for statement in self.properties]
        return sum(held) / len(held)

    def repairs(self, buggy: Callable, function: Callable) -> float:
        """The same for the repair of `buggy`, which runs without an error and is wrong.

        At the end, show the smallest input that shows the bug, as the reader's own test would.
        """
        share = replace(self, mistakes={"the bug itself": buggy})(function)
        if share < 1:
            return share
        for statement in self.properties:
            if failure := self._first_failure(buggy, statement):
                inputs, wanted, got = failure
                print(f"The bug is found: {statement}; on")
                _show_inputs(inputs)
                print(f"      it gives {show(got)}, and yours {show(wanted)}.")
                return share
        print(f"{getattr(buggy, '__name__', buggy)} passes as well: leave its cell as it was and repair a copy.")
        return share

    def inputs(self, statement: str) -> Iterable[dict[str, Any]]:
        made = self.properties[statement]
        return made() if callable(made) else made

    def _is_written(self, function: Callable) -> bool:
        """A stub raises NotImplementedError or returns nothing."""
        returned = []

        def watched(*arguments, **settings):
            returned.append(function(*arguments, **settings))
            return returned[-1]

        try:
            self.observe(watched, copy.deepcopy(next(iter(self.inputs(next(iter(self.properties)))))))
        except NotImplementedError:
            return False
        except Exception:
            pass  # it is reported with its input
        return any(value is not None for value in returned) or not returned

    def _report(self, function: Callable, statement: str) -> bool:
        failure = self._first_failure(function, statement)
        if failure is None:
            print(f"  holds  {statement}")
            return True
        inputs, wanted, got = failure
        print(f"  FAILS  {statement}")
        _show_inputs(inputs)
        print(f"      wanted  {show(wanted)}\n      got     {show(got)}")
        if show(wanted) == show(got):
            print(f"      They look alike; wanted is {_describe(wanted)}, got is {_describe(got)}.")
        if name := self._recognise(function, statement):
            print(f"      This is what comes of {name}.")
        return False

    def _first_failure(self, function: Callable, statement: str) -> tuple[dict, Any, Any] | None:
        for inputs in self.inputs(statement):
            wanted, got = self._observed(self.reference, inputs), self._observed(function, inputs)
            if not _agree(got, wanted):
                return inputs, wanted, got
        return None

    def _recognise(self, function: Callable, statement: str) -> str | None:
        """The mistake that gives the same on all inputs of the property, and on most of all others."""
        alike = [name for name in self.mistakes if all(self._same(function, name, statement))]
        if len(alike) < 2:
            return next(iter(alike), None)
        return max(alike, key=lambda name: sum(sum(self._same(function, name, s)) for s in self.properties))

    def _same(self, function: Callable, mistake: str, statement: str) -> Iterator[bool]:
        """Whether the function gives what the mistake gives, on each input of a property."""
        for inputs in self.inputs(statement):
            result = self._observed(self.mistakes[mistake], inputs)
            yield not isinstance(result, Raised) and _agree(self._observed(function, inputs), result)

    def _observed(self, function: Callable, inputs: dict[str, Any]) -> Any:
        """Observe on copies: a function that changes its arguments changes no other's."""
        try:
            with warnings.catch_warnings(action="ignore"):  # nbgrader takes any text on stderr for a failure
                return self.observe(function, copy.deepcopy(inputs))
        except Exception as error:  # the reader's code may raise anything; the report shows it
            return Raised(f"{type(error).__name__}: {error}")


class Raised(str):
    """The error that a function gave instead of a value."""

    def __repr__(self) -> str:
        return f"an error, {self}"


# ---- Values of all kinds, compared and shown: tensors, formulas, numbers, and dicts and tuples of them.

LONGEST = 300  # characters
RELATIVE, ABSOLUTE = 1e-4, 1e-6


def _agree(got: Any, wanted: Any) -> bool:
    """Never fails: a value that cannot be compared is another one."""
    try:
        return agree(got, wanted)
    except Exception:
        return False


def agree(got: Any, wanted: Any) -> bool:
    """Equal up to float rounding.

    A dict may hold more than is wanted.  A number may be Python's, numpy's or a tensor without dimensions.  True and 1
    are the same, as in a mask.
    """
    got, wanted = _as_python(got), _as_python(wanted)
    if isinstance(wanted, torch.Tensor):
        if not isinstance(got, torch.Tensor) or got.shape != wanted.shape or got.is_complex():
            return False
        return torch.allclose(got.double(), wanted.double(), RELATIVE, ABSOLUTE, equal_nan=True)
    # sympy takes half a second to import; where there is a formula, it is there.
    if "sympy" in sys.modules and isinstance(wanted, sys.modules["sympy"].Basic):
        sympy = sys.modules["sympy"]
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


def _as_python(value: Any) -> Any:
    """Scalars of torch and numpy as Python's."""
    is_scalar = isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0
    return value.item() if is_scalar else value


def show(value: Any) -> str:
    """A text of a line or two: tensors as rounded lists, functions by name, long texts cut."""
    text = _plain(_as_python(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _show_inputs(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        print(f"      {name} = {show(value)}")


def _describe(value: Any) -> str:
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
