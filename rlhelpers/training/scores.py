"""The log-probs of what was sampled, as the engine gave them and as the trainer's policy does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.kernels.logprobs import engine_mismatch, score_batch
from rlhelpers.kernels.losses import truncated_importance_weights
from rlhelpers.kernels.tokens import pad_prompts_and_outputs, padding_id
from rlhelpers.training.config import RunConfig
from rlhelpers.training.evaluation import Sample

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Scores:
    """One train batch before its first update.

    `old_log_probs` (pi_0) and `token_weights`, (B, width), are what the step needs, None where it needs none.
    `trainer` and `engine`, (tokens,), are log pi_0 and log mu of the response tokens that were scored twice: all of
    them where the method needs all, and else those of the first group.
    """

    old_log_probs: Tensor | None
    token_weights: Tensor | None
    trainer: Tensor
    engine: Tensor


def score_samples(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], config: RunConfig
) -> Scores:
    """With rollouts_ahead the policy has moved on since these were sampled: the old policy of the ratio is then the
    engine's, unless engine_ratio_cap corrects for the way from there to the policy of now."""
    row = config.estimator
    capped = row.engine_ratio_cap is not None
    engine_is_old = config.rollouts_ahead and not capped
    batch = pad_prompts_and_outputs(*zip(*token_ids(samples), strict=True), padding_id(tokenizer))
    mask = batch["response_mask"].bool()
    engine = torch.zeros(mask.shape)
    engine[mask] = torch.tensor([log_prob for _, _, completion in samples for log_prob in completion.log_probs])
    needs_old = row.importance_reweighting_method != "none"
    needs_all = capped or (needs_old and not engine_is_old)
    rows = slice(None if needs_all else config.group_size)
    trainer = score_batch(
        policy,
        batch["input_ids"][rows],
        batch["labels"][rows],
        config.microbatch_size,
        config.temperature,
        batch["response_mask"][rows],
    ).cpu()
    weights = None
    if capped:
        weights = truncated_importance_weights(trainer, engine, mask, row.engine_ratio_cap)
    old = (engine if engine_is_old else trainer) if needs_old else None
    return Scores(old, weights, trainer[mask[rows]], engine[rows][mask[rows]])


def mismatch(scores: Sequence[Scores]) -> dict[str, float | None]:
    """How far apart the two are over a rollout batch: see `engine_mismatch`."""
    trainer, engine = torch.cat([s.trainer for s in scores])[None], torch.cat([s.engine for s in scores])[None]
    return engine_mismatch(trainer, engine, torch.ones_like(trainer))


def token_ids(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """What the engine read and what it sampled."""
    return [(rollout.prompt_token_ids, completion.token_ids) for _, rollout, completion in samples]
