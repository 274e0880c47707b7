"""Settings of any kind of run: what is wrong with them, and a name for what is special about them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlhelpers.paths import file_name
from rlhelpers.training.fields import explain

C = TypeVar("C", bound=BaseModel)


def checked(kind: type[C], settings: Mapping[str, Any], also: Sequence[str] = ()) -> C:
    """A configuration of this kind.  Raises ValueError with one line for each wrong setting, as make_config does.
    `also`: what else its maker takes, and a misspelt name may have meant."""
    fields = kind.model_fields
    missing = [name for name, field in fields.items() if field.is_required() and name not in settings]
    if missing:
        lines = (f"{name}: it is missing; accepted is {fields[name].description}" for name in missing)
        raise ValueError("\n".join(lines))
    try:
        return kind(**settings)
    except ValidationError as error:
        raise ValueError(explain(error, [*also, *fields])) from None


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
