"""Hidden states at the response positions of a batch in which rows share a prompt (prefix sharing).

The G responses of a group have one prompt, for which a causal model computes the same every time; and prompts made with
one template begin alike.  So three things are read in turn: the common beginning of all prompts, once; the rest of each
distinct prompt, once; the responses.  Keys and values are handed on to the rows that continue from them, and gradients
flow back through them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhelpers import models
from rlhelpers.models import cache_argument, common_beginning

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache


def response_states(model: PreTrainedModel, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return the last hidden state wherever the mask is set, in row-major order: (tokens, hidden), with gradient.

    input_ids (batch, length) int64 and response_mask (batch, length) bool as `pad_prompts_and_outputs` gives them: the
    mask is aligned with the labels, so it is set first at the last token of the prompt.  Equal to a forward pass over
    whole rows, up to rounding.
    """
    start, end = _ends(response_mask)
    prompts, prompt_of_row = _distinct_prompts(input_ids, start)
    cache, seen = _read_prompts(model, prompts, input_ids.device)
    number = response_mask.flatten().cumsum(dim=0).view(response_mask.shape) - 1  # of each wanted token
    states, numbers = [], []
    for rows in by_length((end - start).tolist()):
        here = start[rows, None] + torch.arange(int((end - start)[rows].max()), device=start.device)
        inside, mask = here.clamp(max=input_ids.shape[1] - 1), here < end[rows, None]
        wanted = response_mask[rows].gather(1, inside) & mask
        parents = [prompt_of_row[row] for row in rows]
        all_seen = torch.cat([seen[parents], mask], dim=1)
        read = _read(model, input_ids[rows].gather(1, inside), here, all_seen, _handed_on(cache, parents))
        states.append(read[wanted])
        numbers.append(number[rows].gather(1, inside)[wanted])
    return torch.cat(states).index_select(0, torch.cat(numbers).argsort())


def _ends(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First and end position to run, per row, (batch,) each: from the last token of the prompt on.  A row without a
    response runs one position."""
    start = mask.int().argmax(dim=1)
    end = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1).amax(dim=1) + 1
    return start, torch.maximum(end, start + 1)


def _distinct_prompts(input_ids: Tensor, start: Tensor) -> tuple[list[tuple[int, ...]], list[int]]:
    """The distinct prompts, without their last tokens, and the number of each row's prompt."""
    number: dict[tuple[int, ...], int] = {}
    rows = zip(input_ids.tolist(), start.tolist(), strict=True)
    prompt_of_row = [number.setdefault(tuple(ids[:length]), len(number)) for ids, length in rows]
    return list(number), prompt_of_row


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows of similar length: cut in two, and each part again, as long as a cut saves WORTH_A_PASS tokens of
    padding.  Rows of a part keep their order."""

    def cut(rows: list[int]) -> list[list[int]]:
        longest = lengths[rows[-1]]
        saved, k = max(((k * (longest - lengths[rows[k - 1]]), k) for k in range(1, len(rows))), default=(0, 0))
        return [sorted(rows)] if saved < models.WORTH_A_PASS else cut(rows[:k]) + cut(rows[k:])

    return cut(sorted(range(len(lengths)), key=lengths.__getitem__))


def _read_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[DynamicCache, Tensor]:
    """The KV cache of the prompts, padded on the right, and where it holds tokens: (prompts, width) bool."""
    from transformers.cache_utils import DynamicCache

    cache, common = DynamicCache(config=model.config), common_beginning(prompts)
    seen = torch.ones(1, common, dtype=torch.bool, device=device)
    if common:
        steps = torch.arange(common, device=device)[None]
        _read(model, torch.tensor([prompts[0][:common]], device=device), steps, seen, cache)
    lengths = torch.tensor([len(prompt) - common for prompt in prompts])
    steps = torch.arange(int(lengths.max()))
    cache = _handed_on(cache, [0] * len(prompts))
    seen = torch.cat([seen.expand(len(prompts), -1), (steps < lengths[:, None]).to(device)], dim=1)
    if len(steps):
        rest = pad_sequence([torch.tensor(prompt[common:], dtype=torch.long) for prompt in prompts], batch_first=True)
        visible = seen.clone()
        visible[:, 0] = True  # a prompt without a token must see something, or it would compute 0 / 0
        _read(model, rest.to(device), (common + steps)[None].to(device), visible, cache)
    return cache, seen


def _handed_on(cache: DynamicCache, parents: Sequence[int]) -> DynamicCache:
    """The cache for rows that continue from the prompts numbered in `parents`.  Copies side by side have a sum as their
    backward pass, an index would have a scatter."""
    runs = [(parent, len(list(run))) for parent, run in groupby(parents)]

    def hand_on(states: Tensor) -> Tensor:
        rows = states.split(1)
        return torch.cat([rows[parent].expand(n, -1, -1, -1) for parent, n in runs])

    result = copy.copy(cache)
    result.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in result.layers:
        if layer.is_initialized:
            layer.keys, layer.values = hand_on(layer.keys), hand_on(layer.values)
    return result


def _read(model: PreTrainedModel, input_ids: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
    """Run the model's body: (rows, width, hidden).  The cache grows by these positions."""
    outputs = model.base_model(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=seen.long(),
        use_cache=True,
        **{cache_argument(model): cache},
    )
    return outputs.last_hidden_state
