"""A fingerprint: one short text for all that decides the numbers of a run.

It is made of every setting that can change a bit of them, of the files that model, task and components="mine" stand
for, and of the source of an estimator's own functions.  A function of a notebook counts with its defaults and with what
it uses of the notebook.  An object that cannot be looked into, such as one with a __call__, gets another fingerprint
every time.  Not in it: versions and machine, which run.json names; what a name on the hub stands for; and what
my_components.py imports.
"""

import dis
import hashlib
import inspect
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rlhelpers import paths
from rlhelpers.files import sha256

OF_A_MODEL = {".json", ".jinja", ".model", ".safetensors", ".txt"}
NOT_OF_A_MODEL = "recipe.json"  # how long the making of data/tiny took, among others


def fingerprint(settings: dict[str, Any], files: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits of settings, as JSON has them, and of what the files hold."""
    settings = settings | {"files": [[file.name, _digest(file)] for file in files]}
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def model_and_task_files(model: str, task: str) -> Iterator[Path]:
    """The files of a model's and a task's folder, those that exist."""
    folder = paths.TINY if model == "tiny" else Path(model)
    problems = paths.TINY if task == "tiny" else Path(task)
    if os.path.isdir(folder):  # not is_dir, which raises OSError for a name too long for a file
        of_model = (file for file in folder.iterdir() if file.suffix in OF_A_MODEL and file.name != NOT_OF_A_MODEL)
        yield from sorted(file for file in of_model if file.is_file())
    named = (problems / f"{split}.jsonl" for split in ("train", "validation"))
    yield from (file for file in named if os.path.isfile(file))


def _digest(file: Path) -> str:
    status = file.stat()
    return _cached_sha256(file.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)  # the weights of a large model take seconds, and a sweep asks for each of its runs
def _cached_sha256(file: Path, *_: int) -> str:
    return sha256(file)


def identity(value: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Return JSON that is the same for values that compute the same."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if any(value is outer for outer in inside):  # functions that call each other
        return "already described"
    inside = (*inside, value)
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(identity(item, inside) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([identity(key, inside), identity(item, inside)] for key, item in value.items())]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # of torch and of numpy
        return [str(value.dtype), value.tolist()]
    if isinstance(value, partial):
        return ["partial", *(identity(part, inside) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, ModuleType):
        return ["module", value.__name__, _digest_of_source(value)]
    if can_be_imported(value):
        return ["from", value.__module__, value.__qualname__, _digest_of_source(value)]
    if inspect.isfunction(value):
        return _function(value, inside)
    return f"{type(value).__qualname__}, never the same: {uuid.uuid4()}"


def can_be_imported(value: Any) -> bool:
    """Return whether `from module import name` gives this object, by its own module and name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return module not in (None, "__main__") and getattr(sys.modules.get(module), str(name), None) is value


def _digest_of_source(value: Any) -> str | None:
    """Return the digest of the file that it comes from; None for what is built in."""
    try:
        return _digest(Path(inspect.getsourcefile(value) or ""))
    except (OSError, TypeError):
        return None


def _function(function: Any, inside: tuple[Any, ...]) -> Any:
    """Return its source, its defaults, and what it looks up outside of itself."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return f"a function without source, never the same: {uuid.uuid4()}"
    used = {name: function.__globals__[name] for name in _global_names(function.__code__) & set(function.__globals__)}
    outer = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    used |= {name: cell.cell_contents for name, cell in outer.items()}
    parts = [function.__defaults__, function.__kwdefaults__, dict(sorted(used.items()))]
    return ["function", inspect.cleandoc(source), *(identity(part, inside) for part in parts)]


def _global_names(code: CodeType) -> set[str]:
    """Names of globals that the code looks up, in functions within it too."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
