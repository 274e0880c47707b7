"""Hidden states at the response positions of a batch in which several rows share a prompt.

The G responses of a group have one prompt, and a causal model computes the same for it every time.  So each distinct
prompt is read once, its keys and values are handed to all of its rows, and gradients flow back through them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlhelpers.caches import cache_argument


def response_states(model: PreTrainedModel, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """The last hidden state wherever the mask is set, in row-major order: (tokens, hidden), with gradient.

    input_ids (batch, length) int64 and response_mask (batch, length) bool as `pad_prompts_and_outputs` gives them: the
    mask is aligned with the labels, so it is set first at the last token of the prompt.  Equal to reading every row
    whole, up to rounding.  What is not computed: a prompt again for its second row, and the padding behind a response
    that is longer than all of them.
    """
    batch = _split(input_ids, response_mask)
    cache = DynamicCache(config=model.config)
    if batch.prompts.shape[1]:
        positions = torch.arange(batch.prompts.shape[1], device=input_ids.device)[None]
        seen = batch.prompt_mask.clone()
        seen[:, 0] = True  # a prompt without a token must see something, or it would compute 0 / 0
        _read(model, batch.prompts, positions, seen, cache)
        for layer in cache.layers:
            layer.keys, layer.values = (_hand_out(x, batch.prompt_of_row) for x in (layer.keys, layer.values))
    seen = torch.cat([batch.prompt_mask[batch.prompt_of_row], batch.response_mask], dim=1)
    return _read(model, batch.responses, batch.positions, seen, cache)[batch.wanted]


def _hand_out(prompts: Tensor, prompt_of_row: Tensor) -> Tensor:
    """(prompts, ...) -> (rows, ...)."""
    n = len(prompt_of_row) // len(prompts)
    if prompt_of_row.tolist() == [i for i in range(len(prompts)) for _ in range(n)]:
        # Whole groups side by side, the usual case: a sum in the backward pass, where an index would scatter.
        return prompts[:, None].expand(-1, n, *prompts.shape[1:]).flatten(0, 1)
    return prompts.index_select(0, prompt_of_row)


@dataclass(frozen=True)
class _Batch:
    """A batch in two parts, both padded on the right.

    The distinct prompts but for their last token: `prompts`, `prompt_mask` (prompts, width).  From the last token of
    the prompt to the last but one of the response, with their places in the row: `responses`, `positions`,
    `response_mask` (batch, width); `wanted` is the given mask there.  `prompt_of_row` (batch,) leads from one to the
    other.
    """

    prompts: Tensor
    prompt_mask: Tensor
    prompt_of_row: Tensor
    responses: Tensor
    positions: Tensor
    response_mask: Tensor
    wanted: Tensor


def _split(input_ids: Tensor, mask: Tensor) -> _Batch:
    columns = torch.arange(mask.shape[1], device=mask.device)
    start = mask.int().argmax(dim=1)
    end = torch.where(mask, columns, -1).amax(dim=1) + 1
    lengths = (end - start).clamp(min=1)  # a row without a response reads one token of its prompt, for nothing
    ids, starts = input_ids.tolist(), start.tolist()
    number: dict[tuple[int, ...], int] = {}
    rows = [number.setdefault(tuple(row[:first]), len(number)) for row, first in zip(ids, starts, strict=True)]
    prompts = pad_sequence([torch.tensor(prompt, dtype=torch.long) for prompt in number], batch_first=True)
    prompt_lengths = torch.tensor([len(prompt) for prompt in number])
    steps = torch.arange(int(lengths.max()), device=mask.device)[None]
    positions = start[:, None] + steps
    inside = positions.clamp(max=mask.shape[1] - 1)
    response_mask = steps < lengths[:, None]
    return _Batch(
        prompts.to(mask.device),
        (torch.arange(prompts.shape[1]) < prompt_lengths[:, None]).to(mask.device),
        torch.tensor(rows, device=mask.device),
        input_ids.gather(1, inside),
        positions,
        response_mask,
        mask.gather(1, inside) & response_mask,
    )


def _read(model: PreTrainedModel, input_ids: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
    """(rows, width, hidden); the cache grows by what was read."""
    outputs = model.base_model(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=seen.long(),
        use_cache=True,
        **{cache_argument(model): cache},
    )
    return outputs.last_hidden_state
