"""Settings of a run of any kind: their types, what each of them affects, and errors that say what is accepted.

Notebooks hand values over as papermill does: numbers, True and False may be texts, as from `-y` and `-r`.  A text or a
bool that could mean two things is refused.
"""

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from rlhelpers.checks import shown
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.paths import file_name
from rlhelpers.training.fingerprint import fingerprint, model_and_task_files

# --- types -----------------------------------------------------------------------------------------------------------


def read_switch(value: Any) -> bool:
    """Return True or False, also for their names in any case: papermill reads `-p quick false` as a text.

    Raises ValueError for all else, such as 1, "yes" and "off"."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise ValueError("accepted are True and False")
    return value


def _only(fits: Callable[[Any], Any], accepted: str) -> Callable[[Any], Any]:
    """Return a function for pydantic that returns a value that fits, and raises ValueError for others."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"accepted {accepted}")
        return value

    return check


def _pair(value: Any) -> Any:
    """Read `-p betas "(0.9, 0.95)"`, which arrives as text."""
    if not isinstance(value, str):
        return value
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        read = None
    if not isinstance(read, tuple | list):
        raise ValueError("accepted are two numbers, such as (0.9, 0.95)")
    return read


_is_text = _only(lambda text: text.strip() and "\0" not in text, "is a text that is not blank and has no NUL")
_is_short = _only(lambda text: len(text.encode("utf-8")) <= 200, "are names of at most 200 bytes")
_is_name = _only(re.compile(r"[\w,=+-][\w.,=+-]*").fullmatch, "are letters, digits and _ . , = + -, no dot in front")
_is_no_bool = _only(lambda value: not isinstance(value, bool), "is a number")  # True is 1: two parameters were confused
_is_temperature = _only(lambda t: t == 0 or 0.01 <= t <= 100, "is 0, which is greedy, or a number from 0.01 to 100")


def _estimator_row(value: Any) -> Any:
    row = ESTIMATORS.get(value) if isinstance(value, str) else value
    if not isinstance(row, Estimator):
        raise ValueError(f"accepted are {', '.join(ESTIMATORS)}, or an Estimator of your own")
    if not row.name:
        raise ValueError("accepted as its name is a text that is not empty")
    if ESTIMATORS.get(row.name, row) != row:
        raise ValueError(f"the name {row.name!r} belongs to another row of the table; give yours its own")
    return row


def recorded_cells(row: Estimator) -> dict[str, Any]:
    """Return the row's cells by name.  A cell with the metadata `added_later` is left out at its default, so that
    records and fingerprints stay those from before there was such a cell."""
    cells = ((cell, getattr(row, cell.name)) for cell in fields(row))
    return {c.name: value for c, value in cells if not (c.metadata.get("added_later") and value == c.default)}


def _plain(row: Estimator) -> dict[str, Any]:
    """Return the row for a YAML file: a function is written as its name."""
    cells = recorded_cells(row).items()
    return {name: getattr(cell, "__qualname__", repr(cell)) if callable(cell) else cell for name, cell in cells}


