"""What all contestants train: one policy, one task, one configuration."""

import copy
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.kernels.train_step import TokenIds
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Rollout, Sampling
from rlhelpers.tasks import Grader, Problem, Task, get_prompt, load_task
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.evaluation import flatten
from rlhelpers.training.loop import derive_seed, draw_batch
from rlhelpers.training.scores import token_ids

LARGEST_DIFFERENCE = 1e-4


def configuration(**settings: Any) -> RunConfig:
    """The default run on the CPU but for its estimator, Dr. GRPO, which is the same formula in TRL, and `settings`."""
    return make_config(experiment="bench", estimator="dr_grpo", device="cpu", **settings)


@dataclass(frozen=True)
class Batch:
    """The responses of one step, a group's side by side, one entry each in all four."""

    prompts: list[str]
    responses: list[str]
    ground_truths: list[str]
    token_ids: TokenIds

    @classmethod
    def of(cls, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> Self:
        samples = flatten(problems, rollouts)
        return cls(
            [rollout.prompt for _, rollout, _ in samples],
            [completion.text for _, _, completion in samples],
            [problem.answer for problem, _, _ in samples],
            token_ids(samples),
        )

    @property
    def response_tokens(self) -> int:
        return sum(len(response) for _, response in self.token_ids)


@dataclass(frozen=True)
class Case:
    """`policy` is never trained: contestants take copies of it."""

    config: RunConfig
    task: Task
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    grader: Grader

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        task = load_task(config.task, config.n_train_examples, config.n_val_examples)
        policy, tokenizer = load_policy(config.model, config.device)
        return cls(config, task, policy, tokenizer, Grader(get_prompt(config.prompt), task.verify))

    def problems(self, number: int) -> list[Problem]:
        """Those of the run's step 1, 2, ..."""
        return draw_batch(self.task.train, number - 1, self.config.prompts_per_step, self.config.seed)

    def prompts(self, number: int) -> list[str]:
        return [self.grader.prompt(problem.question) for problem in self.problems(number)]

    def sampling(self, number: int) -> Sampling:
        seed = derive_seed(self.config.seed, "train", number)
        return Sampling(
            n=self.config.group_size, max_tokens=self.config.max_tokens, stop=self.grader.prompt.stop, seed=seed
        )

    def rewards(self, batch: Batch) -> Tensor:
        pairs = zip(batch.responses, batch.ground_truths, strict=True)
        return torch.tensor([self.grader(response, truth)["reward"] for response, truth in pairs])

    def model(self) -> PreTrainedModel:
        return copy.deepcopy(self.policy)

    def optimizer(self, model: PreTrainedModel) -> torch.optim.Optimizer:
        """The run's, with another eps.  AdamW's first step moves a weight by the learning rate in the direction of its
        gradient, however small that is; with the usual eps=1e-8 the rounding of gradients would show in the update."""
        config = self.config
        return torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, eps=1e-6
        )

    def update(self, model: PreTrainedModel) -> Tensor:
        """What training added to the policy's weights: (parameters,)."""
        pairs = zip(model.parameters(), self.policy.parameters(), strict=True)
        return torch.cat([(new - old).detach().flatten() for new, old in pairs])


def installed(contestants: Iterable[str]) -> list[str]:
    """Without "TRL" where that is not installed."""
    return [name for name in contestants if name != "TRL" or importlib.util.find_spec("trl")]


def difference(update: Tensor, expected: Tensor) -> float:
    """|update - expected| / |expected|, in the Euclidean norm over all parameters.  Infinite where nothing was
    expected: two that do nothing would agree."""
    return ((update - expected).norm() / expected.norm()).item() if expected.any() else float("inf")


def refuse_unless_equal(found: float, name: str) -> None:
    """Raises ValueError naming the contestant whose update differs by more than LARGEST_DIFFERENCE."""
    if not found <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"step: no speeds, for {name}'s update of the weights differs from the textbook's by {found:.3g} of its "
            f"norm; accepted is up to {LARGEST_DIFFERENCE}"
        )
