"""A batch cut into microbatches of a bounded number of tokens; a group stays in one piece where it fits, for its prompt
is then read once."""

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def row_lengths(response_mask: Tensor) -> list[int]:
    """Tokens of every row, without padding; of a row without a response, one is read.  response_mask (batch, length)
    bool, as `pad_prompts_and_outputs` gives it."""
    columns = torch.arange(1, response_mask.shape[1] + 1)
    return torch.where(response_mask, columns, 1).amax(dim=1).tolist()


def pack_rows(rows: Sequence[int], lengths: Sequence[int], group_size: int, microbatch_size: int) -> list[Tensor]:
    """The rows in microbatches: (rows,) int64 each, short groups first, and a group in one piece where it fits.

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


def select_rows(batch: dict[str, Tensor], rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """These rows on the device, without the columns in which all of them are padding."""
    selected = {name: tensor[rows.to(tensor.device)].to(device) for name, tensor in batch.items()}
    columns = selected["response_mask"].any(dim=0).nonzero()
    width = int(columns.max()) + 1 if len(columns) else 1
    return {name: t[:, :width] if t.ndim == 2 else t for name, t in selected.items()}


def in_smaller_ones(attempt: Callable[[int], T], steps: int, batch_size: int) -> tuple[T, int]:
    """attempt(gradient accumulation steps), and how many it was had with.  Where memory runs out it is made again with
    twice as many, down to one row at a time, and a warning says so.  A failed attempt must leave nothing behind."""
    while True:
        try:
            return attempt(steps), steps
        except RuntimeError as error:
            if not is_out_of_memory(error) or steps >= batch_size:
                raise
            said = str(error).splitlines()[0]
        # Only here is the error gone, and the activations that its traceback held.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        fewer, rows = min(2 * steps, batch_size), -(-batch_size // steps)
        warnings.warn(
            f"memory ran out over a microbatch of up to {rows} of {batch_size} rows; the update is made again with "
            f"gradient_accumulation_steps={fewer} instead of {steps}, which as a setting avoids this ({said})",
            stacklevel=3,
        )
        steps = fewer


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of the CPU, for which torch has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
