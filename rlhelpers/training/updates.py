"""The way of a train batch through one update: graded samples become tensors, are scored under the old policy, and then
move the weights.

A batch over which grading or an update failed, and the first one of updates that were skipped in a row, is kept in the
run's folder (bad_batches/): a line of JSON for each response, with prompt, ground truth, token ids and, where it was
graded, reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhelpers.files import NotWrittenError
from rlhelpers.kernels.logprobs import engine_mismatch, score_batch
from rlhelpers.kernels.losses import truncated_importance_weights
from rlhelpers.kernels.microbatches import TrainBatch, make_batch
from rlhelpers.kernels.tokens import padding_id
from rlhelpers.kernels.train_step import policy_gradient_step
from rlhelpers.tasks.grading import Grade, Grader
from rlhelpers.training.config import RunConfig
from rlhelpers.training.console import Log
from rlhelpers.training.evaluation import Sample
from rlhelpers.training.own_step import as_metrics

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TrainStep = Callable[..., tuple[Tensor, dict[str, Any]]]
"""A function with the arguments and the result of the handout's `grpo_train_step`."""

MAX_SKIPPED = 3  # updates in a row; so many, and the run stops: nothing it does changes anything any more


@dataclass
class Batch:
    """`rewards`, `format_rewards`: (B,), the grader's, or what a step of the reader's own paid instead.  `compared`:
    log pi_0 and log mu, (tokens,) each, of the response tokens that the trainer scored too."""

    samples: Sequence[Sample]
    grades: Sequence[Grade]
    tensors: TrainBatch
    rewards: Tensor
    format_rewards: Tensor
    compared: tuple[Tensor, Tensor] | None = None

    @property
    def paid(self) -> list[dict[str, float]]:
        pairs = zip(self.rewards.tolist(), self.format_rewards.tolist(), strict=True)
        return [{"reward": reward, "format_reward": format_reward} for reward, format_reward in pairs]


def cut(
    samples: Sequence[Sample], grades: Sequence[Grade], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Batch]:
    """The train batches of a rollout batch, in order."""
    size, pad_id = config.train_batch_size, padding_id(tokenizer)
    pieces = (slice(start, start + size) for start in range(0, len(samples), size))
    return [_make_batch(samples[piece], grades[piece], config.group_size, pad_id) for piece in pieces]


def _make_batch(samples: Sequence[Sample], grades: Sequence[Grade], group_size: int, pad_id: int) -> Batch:
    rewards, formats = torch.tensor(
        [[grade.rewards["reward"], grade.rewards["format_reward"]] for grade in grades]
    ).unbind(dim=1)
    tensors = make_batch(token_ids(samples), rewards, group_size, pad_id)
    engine = torch.zeros(tensors.response_mask.shape)
    sampled = [log_prob for _, _, completion in samples for log_prob in completion.log_probs]
    engine[tensors.response_mask] = torch.tensor(sampled)
    return Batch(samples, grades, replace(tensors, engine_log_probs=engine), rewards, formats)


