"""Batches of made-up token ids: how long a training step takes does not depend on what the tokens say."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.estimators import Baseline
from rlhelpers.kernels.train_step import TokenIds

ONLY_PADDING = SimpleNamespace(pad_token_id=0, eos_token_id=None)  # all that the step asks of a tokenizer here


@dataclass(frozen=True)
class MadeUpBatch:
    """Groups of responses side by side, with a reward for each response."""

    token_ids: TokenIds
    rewards: list[float]
    group_size: int

    @property
    def tokens(self) -> int:
        """Of all rows, prompts and responses."""
        return sum(len(prompt) + len(response) for prompt, response in self.token_ids)

    def has_signal(self, row: int) -> bool:
        """Whether any response of its group earned something."""
        first = row - row % self.group_size
        return any(self.rewards[first : first + self.group_size])


def make_batch(
    vocabulary: int,
    groups: int,
    group_size: int,
    prompt_tokens: tuple[int, int],
    response_tokens: tuple[int, int],
    without_signal: int = 0,
) -> MadeUpBatch:
    """Always the same.  Lengths are drawn between the two given, both included.  Rewards alternate between 1 and 0; the
    last `without_signal` groups earn nothing."""
    rng = random.Random(0)

    def draw(shortest: int, longest: int) -> list[int]:
        return rng.choices(range(vocabulary), k=rng.randint(shortest, longest))

    prompts = [draw(*prompt_tokens) for _ in range(groups)]
    rows = [(prompt, draw(*response_tokens)) for prompt in prompts for _ in range(group_size)]
    paid = (groups - without_signal) * group_size
    return MadeUpBatch(rows, [float(i % 2 == 0 and i < paid) for i in range(len(rows))], group_size)


def train(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batch: MadeUpBatch,
    microbatch_size: int,
    baseline: str | Baseline = "mean",
) -> tuple[Tensor, dict[str, Tensor | float | None]]:
    """One step of Dr. GRPO (arXiv:2503.20783) on the batch, without clipping; what `grpo_train_step` returns."""
    count = len(batch.rewards)
    return grpo_train_step(
        model,
        ONLY_PADDING,
        optimizer,
        count // microbatch_size,
        None,
        lambda response, _: {"reward": float(response), "format_reward": 1.0},
        [""] * count,
        [str(reward) for reward in batch.rewards],
        [""] * count,
        batch.group_size,
        baseline=baseline,
        advantage_normalizer="none",
        loss_normalization="constant",
        normalization_constant=float(sum(len(response) for _, response in batch.token_ids)),
        rollout_token_ids=batch.token_ids,
    )
