"""The train step of a run: the package's, or the reader's own, which notebook 03 saves in my_components.py."""

import ast
import builtins
import importlib.util
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhelpers.checks import check_list, shown
from rlhelpers.files import write_atomically
from rlhelpers.kernels import grpo_train_step
from rlhelpers.training.fingerprint import can_be_imported

FILE = "my_components.py"
PER_RESPONSE = ("rewards", "format_rewards")
NEEDED = (*PER_RESPONSE, "mean_reward", "mean_format_reward", "grad_norm")


def load_train_step(components: str, with_token_weights: bool = False) -> Callable | None:
    """Return `grpo_train_step` of my_components.py in the working directory ("mine"); None for the package's.

    with_token_weights: the loop will give it token_weights, which the step of notebook 03 does not know.
    Raises ValueError naming `components` when that file is missing, cannot be run, or holds no such function.
    """
    if components == "package":
        return None
    file = Path(FILE)
    if not file.is_file():
        raise ValueError(f"components: got {components!r}, but there is no {FILE} here; notebook 03 saves it")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"components: {FILE} cannot be run, {type(error).__name__}: {error}") from error
    if not callable(getattr(module, "grpo_train_step", None)):
        raise ValueError(f"components: {FILE} holds no function grpo_train_step; notebook 03 saves one")
    given = dict.fromkeys(inspect.signature(grpo_train_step).parameters)
    if not with_token_weights:
        del given["token_weights"]
    try:
        inspect.signature(module.grpo_train_step).bind(**given)
    except TypeError as error:
        raise ValueError(f"components: grpo_train_step of {FILE} does not take what the loop gives: {error}") from error
    return module.grpo_train_step


def as_metrics(result: tuple[Tensor | float, Mapping[str, Any]], batch_size: int) -> dict[str, Any]:
    """Return what a train step returned as metrics: `rewards` and `format_rewards` as tensors, (batch_size,), the rest
    as numbers.  Raises ValueError naming what is missing, or is of another kind."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise ValueError(f"grpo_train_step: it returned {type(result).__name__}; accepted is (loss, metadata)")
    loss, metadata = result
    missing = [name for name in NEEDED if name not in metadata]
    if missing:
        raise ValueError(f"grpo_train_step: its metadata lacks {', '.join(missing)}")
    metrics = {"loss": loss, **metadata}
    for name in metrics.keys() - set(PER_RESPONSE):
        try:
            metrics[name] = None if metrics[name] is None else float(metrics[name])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"grpo_train_step: {name} is {metrics[name]!r}; accepted is a number") from error
    for name in PER_RESPONSE:
        metrics[name] = torch.as_tensor(metrics[name] if metrics[name] is not None else [])
        if metrics[name].shape != (batch_size,):
            raise ValueError(f"grpo_train_step: {name} has shape {tuple(metrics[name].shape)}, wanted ({batch_size},)")
    return metrics


def save_components(functions: Sequence[Callable]) -> list[str]:
    """Write functions of a notebook to my_components.py in the working directory, with what they use of the notebook:
    imports, constants, and other functions.

    Returns the names of those that are stubs; if there are any, nothing is written.  Raises ValueError naming what
    cannot be written down so, before the file is touched.
    """
    check_list(functions=functions)
    for i, function in enumerate(functions):
        if not inspect.isfunction(function):
            raise ValueError(f"functions: number {i} is {shown(function)}; accepted are functions of a notebook")
    if stubs := [f.__name__ for f in functions if "raise NotImplementedError" in inspect.getsource(f)]:
        return stubs
    sources: dict[str, str] = {}
    imports: set[str] = set()
    for function in functions:
        _collect(function, sources, imports)
    head = ['"""Functions written in notebook 03."""', "\n".join(sorted(imports))]
    write_atomically(Path(FILE), "\n\n".join([*head, *sources.values()]) + "\n")
    return []


def _collect(function: Callable, sources: dict[str, str], imports: set[str]) -> None:
    """Add the function's source, after what it uses."""
    function = inspect.unwrap(function)  # what a decorator wraps
    if function.__code__.co_freevars:
        raise ValueError(f"{function.__name__}: it uses {function.__code__.co_freevars[0]} of an enclosing function")
    source = textwrap.dedent(inspect.getsource(function))
    sources[function.__name__] = source  # already here, for functions that call each other
    for name in sorted(_global_names(symtable.symtable(source, function.__name__, "exec"))):
        if name in function.__globals__ and name not in sources:
            value = function.__globals__[name]
            if inspect.isfunction(value) and value.__module__ == function.__module__ and value.__name__ == name:
                _collect(value, sources, imports)
            elif line := _import_line(name, value):
                imports.add(line)
            elif _is_literal(value):
                sources[name] = f"{name} = {value!r}"
            else:
                raise ValueError(
                    f"{function.__name__}: it uses {name}, which cannot be saved; define it inside the function, or "
                    "import its module and name it from there, as in torch.zeros"
                )
        elif name not in sources and not hasattr(builtins, name):
            raise ValueError(f"{function.__name__}: it uses {name}, which is not defined")
    sources[function.__name__] = sources.pop(function.__name__).rstrip()


def _import_line(name: str, value: Any) -> str | None:
    """Return the import that gives `value` its name; None where no import does."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    return f"from {value.__module__} import {value.__qualname__} as {name}" if can_be_imported(value) else None


def _is_literal(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a piece of source looks up outside of itself, also in its decorators and in functions within it."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return own.union(*(_global_names(child) for child in table.get_children()))
