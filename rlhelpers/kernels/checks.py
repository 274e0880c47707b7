"""Checks of tensors.  They read shapes, dtypes and devices, and values only on the CPU: elsewhere that would be a wait
for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.checks import refused

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def check_tensors(**tensors: Tensor) -> None:
    """Raise ValueError unless all are tensors of real numbers on one device."""
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
        if ids.dtype not in (torch.int64, torch.int32):
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
