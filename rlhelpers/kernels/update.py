"""The end of every training step: clip the gradient and let the optimizer move, unless something is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def clip_and_step(
    model: PreTrainedModel, optimizer: Optimizer, loss: Tensor, max_grad_norm: float | None
) -> dict[str, float]:
    """Clip once, step once, unless the loss or the gradient is not finite; no gradient is left.

    Returns `grad_norm` before clipping and `skipped_update`, 1.0 where the weights were left alone.  `max_grad_norm`:
    None or inf leaves the gradient as it is.
    """
    limit = math.inf if max_grad_norm is None else max_grad_norm
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    if finite:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return {"grad_norm": grad_norm, "skipped_update": float(not finite)}
