"""The loop: sync weights, sample, grade, step; validate and keep rollouts now and then."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs, padding_id
from rlhelpers.rollouts import Rollout, RolloutEngine, Sampling, TorchEngine
from rlhelpers.tasks import Problem, Task, get_prompt, load_task
from rlhelpers.training.config import RunConfig
from rlhelpers.training.evaluation import evaluate, rollout_rows
from rlhelpers.training.policy import load_policy
from rlhelpers.training.progress import Progress
from rlhelpers.training.records import RunRecords
from rlhelpers.training.tracker import Tracker


def train(config: RunConfig) -> Path:
    """Train as the configuration says; returns the run's folder.

    Raises ValueError naming the setting before the folder is made.  If anything fails later, the folder keeps all
    complete steps and says "failed".
    """
    task = load_task(config.task, config.n_train_examples, config.n_val_examples)
    policy, tokenizer = load_policy(config.model, config.device)
    run = Run(config, task, policy, tokenizer, TorchEngine(policy, tokenizer))
    with RunRecords(config) as records, Progress(config.num_rollout_steps) as progress:
        tracker = Tracker(config)
        try:
            run.train(records, progress, tracker)
        finally:
            tracker.close()
            run.engine.close()
        policy.save_pretrained(records.folder / "policy")
        tokenizer.save_pretrained(records.folder / "policy")
    return records.folder


class Run:
    """The moving parts of one run: policy, optimizer, engine, and the problems that fit the context."""

    def __init__(self, config: RunConfig, task: Task, policy, tokenizer, engine: RolloutEngine):
        self.config, self.policy, self.tokenizer, self.engine = config, policy, tokenizer, engine
        self.prompt = get_prompt(config.prompt)
        self.reward_fn = task.reward_fn_for(config.prompt)
        self.train_problems, self.too_long = self._that_fit(task.train)
        self.val_problems, val_too_long = self._that_fit(task.validation)
        self.too_long += val_too_long
        if len(self.train_problems) < config.prompts_per_step or not self.val_problems:
            raise ValueError(
                f"task: only {len(self.train_problems)} training and {len(self.val_problems)} validation problems of "
                f"{config.task!r} fit the context of {policy.config.max_position_embeddings} tokens with "
                f"max_tokens={config.max_tokens}"
            )
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )

    def train(self, records: RunRecords, progress: Progress, tracker: Tracker) -> None:
        config = self.config
        if self.too_long:
            self._remark(records, progress, f"{self.too_long} problems exceed the model's context and are left out.")
        self.engine.sync_weights(self.policy)
        earned = 0.0
        for step in range(config.num_rollout_steps + 1):
            started = time.perf_counter()
            is_last = step == config.num_rollout_steps
            keep_rollouts = is_last or step % config.rollouts_every == 0
            metrics: dict[str, Any] = {"step": step}
            if step > 0:
                train_metrics, rows = self.step(step)
                metrics |= train_metrics
                earned += metrics["reward"]
                if keep_rollouts:
                    records.write_rollouts(step, "train", rows)
            if is_last or step % config.eval_every == 0:
                val_metrics, rows = self.validate(step)
                metrics |= val_metrics
                if keep_rollouts:
                    records.write_rollouts(step, "validation", rows)
            metrics["seconds"] = time.perf_counter() - started
            records.log(metrics)
            tracker.log(metrics)
            progress.show(metrics)
        if not earned:
            self._remark(
                records,
                progress,
                "No training response earned a reward, so every advantage was zero and no weight was changed: "
                "this model is too weak for this task and prompt.",
            )

    def step(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One rollout batch and its updates.  Returns the step's metrics and its responses as rows."""
        config = self.config
        problems = draw_problems(self.train_problems, step - 1, config.prompts_per_step, config.seed)
        started = time.perf_counter()
        rollouts = self.engine.generate([self.prompt(p.question) for p in problems], self._sampling("train", step))
        sampled = time.perf_counter()
        groups_per_update = config.train_batch_size // config.group_size
        batches = [
            _TrainBatch(problems[i : i + groups_per_update], rollouts[i : i + groups_per_update])
            for i in range(0, len(problems), groups_per_update)
        ]
        # All of them before the first update: the policy that sampled is the old policy of every update.
        old_log_probs = [self._old_log_probs(batch) for batch in batches]
        updates = [self._update(batch, old) for batch, old in zip(batches, old_log_probs, strict=True)]
        self.engine.sync_weights(self.policy)
        rewards = torch.cat([update.pop("rewards") for update in updates]).tolist()
        formats = torch.cat([update.pop("format_rewards") for update in updates]).tolist()
        metrics = _means(updates)
        metrics |= {
            "truncated_fraction": fmean(c.finish_reason == "length" for r in rollouts for c in r.completions),
            "seconds_sampling": sampled - started,
            "seconds_training": time.perf_counter() - sampled,
        }
        return metrics, rollout_rows(problems, rollouts, rewards, formats)

    def validate(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample each validation problem once, as in training."""
        sampling = self._sampling("validation", step, n=1)
        return evaluate(self.engine, self.val_problems, self.prompt, self.reward_fn, sampling)

    def _update(self, batch: "_TrainBatch", old_log_probs: torch.Tensor | None) -> dict[str, Any]:
        config = self.config
        loss, metadata = grpo_train_step(
            self.policy,
            self.tokenizer,
            self.optimizer,
            config.gradient_accumulation_steps,
            config.max_grad_norm,
            self.reward_fn,
            batch.prompts,
            batch.responses,
            batch.ground_truths,
            config.group_size,
            **config.estimator.step_arguments(),
            old_log_probs=old_log_probs,
            normalization_constant=config.normalization_constant,
            rollout_token_ids=batch.token_ids,
            temperature=config.temperature,
        )
        return {"loss": loss.item()} | metadata

    def _old_log_probs(self, batch: "_TrainBatch") -> torch.Tensor | None:
        if self.config.estimator.importance_reweighting_method == "none":
            return None
        tensors = pad_prompts_and_outputs(*zip(*batch.token_ids, strict=True), padding_id(self.tokenizer))
        return score_batch(
            self.policy, tensors["input_ids"], tensors["labels"], self.config.microbatch_size, self.config.temperature
        )

    def _sampling(self, purpose: str, step: int, n: int | None = None) -> Sampling:
        config = self.config
        return Sampling(
            n=n or config.group_size,
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            min_tokens=config.min_tokens,
            stop=self.prompt.stop,
            seed=derive_seed(config.seed, purpose, step),
        )

    def _that_fit(self, problems: Sequence[Problem]) -> tuple[list[Problem], int]:
        """The problems whose prompt leaves room for max_tokens, and how many do not."""
        room = self.policy.config.max_position_embeddings - self.config.max_tokens
        fitting = [p for p in problems if len(encode(self.tokenizer, self.prompt(p.question))) <= room]
        return fitting, len(problems) - len(fitting)

    def _remark(self, records: RunRecords, progress: Progress, text: str) -> None:
        records.remark(text)
        progress.say(text)


class _TrainBatch:
    """Groups of rollouts laid out row by row: each prompt and ground truth repeated beside its responses."""

    def __init__(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]):
        rows = [
            (problem, rollout, completion)
            for problem, rollout in zip(problems, rollouts, strict=True)
            for completion in rollout.completions
        ]
        self.prompts = [rollout.prompt for _, rollout, _ in rows]
        self.responses = [completion.text for _, _, completion in rows]
        self.ground_truths = [problem.answer for problem, _, _ in rows]
        self.token_ids = [(rollout.prompt_token_ids, completion.token_ids) for _, rollout, completion in rows]


def draw_problems(problems: Sequence[Problem], batch: int, size: int, seed: int) -> list[Problem]:
    """The `batch`-th batch of an endless stream in which every epoch is a new shuffle."""
    drawn = []
    for position in range(batch * size, (batch + 1) * size):
        epoch, index = divmod(position, len(problems))
        if not drawn or index == 0:
            order = random.Random(derive_seed(seed, "epoch", epoch)).sample(range(len(problems)), len(problems))
        drawn.append(problems[order[index]])
    return drawn


def derive_seed(seed: int, purpose: str, number: int) -> int:
    """A seed of its own for every use of randomness in a run: the same in every run with this seed."""
    return random.Random(f"{seed}/{purpose}/{number}").getrandbits(63)


def _means(updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each metric's mean over the updates that have a value; the step's own names for the most read ones."""
    names = {"mean_reward": "reward", "mean_format_reward": "format_reward", "mean_response_length": "response_length"}
    means = {}
    for name in updates[0]:
        values = [update[name] for update in updates if update[name] is not None]
        means[names.get(name, name)] = fmean(values) if values else None
    return means
