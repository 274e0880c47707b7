"""The loop: sample, grade, score, update, sync; validate, keep rollouts and save checkpoints now and then.

Begin reading at `Run.step`."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.optim import Optimizer

from rlhelpers.checks import check_kind
from rlhelpers.kernels.advantages import reward_statistics
from rlhelpers.kernels.tokens import encode
from rlhelpers.models import choose_device, load_policy, make_optimizer, save_policy
from rlhelpers.rollouts import RolloutEngine, Sampling
from rlhelpers.tasks import Grader, Problem, Task, get_prompt, load_task
from rlhelpers.tasks.grading import Grade
from rlhelpers.training import own_step
from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.config import RunConfig
from rlhelpers.training.console import Log, is_due, open_log, take_steps
from rlhelpers.training.draws import derive_seed, draw_batch
from rlhelpers.training.evaluation import (
    Sample,
    evaluate,
    flatten,
    grade_all,
    reason_counts,
    rows_to_read,
    truncated_fraction,
)
from rlhelpers.training.preflight import cautions
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.sampler import RolloutStream, Sampler, check_engine, make_engine
from rlhelpers.training.updates import Batch, TrainStep, Updates, cut, keep_failed, mismatch, score


def train(config: RunConfig) -> Path:
    """Train as the configuration says; return the run's folder.

    Raises ValueError naming the setting before the folder is made.  If anything fails later, the folder keeps all
    complete steps and says "failed"; ended by SIGTERM, it says "killed".  A disk that is full is a NotWrittenError,
    which names the file.  Updates whose loss or gradient is not finite are skipped; see training/updates for how many.

    With `resume`, a run of the same configuration that was killed or failed goes on from its last checkpoint, with the
    batches, samples and random numbers that it would have had; a complete run is left as it is.  On the CPU with the
    engine torch, metrics (but for seconds) and weights are then those of a run in one piece, bit for bit, if code,
    versions and number of threads are the same; vLLM and CUDA do not repeat their own sums so exactly.
    """
    check_kind(RunConfig, "a RunConfig, as make_config gives it", config=config)
    records = RunRecords(config)
    if records.says_complete():
        return records.folder
    check_engine(config, torch.device(choose_device(config.device)))  # before what may take minutes to fetch
    task = load_task(config.task, config.n_train_examples, config.n_val_examples)
    policy, tokenizer = load_policy(config.model, config.device, config.gradient_checkpointing)
    task, left_out = problems_that_fit(config, task, tokenizer, policy.config.max_position_embeddings)
    remarks = [f"{left_out} problems exceed the model's context and are left out."] if left_out else []
    remarks += cautions(config, policy)
    readers_step = own_step.load_train_step(config.components, config.estimator.engine_ratio_cap is not None)
    engine = make_engine(config, policy, tokenizer, records.folder / "engine.log")
    with open_log(records, config.num_rollout_steps, remarks) as log:
        if config.components == "mine":  # part of how the run was made
            shutil.copy(own_step.FILE, records.folder)
        optimizer = make_optimizer(policy, config)
        grader = Grader(get_prompt(config.prompt), task.verify)
        run = Run(config, task, grader, policy, tokenizer, engine, optimizer, log, readers_step)
        try:
            run.train()
        finally:
            run.sampler.close()
        save_policy(policy, tokenizer, records.folder / "policy")
    return records.folder


def problems_that_fit(config: RunConfig, task: Task, tokenizer, context: int) -> tuple[Task, int]:
    """The task with the problems whose prompt leaves room for max_tokens in the context, and how many do not.  Raises
    ValueError where too few are left."""
    prompt, room = get_prompt(config.prompt), context - config.max_tokens

    def fit(problems: Sequence[Problem]) -> list[Problem]:
        return [problem for problem in problems if len(encode(tokenizer, prompt(problem.question))) <= room]

    fitting = replace(task, train=fit(task.train), validation=fit(task.validation))
    if len(fitting.train) < config.prompts_per_step or not fitting.validation:
        raise ValueError(
            f"task: only {len(fitting.train)} training and {len(fitting.validation)} validation problems of "
            f"{config.task!r} fit the context of {context} tokens with max_tokens={config.max_tokens}"
        )
    return fitting, len(task.train) + len(task.validation) - len(fitting.train) - len(fitting.validation)


class Run:
    """One run: the policy learns the task's problems from what the engine samples.

    `step` is one rollout batch and its updates; `train` takes all steps, and does what is due between them.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        grader: Grader,
        policy,
        tokenizer,
        engine: RolloutEngine,
        optimizer: Optimizer,
        log: Log,
        readers_step: TrainStep | None = None,
    ):
        self.config, self.task, self.grader = config, task, grader
        self.policy, self.tokenizer, self.optimizer, self.log = policy, tokenizer, optimizer, log
        # The policy before its first step, which a KL penalty keeps the policy close to.
        self.reference = copy.deepcopy(policy).requires_grad_(False) if config.estimator.kl_coefficient else None
        self.sampler = Sampler(engine, policy, tokenizer, config.temperature, log.remark)
        self.rollouts = RolloutStream(self.sampler, self.request, config.num_rollout_steps, config.rollouts_ahead)
        self.update = Updates(config, policy, tokenizer, optimizer, grader, readers_step, log)
        self.tally: dict[str, Any] = {"has_learned": False, "reward": None}
        self.seconds: dict[str, float] = {}

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Step `number`, from 1: one rollout batch and its updates.  Return its metrics, and its responses as rows."""
        self.seconds = dict.fromkeys(("seconds_sampling", "seconds_training", "seconds_syncing"), 0.0)
        with self.timed("sampling"):
            samples = flatten(self.problems(number), self.rollouts.take(number))
        with self.timed("training"):
            grades = self.grade(number, samples)  # each response once
            batches = cut(samples, grades, self.config, self.tokenizer)
            batches = [self.score(batch) for batch in batches]  # under pi_0: all of them before the first update
            updates = [self.update(number, i, batch) for i, batch in enumerate(batches, start=1)]
        with self.timed("sampling"):
            self.rollouts.settle()
        with self.timed("syncing"):
            self.sampler.sync()
        rows = rows_of(batches)
        return step_metrics(batches, updates) | reason_counts(rows) | self.seconds, rows

    def problems(self, number: int) -> list[Problem]:
        return draw_batch(self.task.train, number - 1, self.config.prompts_per_step, self.config.seed)

    def request(self, number: int) -> tuple[list[str], Sampling]:
        """What the engine is asked for in a step: the prompts, and how to sample."""
        prompts = [self.grader.prompt(problem.question) for problem in self.problems(number)]
        return prompts, self.sampling("train", number, self.config.group_size)

    def sampling(self, purpose: str, number: int, n: int) -> Sampling:
        config = self.config
        return Sampling(
            n=n,
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
            min_tokens=config.min_tokens,
            stop=self.grader.prompt.stop,
            seed=derive_seed(config.seed, purpose, number),
        )

    def grade(self, number: int, samples: Sequence[Sample]) -> list[Grade]:
        """The reward is computed here, by the grader and nowhere else."""
        try:
            return grade_all(self.grader, samples)
        except ValueError:
            keep_failed(self.log, number, "grading", f"The grading of step {number} failed", samples)
            raise

    def score(self, batch: Batch) -> Batch:
        return score(self.policy, batch, self.config, self.reference)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of wall clock inside to those of this part of the step."""
        started = time.perf_counter()
        yield
        self.seconds[f"seconds_{part}"] += time.perf_counter() - started

    # --- all steps, and what is due between them ---------------------------------------------------------------------

    def train(self) -> None:
        """Take all steps that are not done yet."""
        steps = range(self.begin(), self.config.num_rollout_steps + 1)
        take_steps(self.log, steps, self.whole_step, self.update.stop_if_diverged, self.checkpoint)
        if skipped := self.update.state["skipped"]:
            self.log.remark(f"{skipped} updates were skipped: their loss or gradient was not finite.")
        if not self.tally["has_learned"]:
            self.log.remark(
                f"In no group did the rewards differ (mean reward of the last step: {self.tally['reward']:.3f}), so "
                "every advantage was zero and no weight changed: the task is too hard or too easy for this model and "
                "prompt."
            )

    def begin(self) -> int:
        """Be as if the step of the checkpoint, where there is one, had just been done.  Return the next step."""
        if self.log.records.checkpoint is None:
            self.sampler.sync()
            return 0
        checkpoint = self.log.records.pop_checkpoint()
        checkpoint.restore(self.policy, self.optimizer)
        self.tally, self.sampler.restarts = checkpoint.carried["tally"], checkpoint.carried["restarts"]
        self.update.state |= checkpoint.carried.get("updates", {})  # older checkpoints have none
        self.rollouts.put_back(checkpoint.ahead)
        self.sampler.sync()
        checkpoint.restore_randomness(self.policy.device)
        return checkpoint.step + 1

    def checkpoint(self, number: int) -> Checkpoint:
        records = self.log.records
        carried = {"tally": self.tally, "updates": self.update.state}
        carried |= {"restarts": self.sampler.restarts, "remarks": records.remarks}
        ahead = self.rollouts.finished
        return Checkpoint.take(number, records.fingerprint, carried, self.policy, self.optimizer, ahead)

    def whole_step(self, number: int) -> dict[str, Any]:
        """A step with the validation that is due after it; step 0 has nothing else.  Return its metrics."""
        config, records, metrics = self.config, self.log.records, {}
        keeps_rollouts = is_due(number, config.rollouts_every, config.num_rollout_steps)
        if number > 0:
            metrics, rows = self.step(number)
            self.tally["has_learned"] |= metrics["grad_norm"] != 0
            self.tally["reward"] = metrics["reward"]
            if keeps_rollouts:
                records.write_rollouts(number, "train", rows)
        if is_due(number, config.eval_every, config.num_rollout_steps):
            sampling = self.sampling("validation", number, 1)  # each problem once, as in training
            val_metrics, rows = evaluate(self.sampler, self.task.validation, self.grader, sampling)
            metrics |= val_metrics
            if keeps_rollouts:
                records.write_rollouts(number, "validation", rows)
        return metrics


def step_metrics(batches: Sequence[Batch], updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each metric's mean over the updates that have a value, the most read ones under shorter names, and what is
    measured over the whole rollout batch."""
    names = {"mean_reward": "reward", "mean_format_reward": "format_reward", "mean_response_length": "response_length"}
    means = {}
    for name in updates[0]:
        values = [update[name] for update in updates if update[name] is not None]
        means[names.get(name, name)] = fmean(values) if values else None
    rewards = torch.cat([batch.rewards for batch in batches]).reshape(-1, batches[0].tensors.group_size)
    truncated = truncated_fraction([sample for batch in batches for sample in batch.samples])
    return means | reward_statistics(rewards) | mismatch(batches) | {"truncated_fraction": truncated}


def rows_of(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Responses as rows for people, with the rewards that were paid."""
    pairs = (zip(rows_to_read(batch.samples, batch.grades), batch.paid, strict=True) for batch in batches)
    return [row | paid for of_batch in pairs for row, paid in of_batch]
