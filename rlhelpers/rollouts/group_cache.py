"""What groups of growing responses have read: each prompt once, and room for every response.

The rows of a group attend to one copy of their prompt's keys and values, so a step reads U prompts and not U x n of
them, and a new token is written into room that is already there instead of copying what is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhelpers.caches import cache_argument


class GroupCache:
    """U prompts with n rows each, side by side: row i belongs to prompt i // n.

    `advance` reads one more token of every row; `keep` lays the rows out anew.
    """

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], n: int, room: int, pad_id: int):
        """Reads the prompts.  `logits`: (U x n, vocabulary) float32 after their last tokens.  `room`: how many tokens
        every row may grow by."""
        device = model.device
        width = max(len(ids) for ids in prompt_ids)
        # Padded on the left, so that all end together.
        input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompt_ids], device=device)
        self.positions = torch.tensor([len(ids) for ids in prompt_ids], device=device)  # of the next token
        seen = torch.arange(width, device=device) >= width - self.positions[:, None]
        cache = DynamicCache(config=model.config)
        outputs = model(
            input_ids=input_ids,
            attention_mask=seen.long(),
            position_ids=(seen.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        )
        self.logits = outputs.logits[:, -1].float().repeat_interleave(n, dim=0)
        self.positions = self.positions.repeat_interleave(n)
        self.hidden_padding = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)
        self.layers = [_Layer(layer, n, room) for layer in cache.layers]

    def advance(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Read one token of each row, (rows,) int64; returns the logits after it, (rows, vocabulary) float32."""
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        try:
            outputs = model(
                input_ids=tokens[:, None],
                position_ids=self.positions[:, None],
                use_cache=True,
                group_cache=self,
                **{cache_argument(model): Cache(layers=self.layers)},
            )
        finally:
            model.set_attn_implementation(before)
        self.positions = self.positions + 1
        return outputs.logits[:, -1].float()

    def keep(self, groups: Tensor, rows: Tensor) -> None:
        """Go on with these groups, and of them with these rows, the same number of each: (groups,) and
        (groups x n,) int64."""
        self.positions, self.hidden_padding = self.positions[rows], self.hidden_padding[groups]
        for layer in self.layers:
            layer.keep(groups, rows)


class _Layer(DynamicLayer):
    """Keys and values of one layer, (prompts or rows, heads, tokens, head size)."""

    def __init__(self, prompts: DynamicLayer, n: int, room: int):
        super().__init__()
        self.prompt_keys, self.prompt_values = prompts.keys, prompts.values
        count, heads, self.width, size = self.prompt_keys.shape
        self.room, self.length = self.prompt_keys.new_empty(2, count * n, heads, room, size), 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        self.room[0, :, :, self.length : end], self.room[1, :, :, self.length : end] = key_states, value_states
        self.length = end
        return self.room[0, :, :, :end], self.room[1, :, :, :end]

    def get_seq_length(self) -> int:
        return self.width + self.length

    def keep(self, groups: Tensor, rows: Tensor) -> None:
        self.prompt_keys, self.prompt_values = self.prompt_keys[groups], self.prompt_values[groups]
        kept = self.room.new_empty(2, len(rows), *self.room.shape[2:])
        kept[..., : self.length, :] = self.room[:, rows, :, : self.length]
        self.room = kept


def group_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, scaling, group_cache, **_):
    """Softmax over the prompt's keys, which a group shares, and the row's own.

    query (rows, heads, 1, size), key and value (rows, key heads, tokens, size).  Returns (rows, 1, heads, size).
    """
    layer = group_cache.layers[module.layer_idx]
    (rows, heads, _, size), key_heads = query.shape, key.shape[1]
    groups, each = len(layer.prompt_keys), heads // key_heads
    own_query = query.reshape(rows, key_heads, each, size) * (scaling or size**-0.5)

    def by_group(x: Tensor) -> Tensor:  # (rows, key heads, each, .) -> (groups, key heads, n x each, .)
        return x.view(groups, -1, key_heads, each, x.shape[-1]).transpose(1, 2).flatten(2, 3)

    def by_row(x: Tensor) -> Tensor:
        return x.view(groups, key_heads, -1, each, x.shape[-1]).transpose(1, 2).flatten(0, 1)

    to_prompt = by_group(own_query) @ layer.prompt_keys.transpose(-1, -2) + group_cache.hidden_padding[:, None, None]
    to_own = own_query @ key.transpose(-1, -2)
    precision = torch.promote_types(query.dtype, torch.float32)
    weights = torch.cat([by_row(to_prompt), to_own], dim=-1).softmax(dim=-1, dtype=precision).to(query.dtype)
    on_prompt, on_own = weights.split([layer.width, key.shape[2]], dim=-1)
    mixed = by_row(by_group(on_prompt) @ layer.prompt_values) + on_own @ value
    return mixed.reshape(rows, 1, heads, size), None


ATTENTION = "rlhelpers_group"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, group_attention)
