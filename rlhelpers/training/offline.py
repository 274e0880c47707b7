"""Runs that learn from a file of texts, not from rollouts: what tuning on instructions and on preferences share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from rlhelpers.checks import check_one_of
from rlhelpers.kernels.tokens import beginning
from rlhelpers.kernels.update import clip_and_step
from rlhelpers.models import eval_mode, save_policy
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.rollouts.engine import encode_prompts
from rlhelpers.tasks import Grader, Prompt, load_task
from rlhelpers.tasks.prompts import ALPACA
from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.console import Log, is_due, open_log, take_steps
from rlhelpers.training.draws import derive_seed
from rlhelpers.training.evaluation import evaluate
from rlhelpers.training.fingerprint import files_of, fingerprint_of
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.settings import Count, Device, Name, Real, Seed, Switch, Text, checked, describe
from rlhelpers.training.updates import MAX_SKIPPED, diverged

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class OfflineConfig(BaseModel):
    """What every such run has.  Relative paths are relative to the working directory; what counts in a fingerprint is
    what the files hold, not where they lie."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    PATHS: ClassVar[tuple[str, ...]] = ()
    """The settings that name files to learn from."""

    method: str
    experiment: Name = Field("08_supplement", description="first folder under data/runs")
    variant: Name | None = Field(None, description="second folder; None: the method and what differs from the preset")
    seed: Seed = 0
    model: Text = Field("tiny", description='"tiny", a Hugging Face name, or a directory')
    device: Device = Field("auto", description="auto: cuda where there is one")
    gradient_checkpointing: Switch = False

    task: Text = Field("tiny", description='whose validation problems are answered; "none": none')
    n_val_examples: Count = 256
    max_tokens: Count = Field(64, description="longest answer to a validation problem")

    epochs: Count = 1
    batch_size: Count
    gradient_accumulation_steps: Count
    learning_rate: Real = Field(gt=0, le=1)
    max_grad_norm: Real = Field(1.0, gt=0, allow_inf_nan=True)

    eval_every: Count
    checkpoint_every: Count = 10
    resume: Switch = Field(False, description="go on with an unfinished run of this configuration")
    tracker: Literal["wandb", "trackio"] | None = None

    @model_validator(mode="after")
    def _microbatches_are_even(self) -> Self:
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps: got {self.gradient_accumulation_steps}; it must be a divisor of "
                f"batch_size={self.batch_size}"
            )
        return self

    @property
    def files(self) -> list[Path]:
        """That it learns from."""
        return [Path(getattr(self, name)) for name in self.PATHS]

    @property
    def fingerprint(self) -> str:
        """The same for the same numbers; see training/fingerprint."""
        settings = self.model_dump(mode="json", exclude=set(self.PATHS))
        given = [file for file in self.files if file.is_file()]
        return fingerprint_of(settings, [*files_of(self.model, self.task), *given])


Kind = TypeVar("Kind", bound=OfflineConfig)


def make_offline_config(
    kind: type[Kind], presets: dict[str, dict[str, Any]], preset: str, settings: dict[str, Any]
) -> Kind:
    """A checked configuration: the preset, then the settings that are not None.  Raises ValueError, a line for each
    wrong setting."""
    check_one_of(presets, preset=preset)
    given = {name: value for name, value in settings.items() if value is not None}
    config = checked(kind, presets[preset] | given, ["preset"])
    if config.variant is None:
        files = {name: getattr(config, name) for name in kind.PATHS}
        first = [config.method, *([preset] if preset != "tiny" else [])]
        name = describe(config, kind(**presets[preset] | files), first, set(kind.PATHS))
        config = config.model_copy(update={"variant": name})
    return config


@dataclass(frozen=True)
class Lesson:
    """What a run does.  `update(step)`, from 1, moves the weights once; both functions return metrics.  `best_by`: the
    validation metric by whose highest value the policy is kept in the folder `best` too."""

    steps: int
    optimizer: Optimizer
    update: Callable[[int], dict[str, Any]]
    validate: Callable[[], dict[str, Any]]
    best_by: str | None = None
    remarks: Sequence[str] = ()


