"""What SFT and DPO share: a run that learns from a file of texts, not from rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlhelpers.kernels.tokens import beginning
from rlhelpers.kernels.train_step import clip_and_step
from rlhelpers.models import eval_mode, save_policy
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.rollouts.engine import encode_prompts
from rlhelpers.tasks import Grader, Prompt, load_task
from rlhelpers.tasks.datasets import files_of_pairs
from rlhelpers.tasks.prompts import ALPACA
from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.console import is_due, open_log, take_steps
from rlhelpers.training.draws import derive_seed
from rlhelpers.training.evaluation import evaluate
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.settings import Count, Name, RunSettings
from rlhelpers.training.updates import MAX_SKIPPED, diverged

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")


class OfflineConfig(RunSettings):
    """What every such run has.  Relative paths are relative to the working directory; what counts in a fingerprint is
    what the files hold, not where they lie."""

    NAMED_FIRST: ClassVar[tuple[str, ...]] = (
        *("model", "gradient_checkpointing", "task", "n_val_examples", "max_tokens", "epochs", "batch_size"),
    )

    method: str
    experiment: Name = "08_supplement"
    n_val_examples: Count = 256
    epochs: Count = 1
    batch_size: Count
    checkpoint_every: Count = 10

    def rules(self) -> list[tuple[str, bool, str]]:
        steps, size = self.gradient_accumulation_steps, self.batch_size
        return [("gradient_accumulation_steps", size % steps == 0, f"a divisor of batch_size={size}")]

    def files(self) -> Iterator[Path]:
        yield from super().files()
        for path in self.affecting("content").values():
            yield from (file for file in files_of_pairs(path) if file.is_file())

    def microbatches(self, rows: Sequence[T]) -> list[Sequence[T]]:
        size = self.batch_size // self.gradient_accumulation_steps
        return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass
class OfflineRun:
    """A run.  `update(step)`, from 1, moves the weights once; `update` and `validate` return metrics.

    best_by: the validation metric by whose highest value the policy is kept in the folder `best` too.
    """

    records: RunRecords
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    steps: int
    update: Callable[[int], dict[str, Any]]
    validate: Callable[[], dict[str, Any]]
    best_by: str | None = None
    remarks: Sequence[str] = ()

    def train(self) -> Path:
        """Do every step with all that is due after it; return the run's folder, with the policy in it.

        An update whose loss or gradient is not finite is skipped; MAX_SKIPPED in a row raise DivergedError.
        """
        self.carried: dict[str, Any] = {"best": None, "skipped_in_a_row": 0}
        self.answer_problems = _problems_to_answer(self.records.config, self.policy, self.tokenizer)
        with open_log(self.records, self.steps, self.remarks) as log:
            steps = range(self._begin(), self.steps + 1)
            take_steps(log, steps, self._step, self._stop_if_diverged, self._checkpoint)
            save_policy(self.policy, self.tokenizer, self.records.folder / "policy")
        return self.records.folder

    def _begin(self) -> int:
        """Return the first step to be done."""
        if self.records.checkpoint is None:
            return 0
        checkpoint = self.records.pop_checkpoint()
        checkpoint.restore(self.policy, self.optimizer)
        checkpoint.restore_randomness(self.policy.device)
        self.carried = {name: checkpoint.carried[name] for name in self.carried}
        return checkpoint.step + 1

    def _step(self, number: int) -> dict[str, Any]:
        metrics = self.update(number) if number > 0 else {}
        self.carried["skipped_in_a_row"] = self.carried["skipped_in_a_row"] + 1 if metrics.get("skipped_update") else 0
        if is_due(number, self.records.config.eval_every, self.steps):
            metrics |= self.validate() | self.answer_problems(number)
            if number > 0 and self.best_by is not None:
                self._keep_if_best(metrics[self.best_by])
        return metrics

    def _keep_if_best(self, value: float) -> None:
        if self.carried["best"] is None or value > self.carried["best"]:
            self.carried["best"] = value
            save_policy(self.policy, self.tokenizer, self.records.folder / "best")

    def _stop_if_diverged(self) -> None:
        if self.carried["skipped_in_a_row"] >= MAX_SKIPPED:
            raise diverged(self.carried["skipped_in_a_row"])

    def _checkpoint(self, number: int) -> Checkpoint:
        kept = self.carried | {"remarks": self.records.remarks}
        return Checkpoint.take(number, self.records.fingerprint, kept, self.policy, self.optimizer, None)


def descend(
    policy: PreTrainedModel, optimizer: Optimizer, losses: Iterator[Tensor], max_grad_norm: float
) -> dict[str, float]:
    """Do one update, without dropout.  The losses are computed one by one and add up to the batch's.  Returns `loss`
    and the metrics of clip_and_step."""
    policy.zero_grad(set_to_none=True)
    total = torch.zeros(())
    with eval_mode(policy):
        for loss in losses:
            loss.backward()
            total += loss.detach().cpu()
    return {"loss": total.item()} | clip_and_step(policy, optimizer, total, max_grad_norm)


def alpaca_prompt(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return Alpaca's template, after BOS where the tokenizer begins every text with it: the prompts that a model
    answers which was tuned on such documents."""
    return replace(ALPACA, template=beginning(tokenizer) + ALPACA.template)


def _problems_to_answer(
    config: OfflineConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[[int], dict[str, Any]]:
    """Return a function (step -> metrics) that has the policy answer the task's validation problems and grades the last
    number of each answer: sampled once, as RL runs validate, and greedily, as the supplement evaluates."""
    if config.task == "none":
        return lambda step: {}
    problems = load_task(config.task, 1, config.n_val_examples)
    engine, grader = TorchEngine(policy, tokenizer), Grader(alpaca_prompt(tokenizer), problems.verify)
    prompts = [grader.prompt(problem.question) for problem in problems.validation]
    encode_prompts(tokenizer, prompts, config.max_tokens, policy.config.max_position_embeddings)  # or ValueError

    def answers(temperature: float, step: int) -> dict[str, Any]:
        seed = derive_seed(config.seed, "validation", step)
        sampling = Sampling(temperature=temperature, max_tokens=config.max_tokens, seed=seed)
        return evaluate(engine, problems.validation, grader, sampling)[0]

    def answer(step: int) -> dict[str, Any]:
        engine.sync_weights(policy)
        return answers(1.0, step) | {"val_greedy_reward": answers(0.0, step)["val_reward"]}

    return answer
