"""Log-probabilities of tokens under the policy, its entropy, and how far the engine's log-probs are from its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.checks import (
    check_callable,
    check_flag,
    check_integers,
    check_positive,
    check_readable,
    check_same_shape,
    check_token_ids,
    check_whole,
    is_language_model,
)
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy
from rlhelpers.kernels.prefix_sharing import response_states
from rlhelpers.models import can_share, checkpointing_in_eval_mode, eval_mode, head_is_linear

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

# The ratios of a token's two probabilities within which trainer and engine are said to agree.
AGREEMENT = (0.9, 1.1)


def get_response_log_probs(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    return_token_entropy: bool = False,
    *,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return log pi_theta(label | what stands before it), for every position (handout, section 4.2).

    input_ids, labels: (batch, length) int64, padded on the right: causal attention alone then keeps padding from
    reaching a real position, and no attention mask is needed.  Returns `log_probs` (batch, length) float32, with
    gradient, and, when asked, `token_entropy` (batch, length) float32 in nats, without gradient.  Values at padded
    positions are finite and mean nothing.

    `temperature` divides the logits; it is the one that the responses were sampled with.  `response_mask`: (batch,
    length) bool, the positions that are wanted.  The others are then 0 and cost little (see `response_log_probs`); the
    values are the same up to rounding.

    Raises ValueError when the temperature is not positive, shapes, dtypes or devices do not fit, rows are longer than
    the model's context, or, on the CPU, a token is not in its vocabulary; on a GPU the log-prob of such a label is NaN.
    """
    check_positive("temperature", temperature)
    check_flag(return_token_entropy=return_token_entropy)
    response_mask = _check_rows(model, input_ids, labels, response_mask)
    return response_log_probs(model, input_ids, labels, response_mask, temperature, return_token_entropy)


def response_log_probs(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    response_mask: Tensor | None,
    temperature: float,
    with_entropy: bool = False,
) -> dict[str, Tensor]:
    """get_response_log_probs of arguments that are checked.

    With a mask, rows share the prompt that they have in common, and logits are computed a chunk of words at a time.
    Where logits are no linear map of the last hidden state, everything is computed.
    """
    if response_mask is None or not head_is_linear(model):
        with checkpointing_in_eval_mode(model):
            logits = model(input_ids=input_ids, use_cache=False).logits
        return log_probs_from_logits(logits, labels, with_entropy, temperature=temperature)
    states = _states_of_responses(model, input_ids, response_mask)
    head = model.get_output_embeddings()
    log_probs, entropy = log_probs_and_entropy(states, head.weight, head.bias, labels[response_mask], temperature)
    result = {"log_probs": log_probs.new_zeros(response_mask.shape).masked_scatter(response_mask, log_probs)}
    if with_entropy:
        result["token_entropy"] = entropy.new_zeros(response_mask.shape).masked_scatter(response_mask, entropy)
    return result


def _states_of_responses(model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states where the mask is set: (tokens, hidden)."""
    # A cache of keys and values cannot be computed twice, as checkpoints in the backward pass would have to.
    checkpoints = model.is_gradient_checkpointing and torch.is_grad_enabled()
    if can_share(model) and not checkpoints:
        return response_states(model, input_ids, mask)
    with checkpointing_in_eval_mode(model):
        return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[mask]


def _check_rows(model, input_ids: Tensor, labels: Tensor, response_mask: Tensor | None) -> Tensor | None:
    """Returns the mask as bool."""
    check_callable("a language model", model=model)
    mask = {} if response_mask is None else {"response_mask": response_mask}
    check_same_shape(input_ids=input_ids, labels=labels, **mask)
    check_integers(input_ids=input_ids, labels=labels)
    if response_mask is not None:
        response_mask = response_mask.bool()
        labels = torch.where(response_mask, labels, 0)  # the others are not read
    if is_language_model(model):
        check_readable(model, input_ids=input_ids, labels=labels)
    return response_mask


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, return_token_entropy: bool = False, *, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Return what get_response_log_probs returns, from logits (..., vocabulary) and labels (...)."""
    check_token_ids(logits.shape[-1], labels=labels)
    # Half-precision logits are normalised in float32: log-probs are differences of large numbers.
    precision = torch.promote_types(logits.dtype, torch.float32)
    log_distribution = torch.log_softmax(logits.to(precision) / temperature, dim=-1)
    result = {"log_probs": log_distribution.gather(-1, labels[..., None]).squeeze(-1)}
    if return_token_entropy:
        result["token_entropy"] = token_entropy(log_distribution.detach())
    return result


def token_entropy(log_distribution: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats, over the last dimension; a token of probability 0 adds 0."""
    return torch.special.entr(log_distribution.exp()).sum(dim=-1)


@torch.no_grad()
def score_batch(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    microbatch_size: int,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
) -> Tensor:
    """Return log pi_0 of a whole batch, (batch, length) float32, in microbatches, without gradient and dropout; of its
    responses only, where their mask is given.

    Call it before the first update on a rollout batch.  Raises ValueError as get_response_log_probs does, and for a
    microbatch size below 1.
    """
    check_whole(1, microbatch_size=microbatch_size)
    check_positive("temperature", temperature)
    response_mask = _check_rows(model, input_ids, labels, response_mask)
    with eval_mode(model):
        parts = []
        for start in range(0, len(input_ids), microbatch_size):
            rows = slice(start, start + microbatch_size)
            x, y, mask = (t if t is None else t[rows].to(model.device) for t in (input_ids, labels, response_mask))
            parts.append(response_log_probs(model, x, y, mask, temperature)["log_probs"])
    return torch.cat(parts)


@torch.no_grad()
def engine_mismatch(trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor) -> dict[str, float | None]:
    """Measure how far the trainer's policy pi_0 is from the engine's policy mu, which sampled.

    All three (batch, length), on one device; only tokens where the mask is set count.
    Return `mismatch_mean`, `mismatch_p99` (interpolated linearly) and
    `mismatch_max` of |log pi_0 - log mu|, in nats; `mismatch_outside`, the share of tokens whose ratio pi_0 / mu is
    outside [0.9, 1.1], or not a number.  All None where the mask is set nowhere.  Raises ValueError when shapes differ.
    """
    check_same_shape(trainer_log_probs=trainer_log_probs, engine_log_probs=engine_log_probs, mask=mask)
    difference = (trainer_log_probs - engine_log_probs)[mask.bool()]
    if not len(difference):
        return dict.fromkeys(("mismatch_mean", "mismatch_p99", "mismatch_max", "mismatch_outside"))
    size, ratio, (low, high) = difference.abs(), difference.exp(), AGREEMENT
    agrees = (ratio >= low) & (ratio <= high)  # False for NaN
    return {
        "mismatch_mean": size.mean().item(),
        "mismatch_p99": size.quantile(0.99).item(),
        "mismatch_max": size.max().item(),
        "mismatch_outside": (~agrees).float().mean().item(),
    }
