"""A notebook's parameters: those of its parameters cell, and of the cell that papermill adds."""

import ast
import os
from collections.abc import MutableMapping
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from rlhelpers.training.settings import explain, unknown_name

HEADING = "# Parameters"  # papermill's own first line; the notebooks' parameters cells begin with it too


def read_parameters(namespace: MutableMapping[str, Any], **kinds: Any) -> dict[str, Any]:
    """Return the parameters of this notebook, from its `globals()`, and set the notebook's variables to them.

    The names are those that the parameters cell assigns.  RLHELPERS_QUICK=1 in the environment sets `quick`, where the
    notebook has it.

    kinds: for a notebook that makes no configuration, the kind (see training/settings) of each parameter.  A number
    that arrives as text is read, as make_config reads it.

    Raises ValueError, before anything runs, with a line for each name that only papermill's cell has, with the nearest
    known ones, or for each value that is of another kind.
    """
    # In an IPython kernel `In` holds the source of every cell that ran; the last parameters cell counts.
    cells = [source for source in namespace["In"] if source.lstrip().startswith(HEADING)]
    own = [cell for cell in cells if not _is_papermills(cell)]
    # nbval runs cells without a history; the annotations of the parameters name them then.
    known = _assigned_names(own[-1]) if own else list(namespace.get("__annotations__", {}))
    if not known:
        raise RuntimeError("parameters: run the parameters cell at the top of the notebook first")
    unknown = [name for cell in cells if _is_papermills(cell) for name in _assigned_names(cell) if name not in known]
    if unknown:
        raise ValueError("\n".join(unknown_name(name, known) for name in unknown))
    parameters = {name: namespace[name] for name in known}
    if "quick" in parameters and os.environ.get("RLHELPERS_QUICK", "") not in ("", "0"):
        parameters["quick"] = True
    if kinds:
        parameters = _checked(parameters, kinds)
    namespace.update(parameters)
    return parameters


def _checked(parameters: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    settings = ConfigDict(extra="forbid", allow_inf_nan=False)
    model = create_model("Parameters", __config__=settings, **{name: (kind, ...) for name, kind in kinds.items()})
    try:
        return dict(model(**parameters))
    except ValidationError as errors:
        raise ValueError(explain(errors, kinds)) from None


def _is_papermills(cell: str) -> bool:
    """Papermill's heading is the bare word; the notebooks' own goes on to explain."""
    return cell.lstrip().splitlines()[0].strip() == HEADING


def _assigned_names(cell: str) -> list[str]:
    names = []
    for statement in ast.parse(cell).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names
