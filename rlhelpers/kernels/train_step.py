"""One optimizer step of a row of the table, from a graded batch to updated weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhelpers.checks import (
    check_has,
    check_list,
    check_positive,
    check_readable,
    check_same_length,
    check_texts,
    check_whole,
    is_number,
    refused,
)
from rlhelpers.kernels.advantages import (
    compute_group_normalized_rewards,
    compute_rollout_rewards,
    pass_at_k,
    predicted_signal_fraction,
    signal_fraction,
)
from rlhelpers.kernels.estimators import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    Aggregation,
    Baseline,
    BatchSizes,
    ClipRange,
    Estimator,
    Reweighting,
    check_aggregation,
    look_up,
)
from rlhelpers.kernels.logprobs import response_log_probs
from rlhelpers.kernels.losses import check_has_old_log_probs, masked_mean, reweighted_loss
from rlhelpers.kernels.microbatches import TrainBatch, check_batch, make_batch, pack_rows, retry_on_oom, row_lengths
from rlhelpers.kernels.tokens import encode, padding_id
from rlhelpers.models import eval_mode

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TokenIds = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(prompt ids, response ids) of every rollout, as the engine sampled them."""


def policy_gradient_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batch: TrainBatch,
    row: Estimator,
    *,
    gradient_accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    normalization_constant: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, float | None]]:
    """Step once on a batch whose rewards are known, as the row of the table says.

    Rows whose advantage is exactly 0 (where the row prunes), and rows without a token, are left out before the model
    sees them; where no row is left, no weight moves, not by momentum or weight decay either.  The others are cut into
    microbatches (`pack_rows`); the gradient is that of the whole batch, whatever the cut.  Dropout is off.

    `max_grad_norm`: the norm is clipped once, after accumulation; None or inf for no clipping.  `temperature`: the one
    that the responses were sampled with.

    Return the loss (scalar, no gradient) and metadata; see `grpo_train_step`.  Where loss or gradient is not finite,
    weights and optimizer stay as they are.  Where memory runs out, the microbatches are halved and all made again.
    Raises ValueError where log-probs or the constant that the row needs are missing, have another shape than the
    labels, or are not finite.
    """
    check_batch(batch)
    check_row_has_what_it_needs(row, batch, normalization_constant)
    advantages, statistics = compute_group_normalized_rewards(
        batch.rewards, batch.group_size, row.baseline, row.advantage_eps, row.advantage_normalizer
    )
    kept = rows_to_train(batch, advantages, row.prunes)
    sizes = batch.sizes(normalization_constant)

    def accumulate(steps: int) -> tuple[Tensor, dict[str, float | None]]:
        return accumulate_gradient(model, batch, advantages, kept, row, sizes, temperature, steps)

    (loss, metrics), steps = retry_on_oom(accumulate, gradient_accumulation_steps, len(batch))
    metrics["gradient_accumulation_steps"] = float(steps)
    if kept:
        metrics |= clip_and_step(model, optimizer, loss, max_grad_norm)
    else:
        metrics |= {"grad_norm": 0.0, "skipped_update": 0.0}
    return loss, metrics | statistics | batch_metrics(batch, len(kept))


def check_row_has_what_it_needs(row: Estimator, batch: TrainBatch, normalization_constant: float | None) -> None:
    check_has_old_log_probs(row.importance_reweighting_method, batch.old_log_probs)
    check_aggregation(row.loss_normalization, normalization_constant)
    if row.kl_coefficient and batch.ref_log_probs is None:
        raise ValueError(f"ref_log_probs: got None; {row.name} has a KL penalty, which needs them")


def rows_to_train(batch: TrainBatch, advantages: Tensor, prunes: bool) -> list[int]:
    """Numbers of the rows that can have a gradient."""
    has_token = batch.response_mask.any(dim=1)
    return (has_token & (advantages != 0) if prunes else has_token).nonzero().squeeze(1).tolist()


