"""An exercise: a function for the reader to write, and what is true of it.

Every property is put as inputs, from small to large, on which a function that lacks it differs from one that has it.
So one rule judges them all: on each input, the reader's function must give what the reference gives.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhelpers.exercises.values import agree, describe, show

Inputs = Callable[[], Iterable[dict[str, Any]]]
"""Makes keyword arguments, the smallest first."""


@dataclass(frozen=True)
class Property:
    """A sentence that is true of the function, and the inputs that would show it false."""

    statement: str
    inputs: Inputs


def call(function: Callable, inputs: dict[str, Any]) -> Any:
    return function(**inputs)


@dataclass(frozen=True)
class Exercise:
    """Calling it with the reader's function prints the report; `repairs` judges the mending of a silent bug.

    `observe(function, inputs)` is what two functions are compared by: their value, unless the exercise says more, such
    as a gradient.  `mistakes` are usual wrong functions, each under the sentence that names it: where the reader's
    function gives what one of them gives, the report says so.  The reference is never shown.
    """

    name: str
    reference: Callable
    properties: tuple[Property, ...]
    mistakes: Mapping[str, Callable] = field(default_factory=dict)
    observe: Callable[[Callable, dict[str, Any]], Any] = call

    def __call__(self, function: Callable) -> float:
        """Print one line per property.  Returns the share that holds, which nbgrader reads as partial credit."""
        if not self._is_written(function):
            print(f"{self.name}: not written yet")
            return 0.0
        print(self.name)
        held = [self._report(function, prop) for prop in self.properties]
        return sum(held) / len(held)

    def repairs(self, buggy: Callable, function: Callable) -> float:
        """The same for the repair of `buggy`, which runs without an error and is wrong; at the end, the smallest input
        that shows the bug, as the reader's own test would."""
        share = replace(self, mistakes={"the bug itself": buggy})(function)
        if share == 1:
            for prop in self.properties:
                if failure := self._first_failure(buggy, prop):
                    inputs, wanted, got = failure
                    print(f"The bug is found: {prop.statement}; on")
                    _show_inputs(inputs)
                    print(f"      it gives {show(got)}, and yours {show(wanted)}.")
                    break
            else:
                print(f"{_name(buggy)} passes as well: leave its cell as it was and repair a copy.")
        return share

    def _is_written(self, function: Callable) -> bool:
        """A stub raises NotImplementedError or returns nothing."""
        returned = []

        def watched(*arguments, **settings):
            returned.append(function(*arguments, **settings))
            return returned[-1]

        try:
            self.observe(watched, copy.deepcopy(next(iter(self.properties[0].inputs()))))
        except NotImplementedError:
            return False
        except Exception:
            pass  # it is reported with its input
        return any(value is not None for value in returned) or not returned

    def _report(self, function: Callable, prop: Property) -> bool:
        failure = self._first_failure(function, prop)
        if failure is None:
            print(f"  holds  {prop.statement}")
            return True
        inputs, wanted, got = failure
        print(f"  FAILS  {prop.statement}")
        _show_inputs(inputs)
        print(f"      wanted  {show(wanted)}")
        print(f"      got     {show(got)}")
        if show(wanted) == show(got):
            print(f"      They look alike; wanted is {describe(wanted)}, got is {describe(got)}.")
        if name := self._recognise(function, prop):
            print(f"      This is what comes of {name}.")
        return False

    def _first_failure(self, function: Callable, prop: Property) -> tuple[dict, Any, Any] | None:
        for inputs in prop.inputs():
            wanted, got = self._observed(self.reference, inputs), self._observed(function, inputs)
            if not _agree(got, wanted):
                return inputs, wanted, got
        return None

    def _recognise(self, function: Callable, prop: Property) -> str | None:
        """The mistake that gives what the function gives on all inputs of the property, and on most of all others."""

        def shared(name: str, properties: Iterable[Property]) -> list[bool]:
            mistake = self.mistakes[name]
            return [self._gives_the_same(function, mistake, inputs) for p in properties for inputs in p.inputs()]

        alike = [name for name in self.mistakes if all(shared(name, [prop]))]
        return max(alike, key=lambda name: sum(shared(name, self.properties)), default=None)

    def _gives_the_same(self, function: Callable, mistake: Callable, inputs: dict) -> bool:
        result = self._observed(mistake, inputs)
        return not isinstance(result, Raised) and _agree(self._observed(function, inputs), result)

    def _observed(self, function: Callable, inputs: dict[str, Any]) -> Any:
        """On copies, so that a function that changes its arguments changes no other's."""
        try:
            with warnings.catch_warnings(action="ignore"):  # nbgrader takes what is written to stderr for a failure
                return self.observe(function, copy.deepcopy(inputs))
        except Exception as error:  # the reader's code may raise anything; it is shown as what was got
            return Raised(f"{type(error).__name__}: {error}")


def _agree(got: Any, wanted: Any) -> bool:
    """Never fails: a value that cannot even be compared is another one."""
    try:
        return agree(got, wanted)
    except Exception:
        return False


class Raised(str):
    """The error that a function gave instead of a value."""

    def __repr__(self) -> str:
        return f"an error, {self}"


def _name(function: Callable) -> str:
    return getattr(function, "__name__", repr(function))


def _show_inputs(inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        print(f"      {name} = {show(value)}")
