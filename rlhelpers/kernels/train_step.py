"""One optimizer step of GRPO or any of its relatives, from responses to updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhelpers.checks import (
    check_has,
    check_list,
    check_positive,
    check_same_length,
    check_texts,
    check_whole,
    is_number,
    refused,
)
from rlhelpers.kernels.advantages import (
    Baseline,
    compute_group_normalized_rewards,
    compute_rollout_rewards,
    pass_at_k,
    predicted_signal_fraction,
    signal_fraction,
)
from rlhelpers.kernels.checks import check_readable, check_tensors
from rlhelpers.kernels.logprobs import get_response_log_probs
from rlhelpers.kernels.losses import (
    Reweighting,
    aggregate_loss_across_microbatch,
    check_normalization,
    check_reweighting,
    compute_policy_gradient_loss,
    masked_mean,
)
from rlhelpers.kernels.microbatches import in_smaller_ones, pack_rows, row_lengths, select_rows
from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs, padding_id
from rlhelpers.kernels.update import clip_and_step
from rlhelpers.models import eval_mode

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TokenIds = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) of every rollout, as the engine sampled them."""


def grpo_train_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    reward_fn: Callable[[str, str], dict[str, float]],
    repeated_prompts: Sequence[str],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    baseline: str | Baseline = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: str | Baseline = "std",
    importance_reweighting_method: str | Reweighting = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: str = "sequence",
    normalization_constant: float | None = None,
    *,
    rollout_token_ids: TokenIds | None = None,
    temperature: float = 1.0,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor | float | None]]:
    """Grade, normalise, score, and step once (handout, sections 4.2 and 6).

    The batch holds B = groups x group_size rollouts, a group's responses side by side.  Rows whose advantage is
    exactly zero, and those without a token, are taken out before the model sees them; where none is left, no weight
    moves, not by momentum or weight decay either.  The others are cut into microbatches, short ones together, of no
    more tokens than ceil(B / `gradient_accumulation_steps`) of the longest rows; see `pack_rows`.  In each, a prompt is
    read once for all of its rows.  Sequence normalization still divides by B, so the gradient is that of the whole
    batch, whatever the cut.

    `old_log_probs`: (B, width of the whole batch's labels).  `rollout_token_ids`: what the engine read and sampled,
    scored instead of the re-encoded text.  `temperature`: the one that the responses were sampled with.
    `token_weights`: of the same shape as old_log_probs; each token's loss is multiplied by its weight, a constant.
    `max_grad_norm`: the norm is clipped once, after accumulation; None or inf leaves it as it is.
    Dropout is off throughout: the policy that is scored is the one that acted.

    Returns the loss (scalar, no gradient) and metadata, floats unless noted: `grad_norm` before clipping,
    `token_entropy` and `clip_fraction` over the response tokens that the model saw (entropy None where it saw none),
    `mean_reward`, `mean_format_reward`, `mean_response_length` in tokens, `pass_at_k`, `signal_fraction` beside
    `predicted_signal_fraction`, `pruned_rows`, `pruned_fraction`, `skipped_update`, `gradient_accumulation_steps`, the
    reward statistics, and two tensors of shape (B,): `rewards` and `format_rewards`.

    Where the loss or the norm of the gradient is not finite, weights and optimizer stay as they are, to the last bit,
    whatever `max_grad_norm` is, and `skipped_update` is 1.0.  Where memory runs out over a microbatch, what it and
    those before it added is thrown away, and all are made again with twice the `gradient_accumulation_steps`, down to
    one row at a time; a warning says so, and the metadata how many there were.

    Stale gradients are dropped first, and none is left.  Raises ValueError naming the argument before any state
    changes; for a response, where `reward_fn` raised for it or gave what is no number.
    """
    _check_trained(model, tokenizer, optimizer)
    _check_step(gradient_accumulation_steps, max_grad_norm, repeated_prompts, rollout_responses)
    check_positive("temperature", temperature)
    check_reweighting(importance_reweighting_method, old_log_probs, cliprange)
    check_normalization(loss_normalization, normalization_constant)
    rewards, reward_metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, statistics = compute_group_normalized_rewards(
        rewards, group_size, baseline, advantage_eps, advantage_normalizer
    )
    if rollout_token_ids is None:
        rollout_token_ids = _encode_all(tokenizer, repeated_prompts, rollout_responses)
    per_token = {"old_log_probs": old_log_probs, "token_weights": token_weights}
    batch = _make_batch(rollout_token_ids, advantages, per_token, padding_id(tokenizer))
    check_readable(model, rollout_token_ids=batch["input_ids"], labels=batch["labels"])
    kept = ((advantages != 0) & batch["response_mask"].any(dim=1)).nonzero().squeeze(1).tolist()
    objective = _Objective(
        importance_reweighting_method,
        cliprange,
        loss_normalization,
        normalization_constant,
        temperature,
        len(advantages),
    )
    accumulate = partial(_accumulate, model, batch, kept, group_size, objective)
    (loss, metadata), steps = in_smaller_ones(accumulate, gradient_accumulation_steps, len(advantages))
    metadata["gradient_accumulation_steps"] = float(steps)
    if kept:
        metadata |= clip_and_step(model, optimizer, loss, max_grad_norm)
    else:  # no gradient at all: an optimizer with momentum or weight decay must not move either
        metadata |= {"grad_norm": 0.0, "skipped_update": 0.0}
    metadata |= reward_metadata | statistics | {"rewards": rewards}
    return loss, metadata | _group_metrics(rewards, group_size, batch["response_mask"], len(kept))


