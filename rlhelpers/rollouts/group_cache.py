"""Keys and values of groups of growing responses, without copies; and with copies, for models that cannot share them.

Prompts made with one template begin alike, and the rows of a group have one prompt.  So all rows attend to one copy of
the common beginning, and the rows of a group to one copy of the rest of their prompt.  A new token is written into
room that was allocated beforehand, so the cache is not copied when it grows.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhelpers.models import cache_argument, common_beginning


class GroupCache:
    """The cache of U prompts with n rows each, side by side: row i belongs to prompt i // n."""

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], n: int, room: int, pad_id: int):
        """Read the prompts; `logits` are those after their last tokens, (U x n, vocabulary) float32.

        `room`: how many tokens each row may grow by.
        """
        cache, common = DynamicCache(config=model.config), common_beginning([ids[:-1] for ids in prompt_ids])
        if common:
            _read(model, torch.tensor([prompt_ids[0][:common]]), torch.ones(1, common, dtype=torch.bool), cache)
            cache.batch_repeat_interleave(len(prompt_ids))
        input_ids, is_token = _pad_left([ids[common:] for ids in prompt_ids], pad_id)
        seen = torch.cat([is_token.new_ones(len(is_token), common), is_token], dim=1)
        self.logits = _read(model, input_ids, seen, cache).repeat_interleave(n, dim=0)
        self.positions = seen.sum(dim=1).repeat_interleave(n).to(model.device)  # of the next token
        keys = cache.layers[0].keys
        hidden_padding = torch.zeros(is_token.shape).masked_fill(~is_token, -torch.inf).to(keys)
        self.hidden_padding = hidden_padding[:, None].repeat(keys.shape[1], 1, 1, 1)  # (heads, U, 1, width)
        self.layers = [_Layer(layer, common, n, room) for layer in cache.layers]

    @contextmanager
    def growing(self, model: PreTrainedModel) -> Iterator[None]:
        """Make the model attend to this cache inside, as `advance` needs."""
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        try:
            yield
        finally:
            model.set_attn_implementation(before)

    def advance(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """Read one token of each row, (rows,) int64; return the logits after it, (rows, vocabulary) float32."""
        outputs = model(
            input_ids=tokens[:, None],
            position_ids=self.positions[:, None],
            use_cache=True,
            group_cache=self,
            **{cache_argument(model): Cache(layers=self.layers)},
        )
        self.positions = self.positions + 1
        return outputs.logits[:, -1].float()

    def keep(self, groups: Tensor, rows: Tensor) -> None:
        """Keep only these groups, (groups,) int64, and these of their rows, n of each, (groups x n,) int64."""
        self.positions, self.hidden_padding = self.positions[rows], self.hidden_padding[:, groups]
        for layer in self.layers:
            layer.keep(groups, rows)


class PlainCache:
    """GroupCache for any model: each row has its own copy of the prompt, and the cache grows by copying."""

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], n: int, room: int, pad_id: int):
        input_ids, is_token = _pad_left(prompt_ids, pad_id)
        self.cache = DynamicCache(config=model.config)
        self.logits = _read(model, input_ids, is_token, self.cache).repeat_interleave(n, dim=0)
        self.seen = is_token.repeat_interleave(n, dim=0).to(model.device)
        self.cache.batch_repeat_interleave(n)

    def growing(self, model: PreTrainedModel) -> AbstractContextManager:
        return nullcontext()

    def advance(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(tokens), 1)], dim=1)
        return _read(model, tokens[:, None], self.seen, self.cache)

    def keep(self, groups: Tensor, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.seen = self.seen[rows]


def _pad_left(prompt_ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids and is_token, (prompts, width): padded on the left, so that all prompts end together."""
    width = max(len(ids) for ids in prompt_ids)
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompt_ids])
    return input_ids, torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in prompt_ids])


def _read(model: PreTrainedModel, input_ids: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
    """Add tokens to the cache; return the logits after the last ones, (prompts, vocabulary) float32.

    seen (prompts, tokens so far) bool: False where a token is padding.
    """
    positions = (seen.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    outputs = model(
        input_ids=input_ids.to(model.device),
        attention_mask=seen.long().to(model.device),
        position_ids=positions.to(model.device),
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(model): cache},
    )
    return outputs.logits[:, -1].float()


class _Layer(DynamicLayer):
    """Keys [0] and values [1] of one layer.

    `common` (2, heads, tokens, size): of the common beginning.  `prompts` (2, heads, U, tokens, size): of the rest of
    each prompt.  `room` (2, heads, rows, tokens, size): of the responses.
    """

    def __init__(self, read: DynamicLayer, common: int, n: int, room: int):
        super().__init__()
        both = torch.stack([read.keys, read.values]).transpose(1, 2)
        _, heads, count, self.width, size = both.shape
        self.common, self.prompts = both[:, :, 0, :common].clone(), both[..., common:, :].contiguous()
        self.room, self.length = both.new_empty(2, heads, count * n, room, size), 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add keys and values (rows, heads, 1, size); return all of the responses', (heads, rows, tokens, size)."""
        end = self.length + key_states.shape[2]
        self.room[0, :, :, self.length : end] = key_states.transpose(0, 1)
        self.room[1, :, :, self.length : end] = value_states.transpose(0, 1)
        self.length = end
        return self.room[0, :, :, :end], self.room[1, :, :, :end]

    def get_seq_length(self) -> int:
        return self.width + self.length

    def keep(self, groups: Tensor, rows: Tensor) -> None:
        self.prompts = self.prompts[:, :, groups]
        _, heads, _, room, size = self.room.shape
        kept = self.room.new_empty(2, heads, len(rows), room, size)
        kept[:, :, :, : self.length] = self.room[:, :, rows, : self.length]
        self.room = kept


def group_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, scaling, group_cache, **_):
    """Attend to the common beginning, to the rest of the group's prompt, and to the row's own tokens, in one softmax.

    query (rows, heads, 1, size); key and value of the rows' own, (key heads, rows, tokens, size): see _Layer.update.
    Returns (rows, 1, heads, size).
    """
    layer = group_cache.layers[module.layer_idx]
    (rows, heads, _, size), key_heads = query.shape, key.shape[0]
    each = heads // key_heads
    # With the heads in front, the rows of a group, and all rows, lie side by side: three views of the same numbers.
    queries = query.view(rows, key_heads, each, size).transpose(0, 1).contiguous() * (scaling or size**-0.5)
    of_all = queries.view(key_heads, -1, size)
    of_groups = queries.view(layer.prompts.shape[1] * layer.prompts.shape[2], -1, size)
    of_rows = queries.view(key_heads * rows, each, size)
    common, (prompt_keys, prompt_values) = layer.common, layer.prompts.flatten(1, 2)

    to_common = of_all @ common[0].mT
    to_prompt = torch.baddbmm(group_cache.hidden_padding.flatten(0, 1), of_groups, prompt_keys.mT)
    to_own = of_rows @ key.flatten(0, 1).mT
    scores = [to_common, to_prompt, to_own]
    together = torch.cat([x.view(key_heads, rows * each, -1) for x in scores], dim=-1)
    weights = together.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    parts = weights.split([x.shape[-1] for x in scores], dim=-1)
    on_common, on_prompt, on_own = (part.reshape(x.shape) for part, x in zip(parts, scores, strict=True))
    mixed = on_common @ common[1]
    mixed = torch.baddbmm(mixed.view_as(of_groups), on_prompt, prompt_values)
    mixed = torch.baddbmm(mixed.view_as(of_rows), on_own, value.flatten(0, 1))
    return mixed.view(key_heads, rows, each, size).transpose(0, 1).reshape(rows, 1, heads, size), None


ATTENTION = "rlhelpers_group"
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, group_attention)
