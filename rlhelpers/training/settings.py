"""The kinds of values that settings have, and what is said of a value that is of no such kind.

Notebooks hand values over as papermill does, so numbers, True and False may be texts, as from `-y` and `-r`.  Whatever
else a text or a bool would have to be guessed to mean is refused.


Settings of any kind of run: what is wrong with them, and a name for what is special about them."""

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, ValidationError

from rlhelpers.checks import shown
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.paths import file_name


def read_switch(value: Any) -> bool:
    """True, False, or their names in any case: papermill reads `-p quick false` as a text, which would be true.

    Raises ValueError for all else: 1, "yes" and "off" too."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise ValueError("accepted are True and False")
    return value


def _no_bool(value: Any) -> Any:
    """Python counts with True as with 1; who writes it for a number has confused two parameters."""
    if isinstance(value, bool):
        raise ValueError("accepted is a number")
    return value


def _pair(value: Any) -> Any:
    """`-p betas "(0.9, 0.95)"` arrives as text."""
    if not isinstance(value, str):
        return value
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        read = None
    if not isinstance(read, tuple | list):
        raise ValueError("accepted are two numbers, such as (0.9, 0.95)")
    return read


def _text(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError("accepted is a text that is not blank and has no NUL")
    return text


def _temperature(value: float) -> float:
    if value != 0 and not 0.01 <= value <= 100:
        raise ValueError("accepted is 0, which is greedy, or a number from 0.01 to 100")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w,=+-][\w.,=+-]*", text):
        raise ValueError("accepted are letters, digits and _ . , = + -, and no dot at the beginning")
    if len(text.encode("utf-8")) > 200:
        raise ValueError("accepted are names of at most 200 bytes")
    return text


def _estimator_row(value: Any) -> Any:
    """A name stands for its row of the table."""
    row = ESTIMATORS.get(value) if isinstance(value, str) else value
    if not isinstance(row, Estimator):
        raise ValueError(f"accepted are {', '.join(ESTIMATORS)}, or an Estimator of your own")
    if not isinstance(row.name, str) or not row.name:
        raise ValueError("accepted as its name is a text that is not empty")
    if ESTIMATORS.get(row.name, row) != row:
        raise ValueError(f"the name {row.name!r} belongs to another row of the table; give yours its own")
    return row


def _plain(row: Estimator) -> dict[str, Any]:
    """The row for a YAML file: a function is written as its name."""
    return {n: getattr(cell, "__qualname__", repr(cell)) if callable(cell) else cell for n, cell in vars(row).items()}


Switch = Annotated[bool, BeforeValidator(read_switch)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Real = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[Whole, Field(ge=1, lt=2**31)]  # no batch and no run is larger, and every library can hold it
Positive = Annotated[Real, Field(gt=0)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Temperature = Annotated[Real, AfterValidator(_temperature)]
Betas = Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")]
Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, AfterValidator(_name)]
EstimatorRow = Annotated[Estimator, BeforeValidator(_estimator_row), PlainSerializer(_plain)]


def between(least: int, most: int) -> Any:
    """The kind of whole numbers from `least` to `most`."""
    return Annotated[Whole, Field(ge=least, le=most)]


def explain(errors: ValidationError, known: Iterable[str]) -> str:
    """One line for each wrong setting: its name, the value, what is accepted.  known: the names that there are."""
    return "\n".join(_line(error, known) for error in errors.errors())


def unknown_name(name: str, known: Iterable[str]) -> str:
    """An error line for a misspelt setting."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"accepted are {', '.join(sorted(known))}"
    return f"{name}: there is no such setting; {hint}"


def _line(error: dict[str, Any], known: Iterable[str]) -> str:
    if not error["loc"]:  # raised for several settings at once, by what names them itself
        return str(error["ctx"]["error"])
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_name(name, known)
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    if error["type"] == "int_parsing_size":  # pydantic speaks of a string here, also where it is none
        message = "accepted are smaller whole numbers"
    return f"{name}: got {shown(error['input'])}; {message[0].lower()}{message[1:]}"


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
