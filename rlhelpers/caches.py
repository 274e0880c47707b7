"""What may be done with a model's keys and values: whether rows can share them, and how the model is given them."""

import inspect
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from rlhelpers.eval_mode import eval_mode

_HEAD_IS_LINEAR: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def can_share(model: PreTrainedModel) -> bool:
    """Whether keys and values can be handed on, and logits are a linear map of the last hidden state: not with sliding
    windows or soft-capped logits."""
    plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
    return plain and head_is_linear(model)


def head_is_linear(model: PreTrainedModel) -> bool:
    """Whether logits are a linear map of the last hidden state."""
    if model not in _HEAD_IS_LINEAR:
        _HEAD_IS_LINEAR[model] = _head_is_linear(model)
    return _HEAD_IS_LINEAR[model]


@torch.no_grad()
def _head_is_linear(model: PreTrainedModel) -> bool:
    """By trial, on a few tokens: some models scale their logits, or bend them, under names of their own.  The same
    operation on the same numbers gives the same bits."""
    with eval_mode(model):
        tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits
        head = model.get_output_embeddings()
        linear = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return torch.equal(logits, linear)


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 calls the argument `cache`, 5.19 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