def learn(records: RunRecords, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> Path:
    """Every step of the lesson with all that is due after it; returns the run's folder, with the policy in it.  An
    update whose loss or gradient is not finite is skipped; MAX_SKIPPED in a row raise DivergedError."""
    run = _Run(records, policy, tokenizer, lesson)
    with open_log(records, lesson.steps) as log:
        steps = range(run.begin(log), lesson.steps + 1)
        take_steps(log, steps, run.step, run.stop_if_diverged, run.take_checkpoint)
        save_policy(policy, tokenizer, records.folder / "policy")
    return records.folder


class _Run:
    """A lesson under way."""

    def __init__(self, records: RunRecords, policy, tokenizer, lesson: Lesson):
        self.records, self.policy, self.tokenizer, self.lesson = records, policy, tokenizer, lesson
        self.carried: dict[str, Any] = {"best": None, "skipped_in_a_row": 0}
        self.examine = _examination(records.config, policy, tokenizer)

    def begin(self, log: Log) -> int:
        """Returns the first step to be done."""
        if self.records.checkpoint is None:
            for text in self.lesson.remarks:
                log.remark(text)
            return 0
        checkpoint = self.records.take_checkpoint()
        checkpoint.restore(self.policy, self.lesson.optimizer)
        checkpoint.restore_randomness(self.policy.device)
        self.carried = {name: checkpoint.carried[name] for name in self.carried}
        log.say_goes_on(checkpoint)
        return checkpoint.step + 1

    def step(self, number: int) -> dict[str, Any]:
        metrics = self.lesson.update(number) if number > 0 else {}
        self.carried["skipped_in_a_row"] = self.carried["skipped_in_a_row"] + 1 if metrics.get("skipped_update") else 0
        if is_due(number, self.records.config.eval_every, self.lesson.steps):
            metrics |= self.lesson.validate() | self.examine(number)
            if number > 0 and self.lesson.best_by is not None:
                self._keep_if_best(metrics[self.lesson.best_by])
        return metrics

    def _keep_if_best(self, value: float) -> None:
        if self.carried["best"] is None or value > self.carried["best"]:
            self.carried["best"] = value
            save_policy(self.policy, self.tokenizer, self.records.folder / "best")

    def stop_if_diverged(self) -> None:
        if self.carried["skipped_in_a_row"] >= MAX_SKIPPED:
            raise diverged(self.carried["skipped_in_a_row"])

    def take_checkpoint(self, number: int) -> Checkpoint:
        kept = self.carried | {"remarks": self.records.remarks}
        return Checkpoint.take(number, self.records.fingerprint, kept, self.policy, self.lesson.optimizer, None)


def descend(
    policy: PreTrainedModel, optimizer: Optimizer, parts: Iterable[Callable[[], Tensor]], max_grad_norm: float
) -> dict[str, float]:
    """One update: the losses that `parts` compute add up to the batch's.  Dropout is off, as everywhere.  Returns
    `loss`, and the metrics of clip_and_step."""
    policy.zero_grad(set_to_none=True)
    total = torch.zeros(())
    with eval_mode(policy):
        for part in parts:
            loss = part()
            loss.backward()
            total += loss.detach().cpu()
    return {"loss": total.item()} | clip_and_step(policy, optimizer, total, max_grad_norm)


def alpaca_prompt(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The template of Alpaca after the token with which this tokenizer begins every text, if it does: a model that is
    tuned on such documents answers to such prompts."""
    return replace(ALPACA, template=beginning(tokenizer) + ALPACA.template)


def _examination(
    config: OfflineConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Callable[[int], dict[str, Any]]:
    """Has the policy answer the task's validation problems, and takes the last number of each answer: sampled once, as
    RL runs validate, and greedily, as the supplement evaluates."""
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

    def examine(step: int) -> dict[str, Any]:
        engine.sync_weights(policy)
        return answers(1.0, step) | {"val_greedy_reward": answers(0.0, step)["val_reward"]}

    return examine
