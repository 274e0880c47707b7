"""What all contestants train: one policy, one task, one configuration; and the package's own step."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.kernels.estimators import ESTIMATORS
from rlhelpers.kernels.microbatches import make_batch
from rlhelpers.kernels.tokens import padding_id
from rlhelpers.kernels.train_step import TokenIds, policy_gradient_step
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Rollout, Sampling
from rlhelpers.tasks import Grader, Problem, Task, get_prompt, load_task
from rlhelpers.training.config import RunConfig, make_config
from rlhelpers.training.draws import derive_seed, draw_batch
from rlhelpers.training.evaluation import flatten
from rlhelpers.training.updates import token_ids

LARGEST_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Rows:
    """What one step of Dr. GRPO is made from: groups of responses side by side, with a reward each.  `constant`: what
    the sum over all response tokens is divided by."""

    token_ids: TokenIds
    rewards: list[float]
    group_size: int
    constant: float

    @property
    def tokens(self) -> int:
        """Of all rows, prompts and responses."""
        return sum(len(prompt) + len(response) for prompt, response in self.token_ids)

    def has_signal(self, row: int) -> bool:
        """Whether any response of its group earned something."""
        first = row - row % self.group_size
        return any(self.rewards[first : first + self.group_size])


Step = Callable[..., tuple[Tensor, dict[str, Any]]]
"""(model, pad_id, optimizer, rows, microbatch_size, max_grad_norm) -> loss and metadata, `grad_norm` among them."""


def package_step(
    model: PreTrainedModel, pad_id: int, optimizer: Optimizer, rows: Rows, size: int, max_grad_norm: float | None
) -> tuple[Tensor, dict[str, Any]]:
    """Take one step of Dr. GRPO (arXiv:2503.20783) by the package, in microbatches of `size` rows."""
    batch = make_batch(rows.token_ids, torch.tensor(rows.rewards), rows.group_size, pad_id)
    return policy_gradient_step(
        model,
        optimizer,
        batch,
        ESTIMATORS["dr_grpo"],
        gradient_accumulation_steps=len(batch) // size,
        max_grad_norm=max_grad_norm,
        normalization_constant=rows.constant,
    )


def make_up_rows(vocabulary: int, groups: int, group_size: int, prompt, response, without_signal: int = 0) -> Rows:
    """Return rows of random tokens, always the same: how long a step takes does not depend on what they say.

    `prompt`, `response`: shortest and longest length in tokens, between which lengths are drawn.  Rewards alternate
    between 1 and 0; the last `without_signal` groups earn nothing.
    """
    rng = random.Random(0)

    def draw(shortest: int, longest: int) -> list[int]:
        return rng.choices(range(vocabulary), k=rng.randint(shortest, longest))

    prompts = [draw(*prompt) for _ in range(groups)]
    rows = [(ids, draw(*response)) for ids in prompts for _ in range(group_size)]
    paid = (groups - without_signal) * group_size
    rewards = [float(i % 2 == 0 and i < paid) for i in range(len(rows))]
    return Rows(rows, rewards, group_size, float(sum(len(response) for _, response in rows)))


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


def configuration(**settings: Any) -> RunConfig:
    """Return the default run's on the CPU, but for `settings` and the estimator: Dr. GRPO is the same formula in
    TRL."""
    return make_config(experiment="bench", estimator="dr_grpo", device="cpu", **settings)


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
        """Return those of the run's step 1, 2, ..."""
        return draw_batch(self.task.train, number - 1, self.config.prompts_per_step, self.config.seed)

    def prompts(self, number: int) -> list[str]:
        return [self.grader.prompt(problem.question) for problem in self.problems(number)]

    def sampling(self, number: int) -> Sampling:
        config, seed = self.config, derive_seed(self.config.seed, "train", number)
        return Sampling(n=config.group_size, max_tokens=config.max_tokens, stop=self.grader.prompt.stop, seed=seed)

    def rewards(self, batch: Batch) -> list[float]:
        pairs = zip(batch.responses, batch.ground_truths, strict=True)
        return [self.grader(response, truth)["reward"] for response, truth in pairs]

    def train(self, step: Step, model: PreTrainedModel, optimizer: Optimizer, batch: Batch) -> None:
        """Grade the batch and take a step on it."""
        config = self.config
        rows = Rows(batch.token_ids, self.rewards(batch), config.group_size, config.normalization_constant)
        step(model, padding_id(self.tokenizer), optimizer, rows, config.microbatch_size, config.max_grad_norm)

    def model(self) -> PreTrainedModel:
        return copy.deepcopy(self.policy)

    def optimizer(self, model: PreTrainedModel) -> Optimizer:
        """Return the run's, with another eps.  AdamW's first step moves a weight by the learning rate in the direction
        of its gradient, however small that is: with the usual eps=1e-8 the rounding of gradients would show."""
        config = self.config
        return torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, eps=1e-6
        )

    def update(self, model: PreTrainedModel) -> list[Tensor]:
        """Return what training added to each of the policy's weights."""
        pairs = zip(model.parameters(), self.policy.parameters(), strict=True)
        return [(new - old).detach() for new, old in pairs]


def difference(update: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return |update - expected| / |expected|, in the Euclidean norm over all parameters; infinite where nothing was
    expected, for two that do nothing would agree."""
    pairs = zip(update, expected, strict=True)
    off = torch.stack([torch.linalg.vector_norm(u - e, dtype=torch.float32) for u, e in pairs]).norm()
    size = torch.stack([torch.linalg.vector_norm(e, dtype=torch.float32) for e in expected]).norm()
    return (off / size).item() if size else float("inf")


def refuse_unless_equal(found: float, name: str) -> None:
    """Raise ValueError naming the contestant whose update differs by more than LARGEST_DIFFERENCE."""
    if not found <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"step: no speeds, for {name}'s update of the weights differs from the textbook's by {found:.3g} of its "
            f"norm; accepted is up to {LARGEST_DIFFERENCE}"
        )