Switch = Annotated[bool, BeforeValidator(read_switch)]
Whole = Annotated[int, BeforeValidator(_is_no_bool)]
Real = Annotated[float, BeforeValidator(_is_no_bool)]
Count = Annotated[Whole, Field(ge=1, lt=2**31)]  # no batch and no run is larger, and every library can hold it
Positive = Annotated[Real, Field(gt=0)]
LearningRate = Annotated[Real, Field(gt=0, le=1)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63)]
Momentum = Annotated[Real, Field(ge=0, lt=1)]
Temperature = Annotated[Real, AfterValidator(_is_temperature)]
Betas = Annotated[tuple[Momentum, Momentum], BeforeValidator(_pair)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")]
Text = Annotated[str, AfterValidator(_is_text)]
Name = Annotated[str, AfterValidator(_is_name), AfterValidator(_is_short)]
EstimatorRow = Annotated[Estimator, BeforeValidator(_estimator_row), PlainSerializer(_plain)]


def between(least: int, most: int) -> Any:
    """Return the type of whole numbers from `least` to `most`."""
    return Annotated[Whole, Field(ge=least, le=most)]


# --- what a setting affects ------------------------------------------------------------------------------------------

Affects = Literal["numbers", "rounding", "nothing", "content"]


def setting(default: Any, affects: Affects, named: bool = True, **checks: Any) -> Any:
    """Return a pydantic Field that says what the setting means for a run.  A setting without it affects numbers.

    affects: "numbers": runs with other values cannot be compared.  "rounding": they can, but not bit for bit.
      "nothing": where the run lies, how it is watched, what is kept of it, where another process has its memory.
      "content": it names a file, and what the file holds affects numbers.
    named: a value that differs from the preset's stands in the variant's name.
    """
    return Field(default, json_schema_extra={"affects": affects, "named": named}, **checks)


class RunSettings(BaseModel):
    """What every run has.  A kind of run declares a setting anew to give it a default; what it affects is said here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    # The order in a variant's name, which folders of earlier runs have; the others follow as they are declared.
    NAMED_FIRST: ClassVar[tuple[str, ...]] = ()

    experiment: Name = setting(..., "nothing", named=False)  # first folder under data/runs
    variant: Name | None = setting(None, "nothing", named=False)  # second folder; None: see make_settings
    seed: Seed = setting(0, "numbers", named=False)
    model: Text = "tiny"  # or a Hugging Face name, or a directory
    device: Device = setting("auto", "rounding", named=False)  # auto: cuda where there is one
    # Keep only the inputs of layers: less memory, a slower update.
    gradient_checkpointing: Switch = setting(False, "rounding")
    task: Text = "tiny"  # or "gsm8k", "gym/<name>", or a folder of JSONL files
    n_val_examples: Count
    max_tokens: Count = 64  # of the longest response
    gradient_accumulation_steps: Count = setting(..., "rounding")
    learning_rate: LearningRate
    max_grad_norm: Real = Field(1.0, gt=0, allow_inf_nan=True)  # inf: no clipping
    eval_every: Count
    checkpoint_every: Count = setting(..., "nothing", named=False)  # steps between checkpoints
    resume: Switch = setting(False, "nothing", named=False)  # go on with an unfinished run of these settings
    tracker: Literal["wandb", "trackio"] | None = setting(None, "nothing", named=False)

    def rules(self) -> list[tuple[str, bool, str]]:
        """Return what settings demand of each other: a name, whether its value is accepted, and what is accepted."""
        return []

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        broken = [(name, accepted) for name, fine, accepted in self.rules() if not fine]
        if broken:
            lines = (f"{name}: got {getattr(self, name)}; it must be {accepted}" for name, accepted in broken)
            raise ValueError("\n".join(lines))
        return self

    @classmethod
    def mark(cls, name: str, mark: str) -> Any:
        """Return what `setting` was told of a setting."""
        declared = RunSettings.model_fields.get(name) or cls.model_fields[name]
        return (declared.json_schema_extra or {"affects": "numbers", "named": True})[mark]

    def affecting(self, *what: Affects) -> dict[str, Any]:
        """Return the settings that affect one of these, as JSON has them."""
        names = {name for name in type(self).model_fields if self.mark(name, "affects") in what}
        return self.model_dump(mode="json", include=names)

    def comparable_settings(self) -> dict[str, Any]:
        """Return what runs must have in common to be compared, as JSON has it: all that affects numbers, without the
        seed, which is what comparable runs differ in."""
        settings = self.affecting("numbers", "content")
        del settings["seed"]
        return settings

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, the same for runs whose numbers are the same bit by bit; see training/fingerprint."""
        return fingerprint(self.deciding(), self.files())

    def deciding(self) -> dict[str, Any]:
        """Return the settings that can change a bit of the run's numbers, as JSON has them."""
        return self.affecting("numbers", "rounding") | {"device": self.device.partition(":")[0]}

    def files(self) -> Iterator[Path]:
        """Files whose content decides the run's numbers.  What is missing is for those who need it to say."""
        yield from model_and_task_files(self.model, self.task)


Kind = TypeVar("Kind", bound=RunSettings)


def make_settings(
    kind: type[Kind], preset: str, base: Mapping[str, Any], given: Mapping[str, Any], also: Sequence[str] = ()
) -> Kind:
    """Return a checked configuration: the base, which is the preset's, then the given settings that are not None.

    Where no variant is given, it names the method, the preset, and every other setting that differs from the base: runs
    with different settings never share a folder.  Raises ValueError with one line for each wrong setting: its name, the
    value, what is accepted.  also: what else the caller takes, and a misspelt name may have meant.
    """
    config = _checked(kind, {**base, **{name: value for name, value in given.items() if value is not None}}, also)
    if config.variant is not None:
        return config
    required = {name: getattr(config, name) for name, field in kind.model_fields.items() if field.is_required()}
    usual = kind(**{**base, **required})
    parts = [config.method, *([preset] if preset != "tiny" else [])]
    for name in dict.fromkeys([*kind.NAMED_FIRST, *kind.model_fields]):
        if kind.mark(name, "named") and getattr(config, name) != getattr(usual, name):
            parts.append(f"{name}={getattr(config, name)}")
    return config.model_copy(update={"variant": file_name(",".join(parts))})


def _checked(kind: type[Kind], settings: Mapping[str, Any], also: Sequence[str]) -> Kind:
    declared = kind.model_fields
    missing = [name for name, field in declared.items() if field.is_required() and name not in settings]
    if missing:
        lines = (f"{name}: it is missing; accepted is {declared[name].description}" for name in missing)
        raise ValueError("\n".join(lines))
    try:
        return kind(**settings)
    except ValidationError as error:
        raise ValueError(explain(error, [*also, *declared])) from None


# --- errors ----------------------------------------------------------------------------------------------------------


def explain(errors: ValidationError, known: Iterable[str]) -> str:
    """Return a line for each wrong setting: its name, the value, what is accepted.  known: the names that there are."""
    return "\n".join(_line(error, known) for error in errors.errors())


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return the line for a misspelt setting."""
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"accepted are {', '.join(sorted(known))}"
    return f"{name}: there is no such setting; {hint}"


def _line(error: dict[str, Any], known: Iterable[str]) -> str:
    if not error["loc"]:  # raised by RunSettings.rules, for several settings at once
        return str(error["ctx"]["error"])
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return unknown_name(name, known)
    message = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    if error["type"] == "int_parsing_size":  # pydantic speaks of a string here, also where it is none
        message = "accepted are smaller whole numbers"
    return f"{name}: got {shown(error['input'])}; {message[0].lower()}{message[1:]}"