def accumulate_gradient(
    model: PreTrainedModel,
    batch: TrainBatch,
    advantages: Tensor,
    kept: Sequence[int],
    row: Estimator,
    sizes: BatchSizes,
    temperature: float,
    steps: int,
) -> tuple[Tensor, dict[str, float | None]]:
    """Forward and backward through every microbatch.  Return the batch's loss, and metrics, which are means over all
    response tokens that the model saw.  An error leaves no half of a gradient."""
    microbatches = pack_rows(kept, row_lengths(batch.response_mask), batch.group_size, math.ceil(len(batch) / steps))
    model.zero_grad(set_to_none=True)
    total, tokens, sums = torch.zeros(()), 0, {"token_entropy": 0.0, "clip_fraction": 0.0}
    try:
        with eval_mode(model):
            for rows in microbatches:
                part = batch.rows(rows, model.device)
                loss, metrics = microbatch_loss(model, part, advantages[rows].to(model.device), row, sizes, temperature)
                loss.backward()
                total += loss.detach().cpu()
                count = int(part.response_mask.sum())
                tokens += count
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value.item() * count
    except BaseException:
        model.zero_grad(set_to_none=True)
        raise
    if not tokens:
        return total, {"token_entropy": None, "clip_fraction": 0.0}
    return total, {name: value / tokens for name, value in sums.items()}


def microbatch_loss(
    model: PreTrainedModel, part: TrainBatch, advantages: Tensor, row: Estimator, sizes: BatchSizes, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """What these rows add to the loss of their batch, with gradient, and means over their response tokens."""
    mask = part.response_mask
    scores = response_log_probs(model, part.input_ids, part.labels, mask, temperature, with_entropy=True)
    log_probs = scores["log_probs"]
    loss, metrics = reweighted_loss(
        advantages[:, None], log_probs, row.importance_reweighting_method, part.old_log_probs, row.cliprange, mask
    )
    if part.token_weights is not None:
        loss = loss * torch.where(mask, part.token_weights, 1.0)
    if row.kl_coefficient:
        kl = KL_ESTIMATORS[row.kl_estimator](torch.where(mask, log_probs - part.ref_log_probs, 0.0))
        loss = loss + row.kl_coefficient * kl
        metrics["kl_to_reference"] = masked_mean(kl.detach(), mask)
    aggregate = look_up("loss_normalization", row.loss_normalization, AGGREGATIONS)
    return aggregate(loss, mask, sizes), metrics | {"token_entropy": masked_mean(scores["token_entropy"], mask)}


def clip_and_step(
    model: PreTrainedModel, optimizer: Optimizer, loss: Tensor, max_grad_norm: float | None
) -> dict[str, float]:
    """Clip the gradient once and step once, unless loss or gradient is not finite; no gradient is left.

    Return `grad_norm` before clipping and `skipped_update`, 1.0 where the weights were left alone.
    """
    limit = math.inf if max_grad_norm is None else max_grad_norm
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    if finite:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return {"grad_norm": grad_norm, "skipped_update": float(not finite)}


def batch_metrics(batch: TrainBatch, kept: int) -> dict[str, float]:
    rewards, group_size = batch.rewards, batch.group_size
    return {
        "mean_reward": rewards.mean().item(),
        "mean_response_length": batch.response_mask.sum(dim=1).float().mean().item(),
        "pass_at_k": pass_at_k(rewards, group_size),
        "signal_fraction": signal_fraction(rewards, group_size),
        "predicted_signal_fraction": predicted_signal_fraction(rewards, group_size),
        "pruned_rows": float(len(batch) - kept),
        "pruned_fraction": 1 - kept / len(batch),
    }


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
    cliprange: ClipRange | None = None,
    loss_normalization: str | Aggregation = "sequence",
    normalization_constant: float | None = None,
    *,
    rollout_token_ids: TokenIds | None = None,
    temperature: float = 1.0,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor | float | None]]:
    """Grade, and step once: `policy_gradient_step` with the handout's arguments (sections 4.2 and 6).

    The batch holds B = groups x group_size rollouts, a group's responses side by side.  The cells of the row are
    arguments.  `old_log_probs`, `token_weights`: (B, width of the whole batch's labels).  `rollout_token_ids`: what the
    engine read and sampled, which is scored instead of the re-encoded text.

    Return the loss (scalar, no gradient) and metadata, floats unless noted: `grad_norm` before clipping,
    `token_entropy` and `clip_fraction` over the response tokens that the model saw (entropy None where it saw none),
    `mean_reward`, `mean_format_reward`, `mean_response_length` in tokens, `pass_at_k`, `signal_fraction` beside
    `predicted_signal_fraction`, `pruned_rows`, `pruned_fraction`, `skipped_update`, the
    `gradient_accumulation_steps` used, the reward statistics, and two tensors of shape (B,): `rewards` and
    `format_rewards`.

    Raises ValueError naming the argument before any state changes; for a response, where `reward_fn` raised for it or
    gave what is no number.
    """
    _check_trained(model, tokenizer, optimizer)
    _check_numbers(gradient_accumulation_steps, max_grad_norm, repeated_prompts, rollout_responses)
    check_positive("temperature", temperature)
    row = Estimator(
        name="grpo_train_step",
        baseline=baseline,
        advantage_eps=advantage_eps,
        advantage_normalizer=advantage_normalizer,
        importance_reweighting_method=importance_reweighting_method,
        cliprange=cliprange,
        loss_normalization=loss_normalization,
    )
    check_has_old_log_probs(importance_reweighting_method, old_log_probs)  # before anything is graded
    check_aggregation(loss_normalization, normalization_constant)
    rewards, graded = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    if rollout_token_ids is None:
        pairs = zip(repeated_prompts, rollout_responses, strict=True)
        rollout_token_ids = [(encode(tokenizer, prompt), encode(tokenizer, response)) for prompt, response in pairs]
    _check_token_ids(rollout_token_ids, len(rewards))
    batch = make_batch(
        rollout_token_ids,
        rewards,
        group_size,
        padding_id(tokenizer),
        old_log_probs=old_log_probs,
        token_weights=token_weights,
    )
    check_readable(model, rollout_token_ids=batch.input_ids, labels=batch.labels)
    loss, metadata = policy_gradient_step(
        model,
        optimizer,
        batch,
        row,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
        normalization_constant=normalization_constant,
        temperature=temperature,
    )
    return loss, metadata | graded | {"rewards": rewards}


