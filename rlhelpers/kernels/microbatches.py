"""The batch of one update, and how it is cut into microbatches that fit the memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from rlhelpers.checks import check_tensors
from rlhelpers.kernels.estimators import BatchSizes
from rlhelpers.kernels.tokens import pad_prompts_and_outputs

T = TypeVar("T")
PER_TOKEN = ("old_log_probs", "ref_log_probs", "token_weights")


@dataclass(frozen=True)
class TrainBatch:
    """B = groups x `group_size` rollouts, a group's side by side.  It is built once and goes unchanged through scoring,
    microbatches and the step.

    input_ids, labels: (B, length) int64.  response_mask: (B, length) bool, aligned with the labels.  rewards: (B,).
    Each (B, length) or None: engine_log_probs, log mu of the policy that sampled; old_log_probs, log pi_0 of the policy
    before the first update; ref_log_probs, of the reference policy of a KL penalty; token_weights, by which each
    token's loss is multiplied.  All are constants; values outside the mask mean nothing.
    """

    input_ids: Tensor
    labels: Tensor
    response_mask: Tensor
    rewards: Tensor
    group_size: int
    engine_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    token_weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    def sizes(self, normalization_constant: float | None) -> BatchSizes:
        return BatchSizes(len(self), int(self.response_mask.sum()), normalization_constant)

    def rows(self, rows: Tensor, device: torch.device) -> TrainBatch:
        """These rows on the device, without the columns in which all of them are padding."""
        columns = self.response_mask[rows].any(dim=0).nonzero()
        width = int(columns.max()) + 1 if len(columns) else 1
        names = ("input_ids", "labels", "response_mask", *PER_TOKEN)  # no step reads engine_log_probs
        given = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        cut = {name: tensor[rows.to(tensor.device)][:, :width].detach().to(device) for name, tensor in given.items()}
        return replace(self, rewards=self.rewards[rows], engine_log_probs=None, **cut)


def make_batch(
    token_ids: Sequence[tuple[Sequence[int], Sequence[int]]],
    rewards: Tensor,
    group_size: int,
    pad_id: int,
    **per_token: Tensor | None,
) -> TrainBatch:
    """Build the batch from (prompt ids, response ids) of each rollout, rewards (B,), and what else is known already.
    Raises ValueError as pad_prompts_and_outputs does."""
    padded = pad_prompts_and_outputs([prompt for prompt, _ in token_ids], [ids for _, ids in token_ids], pad_id)
    return TrainBatch(**padded, rewards=rewards, group_size=group_size, **per_token)


def check_batch(batch: TrainBatch) -> None:
    """Raise ValueError where a shape differs, or a value at a response token is not finite."""
    for name in PER_TOKEN:
        if (values := getattr(batch, name)) is None:
            continue
        check_tensors(**{name: values})
        if values.shape != batch.labels.shape:
            raise ValueError(f"{name}: got shape {tuple(values.shape)}, wanted {tuple(batch.labels.shape)}")
        if not values[batch.response_mask.to(values.device)].isfinite().all():
            raise ValueError(f"{name}: not finite at a token of a response")


def row_lengths(response_mask: Tensor) -> list[int]:
    """Unpadded length of each row, from its response_mask (batch, length) bool; 1 where the response is empty."""
    columns = torch.arange(1, response_mask.shape[1] + 1)
    return torch.where(response_mask, columns, 1).amax(dim=1).tolist()


def pack_rows(rows: Sequence[int], lengths: Sequence[int], group_size: int, microbatch_size: int) -> list[Tensor]:
    """Cut the rows into microbatches: (rows,) int64 each, short groups first, and a group in one piece where it fits.

    With its padding, no microbatch holds more tokens than `microbatch_size` of the longest rows.
    """
    budget = microbatch_size * max(lengths, default=0)
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row // group_size)]
    packs: list[list[int]] = [[]]
    for group in sorted(groups, key=lambda group: max(lengths[row] for row in group)):
        width = max(lengths[row] for row in group)
        if (len(packs[-1]) + len(group)) * width > budget:
            packs.append([])
        at_most = max(1, budget // width)
        pieces = [group[start : start + at_most] for start in range(0, len(group), at_most)]
        packs[-1] += pieces[0]
        packs += pieces[1:]
    return [torch.tensor(pack) for pack in packs if pack]


def retry_on_oom(attempt: Callable[[int], T], steps: int, batch_size: int) -> tuple[T, int]:
    """Call attempt(gradient accumulation steps).  On out-of-memory double the steps and try again, down to one row at a
    time; a warning says so.  Return the result and the steps used.  A failed attempt must leave nothing behind."""
    while True:
        try:
            return attempt(steps), steps
        except RuntimeError as error:
            if not is_out_of_memory(error) or steps >= batch_size:
                raise
            said = str(error).splitlines()[0]
        # Only here, behind the block, are the error and the activations that its traceback held gone.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        more, rows = min(2 * steps, batch_size), math.ceil(batch_size / steps)
        warnings.warn(
            f"memory ran out over a microbatch of up to {rows} of {batch_size} rows; the update is made again with "
            f"gradient_accumulation_steps={more} instead of {steps}, which as a setting avoids this ({said})",
            stacklevel=3,
        )
        steps = more


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of the CPU, for which torch has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
