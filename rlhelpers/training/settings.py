"""Settings of any kind of run: what is wrong with them, and a name for what is special about them."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhelpers.paths import file_name

C = TypeVar("C", bound=BaseModel)


def checked(kind: type[C], settings: Mapping[str, Any]) -> C:
    """A configuration of this kind.  Raises ValueError with one line for each wrong setting, as make_config does."""
    try:
        return kind(**settings)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(e, kind) for e in error.errors())) from None


def unknown_name(name: str, known: Mapping[str, Any] | set[str]) -> str:
    """An error line for a misspelt setting."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"accepted are {', '.join(sorted(known))}"
    return f"{name}: there is no such setting; {hint}"


def _explain(error: dict[str, Any], kind: type[BaseModel]) -> str:
    if not error["loc"]:  # raised by _numbers_fit_together, which names its fields itself
        return str(error["ctx"]["error"])
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{name}: it is missing; accepted is {kind.model_fields[name].description}"
    if error["type"] == "value_error":
        return f"{name}: got {error['input']!r}; {error['ctx']['error']}"
    if error["type"] == "extra_forbidden":
        return unknown_name(name, kind.model_fields)
    return f"{name}: got {error['input']!r}; {error['msg'][0].lower()}{error['msg'][1:]}"


def describe(config: C, base: C, first: list[str], unnamed: set[str]) -> str:
    """What stands first, and every other setting that differs from the base, as a folder name: what runs with different
    settings never share.  `unnamed`: settings that are not named, besides those that say where and how it runs."""
    unnamed = unnamed | {"experiment", "variant", "seed", "device", "tracker", "checkpoint_every", "resume"}
    differences = [
        f"{name}={getattr(config, name)}"
        for name in type(config).model_fields
        if name not in unnamed and getattr(config, name) != getattr(base, name)
    ]
    return file_name(",".join([*first, *differences]))
