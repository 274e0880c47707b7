"""The train step of a run: the package's, or the reader's own, as notebook 03 saves it."""

import importlib.util
import inspect
import symtable
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from rlhelpers.kernels import grpo_train_step

FILE = "my_components.py"


def load_train_step(components: str) -> Callable:
    """`grpo_train_step` of the package ("package") or of my_components.py in the working directory ("mine").

    Raises ValueError naming `components` when that file is missing, cannot be run, or holds no such function.
    """
    if components == "package":
        return grpo_train_step
    file = Path(FILE)
    if not file.is_file():
        raise ValueError(f"components: got {components!r}, but there is no {FILE} here; notebook 03 saves it")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"components: {FILE} cannot be run, {type(error).__name__}: {error}") from error
    if not callable(getattr(module, "grpo_train_step", None)):
        raise ValueError(f"components: {FILE} holds no function grpo_train_step; notebook 03 saves one")
    return module.grpo_train_step


def save_components(functions: Sequence[Callable], file: Path = Path(FILE)) -> None:
    """Write functions that were defined in a notebook to a module, with what they use: imports, constants that are
    numbers or texts, and other functions of the notebook.

    Raises ValueError naming a function that uses something else of the notebook.
    """
    sources: dict[str, str] = {}
    imports: set[str] = set()
    for function in functions:
        _collect(function, sources, imports)
    head = ['"""Functions written in notebook 03."""', "\n".join(sorted(imports))]
    Path(file).write_text("\n\n".join([*head, *sources.values()]) + "\n", encoding="utf-8")


def _collect(function: Callable, sources: dict[str, str], imports: set[str]) -> None:
    """Add the function's source, after the sources of what it uses."""
    source = textwrap.dedent(inspect.getsource(function))
    for name in sorted(_global_names(symtable.symtable(source, function.__name__, "exec"))):
        value = function.__globals__.get(name)
        if name in sources or value is function or value is None:
            continue
        if isinstance(value, ModuleType):
            imports.add(f"import {value.__name__} as {name}")
        elif isinstance(value, int | float | str):
            sources[name] = f"{name} = {value!r}"
        elif getattr(value, "__module__", None) not in (None, function.__module__):
            imports.add(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif inspect.isfunction(value):
            _collect(value, sources, imports)
        else:
            raise ValueError(f"{function.__name__}: it uses {name}, which cannot be saved; define it inside")
    sources[function.__name__] = source.rstrip()


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """What a piece of source looks up outside of itself, in functions within functions too."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return own.union(*(_global_names(child) for child in table.get_children()))