@dataclass(frozen=True)
class _Objective:
    """What one microbatch adds to the loss of a batch of `batch_size` rows."""

    importance_reweighting_method: str | Reweighting
    cliprange: float | None
    loss_normalization: str
    normalization_constant: float | None
    temperature: float
    batch_size: int

    def __call__(self, model: PreTrainedModel, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mask = rows["response_mask"]
        scores = get_response_log_probs(
            model, rows["input_ids"], rows["labels"], True, temperature=self.temperature, response_mask=mask
        )
        loss, metadata = compute_policy_gradient_loss(
            rows["advantages"],
            scores["log_probs"],
            self.importance_reweighting_method,
            rows.get("old_log_probs"),
            self.cliprange,
            mask,
        )
        if "token_weights" in rows:
            loss = loss * torch.where(mask, rows["token_weights"], 1.0)
        loss = aggregate_loss_across_microbatch(loss, mask, self.loss_normalization, self.normalization_constant)
        if self.loss_normalization == "sequence":  # a mean over these rows; the batch's mean is over all of them
            loss = loss * len(mask) / self.batch_size
        return loss, metadata | {"token_entropy": masked_mean(scores["token_entropy"], mask)}


def _accumulate(
    model, batch, kept: list[int], group_size: int, objective, steps: int
) -> tuple[Tensor, dict[str, float | None]]:
    """Forward and backward through every microbatch; metrics are means over all response tokens that were seen."""
    size = math.ceil(len(batch["advantages"]) / steps)
    microbatches = pack_rows(kept, row_lengths(batch["response_mask"]), group_size, size)
    model.zero_grad(set_to_none=True)
    total, tokens, sums = torch.zeros(()), 0, {"token_entropy": 0.0, "clip_fraction": 0.0}
    try:
        with eval_mode(model):
            for rows in microbatches:
                selected = select_rows(batch, rows, model.device)
                loss, metadata = objective(model, selected)
                loss.backward()
                total += loss.detach().cpu()
                count = int(selected["response_mask"].sum())
                tokens += count
                for name in sums:
                    sums[name] += metadata[name].item() * count
    except BaseException:
        model.zero_grad(set_to_none=True)
        raise
    if not tokens:
        return total, {"token_entropy": None, "clip_fraction": 0.0}
    return total, {name: value / tokens for name, value in sums.items()}


def _group_metrics(rewards: Tensor, group_size: int, response_mask: Tensor, kept: int) -> dict[str, float]:
    return {
        "mean_response_length": response_mask.sum(dim=1).float().mean().item(),
        "pass_at_k": pass_at_k(rewards, group_size),
        "signal_fraction": signal_fraction(rewards, group_size),
        "predicted_signal_fraction": predicted_signal_fraction(rewards, group_size),
        "pruned_rows": float(len(rewards) - kept),
        "pruned_fraction": 1 - kept / len(rewards),
    }


def _make_batch(token_ids: TokenIds, advantages: Tensor, per_token: dict[str, Tensor | None], pad_id: int) -> dict:
    check_list(rollout_token_ids=token_ids)
    if len(token_ids) != len(advantages) or any(not isinstance(row, Sequence) or len(row) != 2 for row in token_ids):
        raise ValueError(
            f"rollout_token_ids: got {len(token_ids)} rows for {len(advantages)} responses; "
            "accepted is one (prompt ids, response ids) for each response"
        )
    batch = pad_prompts_and_outputs([prompt for prompt, _ in token_ids], [ids for _, ids in token_ids], pad_id)
    batch["advantages"] = advantages
    for name, values in per_token.items():
        if values is None:
            continue
        check_tensors(**{name: values})
        if values.shape != batch["labels"].shape:
            raise ValueError(f"{name}: got shape {tuple(values.shape)}, wanted {tuple(batch['labels'].shape)}")
        if not values[batch["response_mask"].to(values.device)].isfinite().all():
            raise ValueError(f"{name}: not finite at a token of a response")
        batch[name] = values.detach()
    return batch


def _encode_all(tokenizer, prompts: Sequence[str], responses: Sequence[str]) -> TokenIds:
    return [(encode(tokenizer, p), encode(tokenizer, r)) for p, r in zip(prompts, responses, strict=True)]


def _check_trained(model, tokenizer, optimizer) -> None:
    check_has("get_input_embeddings", "a language model of transformers", model=model)
    check_has("pad_token_id", "a tokenizer of transformers", tokenizer=tokenizer)
    check_has("param_groups", "an optimizer of torch", optimizer=optimizer)
    own = set(map(id, model.parameters()))
    if not any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
        raise ValueError("optimizer: it holds none of the model's parameters; accepted is one that holds some")


def _check_step(gradient_accumulation_steps, max_grad_norm, prompts, responses) -> None:
    """Check the numbers that no other function checks."""
    steps = gradient_accumulation_steps
    check_same_length(repeated_prompts=prompts, rollout_responses=responses)
    check_texts(repeated_prompts=prompts, rollout_responses=responses)
    check_whole(1, gradient_accumulation_steps=steps)
    if steps > len(responses):
        raise refused("gradient_accumulation_steps", steps, f"at most the batch size, {len(responses)}")
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise refused("max_grad_norm", max_grad_norm, "a number above 0, inf, or None")