def _check_trained(model, tokenizer, optimizer) -> None:
    check_has("get_input_embeddings", "a language model of transformers", model=model)
    check_has("pad_token_id", "a tokenizer of transformers", tokenizer=tokenizer)
    check_has("param_groups", "an optimizer of torch", optimizer=optimizer)
    own = set(map(id, model.parameters()))
    if not any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
        raise ValueError("optimizer: it holds none of the model's parameters; accepted is one that holds some")


def _check_numbers(gradient_accumulation_steps, max_grad_norm, prompts, responses) -> None:
    """Check the numbers that no other function checks."""
    steps = gradient_accumulation_steps
    check_same_length(repeated_prompts=prompts, rollout_responses=responses)
    check_texts(repeated_prompts=prompts, rollout_responses=responses)
    check_whole(1, gradient_accumulation_steps=steps)
    if steps > len(responses):
        raise refused("gradient_accumulation_steps", steps, f"at most the batch size, {len(responses)}")
    if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
        raise refused("max_grad_norm", max_grad_norm, "a number above 0, inf, or None")


def _check_token_ids(token_ids: TokenIds, responses: int) -> None:
    check_list(rollout_token_ids=token_ids)
    if len(token_ids) != responses or any(not isinstance(row, Sequence) or len(row) != 2 for row in token_ids):
        raise ValueError(
            f"rollout_token_ids: got {len(token_ids)} rows for {responses} responses; "
            "accepted is one (prompt ids, response ids) for each response"
        )
