"""The updates of one run: the train step with what the configuration says, and what becomes of those that go wrong.

A batch over which the step raised, and the first one of those that were skipped in a row, is kept in the run's folder
(bad_batches/): a line of JSON for each response, with prompt, ground truth, token ids and, where it was graded, reward.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhelpers.files import NotWrittenError
from rlhelpers.tasks import Grader
from rlhelpers.training import own_step as components
from rlhelpers.training.config import RunConfig
from rlhelpers.training.evaluation import Sample
from rlhelpers.training.scores import Scores, token_ids

MAX_SKIPPED = 3  # updates in a row; so many, and the run stops: nothing it does changes anything any more

Keep = Callable[[int, int, list[dict[str, Any]]], Path | None]
"""(step, number of the update in it, rows) -> the file that they were kept in."""


class DivergedError(RuntimeError):
    """MAX_SKIPPED updates in a row had a loss or gradient that was not finite."""


def diverged(in_a_row: int, more: str = "") -> DivergedError:
    """`more`: what else is known, with a semicolon in front."""
    return DivergedError(
        f"the last {in_a_row} updates were skipped, because their loss or gradient was not finite{more}; a lower "
        "learning_rate or max_grad_norm often helps, and goes into another run"
    )


class Updates:
    """`keep` keeps a bad batch, `remark` is told what a reader of the results must know.  `state`, as JSON has it, is
    what a run that goes on must be given back."""

    def __init__(self, config: RunConfig, policy, tokenizer, optimizer, grader: Grader):
        self.config, self.policy, self.tokenizer = config, policy, tokenizer
        self.optimizer, self.grader = optimizer, grader
        with_weights = config.estimator.engine_ratio_cap is not None
        self.train_step = components.load_train_step(config.components, with_weights)
        self.remark: Callable[[str], None] = print
        self.keep: Keep = lambda *_: None
        self.state: dict[str, Any] = {
            "skipped": 0,
            "in_a_row": 0,
            "first": "",  # of those in a row
            "accumulation": config.gradient_accumulation_steps,
        }

    def __call__(self, step: int, number: int, batch: Sequence[Sample], scores: Scores) -> dict[str, Any]:
        """Update number `number` of a step; returns its metrics.  Whatever the train step raises goes on up."""
        try:
            metrics = components.as_metrics(self._train_step(batch, scores), len(batch))
        except Exception:
            with suppress(NotWrittenError):
                if file := self.keep(step, number, _rows(batch)):
                    self.remark(f"Update {number} of step {step} failed; its batch is in {_name(file)}.")
            raise
        self._count_skipped(step, number, batch, metrics)
        self._take_over_accumulation(step, metrics)
        return metrics

    def stop_if_diverged(self) -> None:
        """Call it when the step's metrics are in the log.  Raises DivergedError."""
        if self.state["in_a_row"] < MAX_SKIPPED:
            return
        finite = all(weight.isfinite().all() for weight in self.policy.parameters())
        weights = f"the weights are {'still' if finite else 'no longer'} finite"
        raise diverged(self.state["in_a_row"], f"; the first of them was {self.state['first']}; {weights}")

    def _count_skipped(self, step: int, number: int, batch: Sequence[Sample], metrics: dict[str, Any]) -> None:
        """A step of the reader's own need not skip; a loss that is not finite counts for it as well."""
        loss = metrics["loss"]
        if not metrics.get("skipped_update") and (loss is None or math.isfinite(loss)):
            self.state["in_a_row"] = 0
            return
        self.state["skipped"] += 1
        self.state["in_a_row"] += 1
        if self.state["in_a_row"] == 1:
            rewards = {name: metrics[name].tolist() for name in components.PER_RESPONSE}
            file = self.keep(step, number, _rows(batch, rewards["rewards"], rewards["format_rewards"]))
            kept = "" if file is None else f", whose batch is in {_name(file)}"
            self.state["first"] = f"update {number} of step {step}{kept}"

    def _take_over_accumulation(self, step: int, metrics: dict[str, Any]) -> None:
        """Where memory ran out, the microbatches are the smaller ones for the rest of the run."""
        before, now = self.state["accumulation"], metrics.get("gradient_accumulation_steps")
        if now is not None and now > before:
            self.state["accumulation"] = int(now)
            self.remark(f"Memory ran out: from step {step} on gradient_accumulation_steps={now:.0f}, not {before}.")

    def _train_step(self, batch: Sequence[Sample], scores: Scores) -> Any:
        config = self.config
        # A reader's own step need not know the weights unless there are some.
        weights = {} if scores.token_weights is None else {"token_weights": scores.token_weights}
        return self.train_step(
            self.policy,
            self.tokenizer,
            self.optimizer,
            self.state["accumulation"],
            config.max_grad_norm,
            self.grader,
            [rollout.prompt for _, rollout, _ in batch],
            [completion.text for _, _, completion in batch],
            [problem.answer for problem, _, _ in batch],
            config.group_size,
            **config.estimator.step_arguments(),
            old_log_probs=scores.old_log_probs,
            normalization_constant=config.normalization_constant,
            rollout_token_ids=token_ids(batch),
            temperature=config.temperature,
            **weights,
        )


def _rows(
    batch: Sequence[Sample], rewards: Sequence[float] = (), format_rewards: Sequence[float] = ()
) -> list[dict[str, Any]]:
    rows = [
        {
            "prompt": rollout.prompt,
            "response": completion.text,
            "ground_truth": problem.answer,
            "prompt_token_ids": list(rollout.prompt_token_ids),
            "response_token_ids": list(completion.token_ids),
            "log_probs": list(completion.log_probs),  # the engine's
        }
        for problem, rollout, completion in batch
    ]
    for row, reward, format_reward in zip(rows, rewards, format_rewards, strict=False):
        row |= {"reward": reward, "format_reward": format_reward}
    return rows


def _name(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"
