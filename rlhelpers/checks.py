"""Checks of arguments: an error names the argument, the value, and what is accepted.

All raise ValueError, for a value of a wrong kind too.  True and False are no numbers; numpy's numbers are numbers.
Checks of tensors read shapes, dtypes and devices.  They read values only on the CPU: elsewhere that would be a wait for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they take seconds to import
    from torch import Tensor
    from transformers import PreTrainedModel


def refused(name: str, value: object, accepted: str) -> ValueError:
    """The error for one argument."""
    return ValueError(f"{name}: got {shown(value)}; accepted is {accepted}")


def shown(value: object) -> str:
    """A value on one line: short ones whole, long ones by their beginning and type, arrays and tables by shape."""
    if getattr(value, "shape", ()):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write integers of more than 4,300 digits
        return "a number too long to be written"
    return text if len(text) <= 80 else f"{text[:80]}..., a {type(value).__name__}"


def _each(values: Mapping[str, Any], fits: Callable[[Any], bool], accepted: str) -> None:
    for name, value in values.items():
        if not fits(value):
            raise refused(name, value, accepted)


def check_whole(least: int, **values: int) -> None:
    """Each a whole number of at least `least`."""
    _each(values, lambda value: is_whole(value) and value >= least, f"a whole number of at least {least}")


def check_positive(name: str, value: float, accepted: str = "a finite number above 0") -> None:
    """A finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise refused(name, value, accepted)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """No whole number beyond 64 bits: torch cannot compute with those."""
    if isinstance(value, Integral):
        return is_whole(value) and abs(value) < 2**63
    return isinstance(value, Real)


def check_flag(**values: bool) -> None:
    """Each True or False."""
    _each(values, lambda value: isinstance(value, bool), "True or False")


def check_text(**values: str) -> None:
    """Each a text."""
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{name}: got {shown(value)}, a {type(value).__name__}; accepted is a text")


def check_one_of(accepted: Collection[str], also: str = "", **values: str) -> None:
    """Each one of these texts.  `also`: what else the caller takes, and has looked for."""
    for name, value in values.items():
        if not isinstance(value, str) or value not in accepted:
            names = ", ".join(map(str, accepted)) or "none"
            raise ValueError(f"{name}: got {shown(value)}; accepted are {names}{also}")


def check_callable(accepted: str = "a function", **values: Any) -> None:
    """Each something that can be called."""
    _each(values, callable, accepted)


def check_kind(kind: type | tuple[type, ...], accepted: str, **values: Any) -> None:
    """Each an object of this class."""
    _each(values, lambda value: isinstance(value, kind), accepted)


def check_has(attribute: str, accepted: str, **values: Any) -> None:
    """Each an object with this attribute: models and tokenizers have no class of their own that is quickly imported."""
    _each(values, lambda value: hasattr(value, attribute), accepted)


def check_list(**lists: Sequence) -> None:
    """Each something with a length and an order; a text is none, though Python thinks so."""
    for name, values in lists.items():
        is_none = isinstance(values, str | bytes | Mapping | Set) or getattr(values, "shape", None) == ()
        if is_none or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
            raise refused(name, values, "a list")


def check_texts(**lists: Sequence[str]) -> None:
    """Each a list of texts."""
    check_list(**lists)
    for name, values in lists.items():
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise ValueError(f"{name}: number {i} is {shown(value)}; accepted is a list of texts")


def check_same_length(**lists: Sequence) -> None:
    """Lists of one common length, at least 1."""
    check_list(**lists)
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise ValueError(f"{found}; all must have the same length, at least 1")


def check_tensors(**tensors: Tensor) -> None:
    """Raise ValueError unless all are tensors of real numbers on one device."""
    from torch import Tensor  # torch takes seconds to import, and not every door has tensors

    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise refused(name, tensor, "a torch tensor")
        if tensor.is_complex():
            raise ValueError(f"{name}: got dtype {tensor.dtype}; accepted are real numbers")
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} is on {device}" for name, device in devices.items())
        raise ValueError(f"{found}; all must be on one device")
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name}: is on meta, where tensors hold no numbers; accepted is a tensor on cpu or cuda")


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all are tensors on one device with one common shape (batch, length), batch at least 1."""
    check_tensors(**tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 or not shape[0] for shape in shapes.values()):
        found = ", ".join(f"{name} has {shape}" for name, shape in shapes.items())
        raise ValueError(f"{found}; all must have the same shape, (batch, length), and at least one row")


def check_floats(**tensors: Tensor) -> None:
    """Raise ValueError unless all are floating-point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: got dtype {tensor.dtype}; accepted is a floating-point dtype")


def check_integers(**tensors: Tensor) -> None:
    """Raise ValueError unless all are whole numbers."""
    for name, ids in tensors.items():
        if str(ids.dtype) not in ("torch.int64", "torch.int32"):
            raise ValueError(f"{name}: got dtype {ids.dtype}; accepted is torch.int64")


def check_token_ids(vocabulary: int, **tensors: Tensor) -> None:
    """Raise ValueError unless all are whole numbers, and those on the CPU ids of 0 to `vocabulary` - 1."""
    check_integers(**tensors)
    for name, ids in tensors.items():
        if ids.device.type != "cpu" or not ids.numel():
            continue
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"{name}: holds the token id {wrong}; accepted are 0 to {vocabulary - 1}, the model's")


def check_readable(model: PreTrainedModel, **tensors: Tensor) -> None:
    """Raise ValueError unless all are ids that the model knows, (batch, length), no longer than its context."""
    check_token_ids(model.get_input_embeddings().weight.shape[0], **tensors)
    context = getattr(model.config, "max_position_embeddings", None)
    for name, ids in tensors.items():
        if context is not None and ids.shape[1] > context:
            raise ValueError(f"{name}: got rows of {ids.shape[1]} tokens; accepted are at most {context}, its context")


def is_language_model(model: object) -> bool:
    """One of transformers: what else may be called as a model says nothing about its vocabulary."""
    return hasattr(model, "get_input_embeddings")
