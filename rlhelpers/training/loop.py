"""The loop: sync weights, sample, grade, step; validate, keep rollouts and save checkpoints now and then."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from rlhelpers.checks import check_kind
from rlhelpers.kernels.advantages import reward_statistics
from rlhelpers.kernels.tokens import encode
from rlhelpers.models import choose_device, load_policy, make_optimizer, save_policy
from rlhelpers.rollouts import Rollout, RolloutEngine, Sampling
from rlhelpers.tasks import Grader, Problem, Task, get_prompt, load_task
from rlhelpers.training import own_step as components
from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.config import RunConfig
from rlhelpers.training.console import Log, is_due, open_log, take_steps
from rlhelpers.training.draws import derive_seed, draw_batch
from rlhelpers.training.evaluation import evaluate, flatten, reason_counts, rows_to_read, truncated_fraction
from rlhelpers.training.preflight import cautions
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.sampler import Sampler, check_engine, make_engine
from rlhelpers.training.scores import mismatch, score_samples
from rlhelpers.training.updates import Updates


def train(config: RunConfig) -> Path:
    """Train as the configuration says; returns the run's folder.

    Raises ValueError naming the setting before the folder is made.  If anything fails later, the folder keeps all
    complete steps and says "failed"; ended by SIGTERM, it says "killed".  A disk that is full is a NotWrittenError,
    which names the file.  Updates whose loss or gradient is not finite are skipped; see training/updates for how many.

    With `resume`, a run of the same configuration that was killed or failed goes on from its last checkpoint, with the
    batches, samples and random numbers that it would have had; one that is complete is left as it is.  On the CPU with
    the engine torch, metrics (but for seconds) and weights are then those of a run in one piece, bit for bit, if code,
    versions and number of threads are; vLLM and CUDA do not repeat their own sums so exactly.
    """
    check_kind(RunConfig, "a RunConfig, as make_config gives it", config=config)
    records = RunRecords(config)
    if records.says_complete():
        return records.folder
    check_engine(config, torch.device(choose_device(config.device)))  # before what may take minutes to fetch
    task = load_task(config.task, config.n_train_examples, config.n_val_examples)
    policy, tokenizer = load_policy(config.model, config.device, config.gradient_checkpointing)
    run = Run(config, task, policy, tokenizer, make_engine(config, policy, tokenizer, records.folder / "engine.log"))
    with open_log(records, config.num_rollout_steps) as log:
        if config.components == "mine":  # part of how the run was made
            shutil.copy(components.FILE, records.folder)
        try:
            run.train(log)
        finally:
            run.close()
        save_policy(policy, tokenizer, records.folder / "policy")
    return records.folder


class Run:
    """The moving parts of one run: policy, optimizer, engine, and the problems that fit the context."""

    def __init__(self, config: RunConfig, task: Task, policy, tokenizer, engine: RolloutEngine):
        self.config, self.policy, self.tokenizer = config, policy, tokenizer
        self.remark: Callable[[str], None] = print
        self.sampler = Sampler(engine, policy, tokenizer, config.temperature, lambda text: self.remark(text))
        self.next_batch: Callable[[], list[Rollout]] | None = None
        self.prompt = get_prompt(config.prompt)
        self.grader = Grader(self.prompt, task.verify)
        self.train_problems, self.too_long = self._that_fit(task.train)
        self.val_problems, val_too_long = self._that_fit(task.validation)
        self.too_long += val_too_long
        if len(self.train_problems) < config.prompts_per_step or not self.val_problems:
            raise ValueError(
                f"task: only {len(self.train_problems)} training and {len(self.val_problems)} validation problems of "
                f"{config.task!r} fit the context of {policy.config.max_position_embeddings} tokens with "
                f"max_tokens={config.max_tokens}"
            )
        self.optimizer = make_optimizer(policy, config)
        self.updates = Updates(config, policy, tokenizer, self.optimizer, self.grader)
        self.tally: dict[str, Any] = {"has_learned": False, "reward": None}

    def train(self, log: Log) -> None:
        self.remark = self.updates.remark = log.remark
        records, last = log.records, self.config.num_rollout_steps
        self.updates.keep = records.write_bad_batch
        first = self._begin() if records.checkpoint is None else self._go_on(records.take_checkpoint(), log)
        take_steps(
            log,
            range(first, last + 1),
            lambda step: self._whole_step(step, records),
            self.updates.stop_if_diverged,
            lambda step: self._checkpoint(step, records),
        )
        if skipped := self.updates.state["skipped"]:
            self.remark(f"{skipped} updates were skipped: their loss or gradient was not finite.")
        if not self.tally["has_learned"]:
            self.remark(
                f"In no group did the rewards differ (mean reward of the last step: {self.tally['reward']:.3f}), so "
                "every advantage was zero and no weight changed: the task is too hard or too easy for this model and "
                "prompt."
            )

    def _begin(self) -> int:
        """Returns the first step to be done."""
        if self.too_long:
            self.remark(f"{self.too_long} problems exceed the model's context and are left out.")
        for text in cautions(self.config, self.policy):
            self.remark(text)
        self.sampler.sync()
        return 0

    def _go_on(self, checkpoint: Checkpoint, log: Log) -> int:
        """As if the step of the checkpoint had just been done; returns the next one."""
        checkpoint.restore(self.policy, self.optimizer)
        self.tally, self.sampler.restarts = checkpoint.carried["tally"], checkpoint.carried["restarts"]
        self.updates.state |= checkpoint.carried.get("updates", {})  # older checkpoints have none
        if (ahead := checkpoint.ahead) is not None:
            self.next_batch = lambda: ahead
        self.sampler.sync()
        checkpoint.restore_randomness(self.policy.device)
        log.say_goes_on(checkpoint)
        return checkpoint.step + 1

    def _checkpoint(self, step: int, records: RunRecords) -> Checkpoint:
        carried = {"tally": self.tally, "updates": self.updates.state}
        carried |= {"restarts": self.sampler.restarts, "remarks": records.remarks}
        ahead = self.next_batch() if self.next_batch is not None else None  # it is there: step() has waited for it
        return Checkpoint.take(step, records.fingerprint, carried, self.policy, self.optimizer, ahead)

    def _whole_step(self, step: int, records: RunRecords) -> dict[str, Any]:
        """A step with all that is due after it; returns its metrics."""
        config, last = self.config, self.config.num_rollout_steps
        keep_rollouts, metrics = is_due(step, config.rollouts_every, last), {}
        if step > 0:
            metrics, rows = self.step(step)
            self.tally["has_learned"] |= metrics["grad_norm"] != 0
            self.tally["reward"] = metrics["reward"]
            if keep_rollouts:
                records.write_rollouts(step, "train", rows)
        if is_due(step, config.eval_every, last):
            val_metrics, rows = self.validate(step)
            metrics |= val_metrics
            if keep_rollouts:
                records.write_rollouts(step, "validation", rows)
        return metrics

    def close(self) -> None:
        self.sampler.close()

    def step(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One rollout batch and its updates.  Returns the step's metrics and its responses as rows."""
        config = self.config
        started = time.perf_counter()
        problems, rollouts = self._sample(step)
        seconds = time.perf_counter() - started
        samples = flatten(problems, rollouts)
        size = config.train_batch_size
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        # All of them before the first update: the policy that sampled is the old policy of every update.
        scores = [score_samples(self.policy, self.tokenizer, batch, config) for batch in batches]
        pairs = zip(batches, scores, strict=True)
        updates = [self.updates(step, number, *pair) for number, pair in enumerate(pairs, start=1)]
        seconds += self._wait_for_next_batch()
        trained = time.perf_counter()
        self.sampler.sync()
        synced = time.perf_counter()
        rewards, formats = (torch.cat([update.pop(name) for update in updates]) for name in components.PER_RESPONSE)
        given = zip(rewards.tolist(), formats.tolist(), strict=True)
        rows = rows_to_read(samples, self.grader)
        rows = [row | {"reward": r, "format_reward": f} for row, (r, f) in zip(rows, given, strict=True)]
        metrics = _means(updates) | reward_statistics(rewards.reshape(-1, config.group_size)) | mismatch(scores)
        metrics |= {
            "truncated_fraction": truncated_fraction(samples),
            "seconds_sampling": seconds,
            "seconds_training": trained - started - seconds,
            "seconds_syncing": synced - trained,
        }
        return metrics | reason_counts(rows), rows

    def _sample(self, step: int) -> tuple[list[Problem], list[Rollout]]:
        """The step's problems and rollouts.  With rollouts_ahead the next step's are then under way."""
        if not self.config.rollouts_ahead:
            result = self._problems(step), self.sampler.generate(*self._request(step))
            self.sampler.rest()
            return result
        rollouts = self.next_batch or self.sampler.begin(*self._request(step))
        result = self._problems(step), rollouts()
        is_last = step == self.config.num_rollout_steps
        self.next_batch = None if is_last else self.sampler.begin(*self._request(step + 1))
        return result

    def _problems(self, step: int) -> list[Problem]:
        return draw_batch(self.train_problems, step - 1, self.config.prompts_per_step, self.config.seed)

    def _request(self, step: int) -> tuple[list[str], Sampling]:
        return [self.prompt(problem.question) for problem in self._problems(step)], self._sampling("train", step)

    def _wait_for_next_batch(self) -> float:
        """Seconds until the batch that is under way is there: new weights must not change it half-way."""
        started = time.perf_counter()
        if self.next_batch is not None:
            finished = self.next_batch()
            self.next_batch = lambda: finished
        return time.perf_counter() - started

    def validate(self, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample each validation problem once, as in training."""
        sampling = self._sampling("validation", step, n=1)
        return evaluate(self.sampler, self.val_problems, self.grader, sampling)

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


def _means(updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each metric's mean over the updates that have a value, the most read ones under shorter names."""
    names = {"mean_reward": "reward", "mean_format_reward": "format_reward", "mean_response_length": "response_length"}
    means = {}
    for name in updates[0]:
        values = [update[name] for update in updates if update[name] is not None]
        means[names.get(name, name)] = fmean(values) if values else None
    return means
