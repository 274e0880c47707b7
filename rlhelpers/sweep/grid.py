"""What a sweep runs: values of a notebook's parameters and their product, typed by the notebook's parameters cell."""

import ast
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from papermill import inspect_notebook

from rlhelpers import files, paths

MOST = 10_000  # runs of a grid; who asks for more has mistyped a range


@dataclass(frozen=True)
class Grid:
    """A notebook, and the values of some of its parameters; `known` names all of them."""

    notebook: Path
    values: Mapping[str, tuple]
    known: frozenset[str] = frozenset()

    def combinations(self) -> list[dict[str, Any]]:
        """Return the product.  The seed changes slowest: all methods have one seed before one of them has two."""
        order = sorted(self.values, key=lambda name: name != "seed")
        rows = (dict(zip(order, row, strict=True)) for row in itertools.product(*map(self.values.get, order)))
        return [{name: row[name] for name in self.values} for row in rows]


def read(file: Path, given: Mapping[str, Any]) -> list[Grid]:
    """Return a notebook's grid, or those of a YAML file.  `given` changes parameters of all notebooks.

    Raises OSError for a file that is not there, ValueError with all that is wrong in it.
    """
    if file.suffix == ".ipynb":
        return [read_grid(file, given)]
    if file.suffix in (".yaml", ".yml"):
        return read_experiments(file, given)
    raise ValueError(f"got {file}; accepted are a notebook, .ipynb, and a file of experiments, .yaml")


def read_grid(notebook: Path, given: Mapping[str, Any]) -> Grid:
    """Return the grid of a notebook.  `given` has for each parameter a text such as "0-3,7", or what YAML read.

    Raises ValueError with a line for each name that the notebook does not have and each value of a wrong type.
    """
    known = _parameters(notebook)
    errors, values = [], {}
    for name, texts in given.items():
        if name not in known:
            near = difflib.get_close_matches(f"{name}", known, n=3)
            names = ", ".join(known) or "none: no cell that could be read has the tag `parameters`"
            hint = f"did you mean {' or '.join(near)}?" if near else f"accepted are {names}"
            errors.append(f"{name}: {notebook.name} has no such parameter; {hint}")
            continue
        try:
            kind = _kind(known[name]["inferred_type_name"], known[name]["default"])
            values[name] = tuple(dict.fromkeys(parse_values(texts, kind)))
        except ValueError as error:
            errors.append(f"{name}: {error}")
    if (number := math.prod(map(len, values.values()))) > MOST:
        errors.append(f"{', '.join(values)}: got {number} combinations; accepted are at most {MOST}")
    if errors:
        raise ValueError("\n".join(errors))
    return Grid(notebook, values, frozenset(known))


def _parameters(notebook: Path) -> dict[str, Any]:
    """Those of the notebook, as papermill infers them."""
    if notebook.suffix != ".ipynb":
        raise ValueError(f"notebook: got {notebook}; accepted is a notebook, .ipynb")
    if not notebook.is_file():
        raise FileNotFoundError(f"there is no notebook {notebook}")
    try:
        return inspect_notebook(str(notebook))
    except Exception as error:  # whatever nbformat and papermill meet in a file that is something else
        what = " ".join(f"{error}".split())[:200]
        raise ValueError(f"{notebook} cannot be read as a notebook: {type(error).__name__}: {what}") from error


def read_experiments(file: Path, changes: Mapping[str, Any]) -> list[Grid]:
    """Return the grids of a YAML file such as data/experiments.yaml, with `changes` in all of them."""
    try:
        content = files.load_yaml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("experiments"), list) or not content["experiments"]:
        raise ValueError(f"{file}: accepted is a file with a list `experiments`, as in data/experiments.yaml")
    _only_known(f"{file}: ", content, {"seeds", "experiments"})
    grids, errors = [], []
    for number, experiment in enumerate(content["experiments"], start=1):
        try:
            grids.append(_read_experiment(experiment, content.get("seeds"), changes))
        except (OSError, ValueError) as error:
            errors += [f"{file}, experiment {number}: {line}" for line in str(error).splitlines()]
    if errors:
        raise ValueError("\n".join(errors))
    return grids