def token_ids(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """What the engine read and what it sampled."""
    return [(rollout.prompt_token_ids, completion.token_ids) for _, rollout, completion in samples]


def score(policy: PreTrainedModel, batch: Batch, config: RunConfig, reference: PreTrainedModel | None = None) -> Batch:
    """Add the log-probs that the row of the table needs, under the policy before its first update on these samples.

    The old policy pi_0 is the trainer's.  With rollouts_ahead the policy has moved on since these were sampled: then it
    is the engine's policy mu, unless the row has an `engine_ratio_cap`, whose weights lead from mu to the trainer's
    policy of now.  Where the row needs no log-probs, those of the first group are compared with the engine's.
    """
    row, tensors = config.estimator, batch.tensors
    capped = row.engine_ratio_cap is not None
    engine_is_old = config.rollouts_ahead and not capped
    needs_all = capped or (row.needs_old_log_probs and not engine_is_old)
    rows = slice(None if needs_all else config.group_size)
    trainer = _log_probs(policy, tensors, rows, config)
    engine, mask = tensors.engine_log_probs, tensors.response_mask
    weights = truncated_importance_weights(trainer, engine, mask, row.engine_ratio_cap) if capped else None
    old = (engine if engine_is_old else trainer) if row.needs_old_log_probs else None
    ref = _log_probs(reference, tensors, slice(None), config) if row.kl_coefficient else None
    scored = replace(tensors, old_log_probs=old, token_weights=weights, ref_log_probs=ref)
    return replace(batch, tensors=scored, compared=(trainer[mask[rows]], engine[rows][mask[rows]]))


def _log_probs(model: PreTrainedModel, tensors: TrainBatch, rows: slice, config: RunConfig) -> Tensor:
    """(rows, length) on the CPU."""
    ids, labels, mask = (tensor[rows] for tensor in (tensors.input_ids, tensors.labels, tensors.response_mask))
    return score_batch(model, ids, labels, config.microbatch_size, config.temperature, mask).cpu()


def mismatch(batches: Sequence[Batch]) -> dict[str, float | None]:
    """How far trainer and engine are apart over the batches that were scored; see `engine_mismatch`."""
    trainer, engine = (torch.cat(parts)[None] for parts in zip(*(batch.compared for batch in batches), strict=True))
    return engine_mismatch(trainer, engine, torch.ones_like(trainer))


class DivergedError(RuntimeError):
    """MAX_SKIPPED updates in a row had a loss or gradient that was not finite."""


def diverged(in_a_row: int, more: str = "") -> DivergedError:
    """`more`: what else is known, with a semicolon in front."""
    return DivergedError(
        f"the last {in_a_row} updates were skipped, because their loss or gradient was not finite{more}; a lower "
        "learning_rate or max_grad_norm often helps, and goes into another run"
    )


class Updates:
    """The updates of one run.  `own_step`: the reader's train step, or None for the package's.  `state`, as JSON has
    it, is what a run that goes on must be given back."""

    def __init__(
        self, config: RunConfig, policy, tokenizer, optimizer, grader: Grader, own_step: TrainStep | None, log: Log
    ):
        self.config, self.policy, self.tokenizer, self.optimizer = config, policy, tokenizer, optimizer
        self.grader, self.own_step, self.log = grader, own_step, log
        self.state: dict[str, Any] = {"skipped": 0, "in_a_row": 0, "first": ""}  # the first of those in a row
        self.state["accumulation"] = config.gradient_accumulation_steps

    def __call__(self, step: int, number: int, batch: Batch) -> dict[str, Any]:
        """Update number `number` of a step; returns its metrics.  Whatever the train step raises goes on up."""
        try:
            metrics = self._step(batch) if self.own_step is None else self._step_of_the_reader(batch)
        except Exception:
            keep_failed(self.log, step, f"update_{number}", f"Update {number} of step {step} failed", batch.samples)
            raise
        self._count_skipped(step, number, batch, metrics)
        self._take_over_accumulation(step, metrics)
        return metrics

    def _step(self, batch: Batch) -> dict[str, Any]:
        config = self.config
        loss, metrics = policy_gradient_step(
            self.policy,
            self.optimizer,
            batch.tensors,
            config.estimator,
            gradient_accumulation_steps=self.state["accumulation"],
            max_grad_norm=config.max_grad_norm,
            normalization_constant=config.normalization_constant,
            temperature=config.temperature,
        )
        return {"loss": loss.item(), "mean_format_reward": batch.format_rewards.mean().item()} | metrics

    def _step_of_the_reader(self, batch: Batch) -> dict[str, Any]:
        """The handout's `grpo_train_step`, which grades by itself: it is told the grades that are known."""
        config, samples, tensors = self.config, batch.samples, batch.tensors
        texts = [(completion.text, problem.answer) for problem, _, completion in samples]
        known = {text: grade.rewards for text, grade in zip(texts, batch.grades, strict=True)}
        # A reader's own step need not know the weights unless there are some.
        weights = {} if tensors.token_weights is None else {"token_weights": tensors.token_weights}
        result = self.own_step(
            self.policy,
            self.tokenizer,
            self.optimizer,
            self.state["accumulation"],
            config.max_grad_norm,
            lambda response, truth: known.get((response, truth)) or self.grader(response, truth),
            [rollout.prompt for _, rollout, _ in samples],
            [response for response, _ in texts],
            [truth for _, truth in texts],
            config.group_size,
            **config.estimator.step_arguments(),
            old_log_probs=tensors.old_log_probs,
            normalization_constant=config.normalization_constant,
            rollout_token_ids=token_ids(samples),
            temperature=config.temperature,
            **weights,
        )
        metrics = as_metrics(result, len(samples))
        batch.rewards, batch.format_rewards = metrics.pop("rewards"), metrics.pop("format_rewards")
        return metrics

    def stop_if_diverged(self) -> None:
        """Call it when the step's metrics are in the log.  Raises DivergedError."""
        if self.state["in_a_row"] < MAX_SKIPPED:
            return
        finite = all(weight.isfinite().all() for weight in self.policy.parameters())
        weights = f"the weights are {'still' if finite else 'no longer'} finite"
        raise diverged(self.state["in_a_row"], f"; the first of them was {self.state['first']}; {weights}")

    def _count_skipped(self, step: int, number: int, batch: Batch, metrics: dict[str, Any]) -> None:
        """A step of the reader's own need not skip; a loss that is not finite counts for it as well."""
        loss = metrics["loss"]
        if not metrics.get("skipped_update") and (loss is None or math.isfinite(loss)):
            self.state["in_a_row"] = 0
            return
        self.state["skipped"] += 1
        self.state["in_a_row"] += 1
        if self.state["in_a_row"] == 1:
            rows = [row | paid for row, paid in zip(sampled_rows(batch.samples), batch.paid, strict=True)]
            file = self.log.records.write_bad_batch(step, f"update_{number}", rows)
            self.state["first"] = f"update {number} of step {step}, whose batch is in {file.parent.name}/{file.name}"

    def _take_over_accumulation(self, step: int, metrics: dict[str, Any]) -> None:
        """Where memory ran out, the microbatches are the smaller ones for the rest of the run."""
        before, now = self.state["accumulation"], metrics.get("gradient_accumulation_steps")
        if now is not None and now > before:
            self.state["accumulation"] = int(now)
            self.log.remark(f"Memory ran out: from step {step} on gradient_accumulation_steps={now:.0f}, not {before}.")


def keep_failed(log: Log, step: int, part: str, said: str, samples: Sequence[Sample]) -> None:
    """Keep the samples over which something failed, and say where; a disk that is full must not hide the failure."""
    with suppress(NotWrittenError):
        file = log.records.write_bad_batch(step, part, sampled_rows(samples))
        log.remark(f"{said}; its batch is in {file.parent.name}/{file.name}.")


def sampled_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": rollout.prompt,
            "response": completion.text,
            "ground_truth": problem.answer,
            "prompt_token_ids": list(rollout.prompt_token_ids),
            "response_token_ids": list(completion.token_ids),
            "log_probs": list(completion.log_probs),  # the engine's
        }
        for problem, rollout, completion in samples
    ]
