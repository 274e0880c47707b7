"""What is asked of a model before anything is read once for several rows: whether they can share keys and values, how
many, and how the model is given them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from rlhelpers.eval_mode import eval_mode

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

WORTH_A_PASS = 256  # tokens: one more forward pass, with its way back, takes about as long as these
_HEAD_IS_LINEAR: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def can_share(model: PreTrainedModel) -> bool:
    """Whether keys and values can be handed on, which they cannot with sliding windows, and logits are a linear map of
    the last hidden state."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    return plain and head_is_linear(model)


def head_is_linear(model: PreTrainedModel) -> bool:
    """Whether logits are a linear map of the last hidden state: not where they are scaled or soft-capped."""
    if model not in _HEAD_IS_LINEAR:
        _HEAD_IS_LINEAR[model] = _head_is_linear(model)
    return _HEAD_IS_LINEAR[model]


@torch.no_grad()
def _head_is_linear(model: PreTrainedModel) -> bool:
    """By trial, on a few tokens: models have names of their own for what else they do with logits.  The same operation
    on the same numbers gives the same bits."""
    with eval_mode(model):
        tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits
        head = model.get_output_embeddings()
        linear = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return torch.equal(logits, linear)


def common_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with; 0 where to read them once saves less than a pass costs."""
    first, last = min(prompts), max(prompts)  # in the order of a dictionary: what these two share, all share
    different = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    common = next(different, len(first))
    return common if common * (len(prompts) - 1) >= WORTH_A_PASS else 0


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 calls the argument `cache`, 5.19 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