def _read_experiment(experiment: Any, seeds: Any, changes: Mapping[str, Any]) -> Grid:
    if not isinstance(experiment, dict) or "notebook" not in experiment:
        raise ValueError("it names no notebook")
    _only_known("", experiment, {"notebook", "seeds", "parameters"})
    notebook, parameters = experiment["notebook"], experiment.get("parameters") or {}
    if not isinstance(notebook, str):
        raise ValueError(f"notebook: got {notebook!r}; accepted is a path, such as notebooks/04_grpo.ipynb")
    if not isinstance(parameters, dict):
        raise ValueError(f"parameters: got {parameters!r}; accepted are names with values, such as learning_rate: 1e-4")
    seeds = experiment.get("seeds", seeds)
    if seeds is not None and "seed" in parameters:
        raise ValueError(f"seed: got {parameters['seed']!r} and, by seeds, {seeds!r}; accepted is one of them")
    return read_grid(paths.ROOT / notebook, parameters | ({} if seeds is None else {"seed": seeds}) | changes)


def _only_known(where: str, content: Mapping[str, Any], known: set[str]) -> None:
    if unknown := set(content) - known:
        raise ValueError(f"{where}got {', '.join(map(str, unknown))}; accepted are {', '.join(sorted(known))}")


def parse_values(given: Any, kind: str | None) -> list[Any]:
    """Return the values of one parameter: `1e-4,3e-4`, and for whole numbers also `0-3`, which is 0, 1, 2 and 3.

    `kind`: the name of the parameter's type, a key of KINDS, or None where it is not known.  Raises ValueError.
    """
    texts = _split(given) if isinstance(given, str) else given if isinstance(given, list) else [given]
    if not texts:
        raise ValueError("got []; accepted is at least one value")
    values = []
    for text in texts:
        if not isinstance(text, str | bool | int | float | list | tuple | None):
            raise ValueError(f"got {text!r}; accepted are numbers, lists and texts, a date in quotes")
        text = text.strip() if isinstance(text, str) else repr(text)
        found = re.fullmatch(r"(\d+)-(\d+)", text)
        values += _range(text, *map(int, found.groups())) if kind == "int" and found else [_value(text, kind)]
    return values


def _split(text: str) -> list[str]:
    """At the commas that stand outside brackets and quotes."""
    parts = re.findall(r"""(?:\([^()]*\)|\[[^\[\]]*\]|'[^']*'|"[^"]*"|[^,])+""", text)
    if not parts or ",".join(parts) != text or not all(part.strip() for part in parts):
        raise ValueError(f"got {text!r}; accepted are values with a comma between each two")
    return parts


def _range(text: str, first: int, last: int) -> range:
    if first > last:
        raise ValueError(f"got {text!r}; accepted is a range that counts upwards, such as 0-3")
    if last - first >= MOST:
        raise ValueError(f"got {text!r}; accepted is a range of at most {MOST} numbers")
    return range(first, last + 1)


def _value(text: str, kind: str | None) -> Any:
    if text == "None":
        return None
    read, accepted = KINDS.get(kind, (_literal_or_text, ""))
    try:
        return read(text)
    except (ValueError, SyntaxError, KeyError):
        raise ValueError(f"got {text!r}; accepted are {accepted}") from None


def _literal_or_text(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _text(text: str) -> str:
    return ast.literal_eval(text) if text[:1] in ("'", '"') else text


def _sequence(text: str) -> tuple:
    value = ast.literal_eval(text)
    if not isinstance(value, tuple | list):
        raise ValueError
    return tuple(value)


KINDS: dict[str | None, tuple[Callable[[str], Any], str]] = {
    "int": (int, "whole numbers, such as 3 or 0-3"),
    "float": (float, "numbers, such as 3e-4"),
    "bool": ({"True": True, "False": False}.__getitem__, "True and False"),
    "str": (_text, "texts, in quotes where they hold a comma"),
    "tuple": (_sequence, "tuples, such as (0.9, 0.95)"),
    "list": (_sequence, "lists, such as [1, 2]"),
}


def _kind(annotation: str, default: str) -> str | None:
    """From the annotation, of which papermill gives the text, else from the default."""
    words = [*re.findall(r"\w+", annotation), type(_literal_or_text(default)).__name__]
    return next((word for word in words if word in KINDS), None)
