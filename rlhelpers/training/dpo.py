"""Direct preference optimisation (supplement, problems `dpo_loss` and `dpo_training`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rlhelpers.checks import check_one_of, check_whole
from rlhelpers.kernels.dpo import compute_dpo_losses, end_id, implicit_reward_accuracy
from rlhelpers.kernels.tokens import encode
from rlhelpers.models import load_policy
from rlhelpers.tasks.datasets import PreferencePair, load_pairs
from rlhelpers.training.draws import draw_batch
from rlhelpers.training.offline import OfflineConfig, OfflineRun, alpaca_prompt, descend
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.settings import Count, LearningRate, Real, Text, make_settings, setting

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Pairs = Sequence[PreferencePair]


class DPOConfig(OfflineConfig):
    """The defaults are the supplement's; beta, epochs and learning rate are for the tiny model.  A batch has
    `batch_size` pairs."""

    method: Literal["dpo"] = "dpo"
    pairs: Text = setting(
        ..., "content", named=False, description="a file of pairs, or a folder with the four files of Anthropic's HH"
    )
    # Where the reference is; None: where the policy is.
    reference_device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d+)?)$")
    beta: Real = Field(1.0, gt=0)  # how dear it is to leave the reference
    n_val_pairs: Count = 200
    batch_size: Count = 64
    gradient_accumulation_steps: Count = 2
    epochs: Count = 2
    learning_rate: LearningRate = 1e-5
    eval_every: Count = 6


# Of the supplement, which goes on from its tuned model of 8B parameters: give that as `model`.
COURSE = {
    "model": "meta-llama/Llama-3.1-8B",
    "task": "none",
    "beta": 0.1,
    "epochs": 1,
    "gradient_accumulation_steps": 64,
    "gradient_checkpointing": True,
    "learning_rate": 1e-6,
    "eval_every": 50,
    "checkpoint_every": 50,
}
PRESETS: dict[str, dict[str, Any]] = {"tiny": {}, "course": COURSE}


def make_dpo_config(preset: str = "tiny", **settings: Any) -> DPOConfig:
    """Return a checked configuration: the preset, then the settings that are not None.  Raises ValueError with a line
    for each wrong setting."""
    check_one_of(PRESETS, preset=preset)
    return make_settings(DPOConfig, preset, PRESETS[preset], settings, also=["preset"])


def compute_per_instance_dpo_loss(
    lm: PreTrainedModel,
    lm_ref: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """Return the DPO loss of one pair, a scalar on the policy's device with gradient to `lm`.  The instruction is
    written in Alpaca's template; the rest is as in kernels.dpo.compute_dpo_losses."""
    pair = PreferencePair(prompt, response_chosen, response_rejected, source="")
    return losses_of([pair], lm, lm_ref, tokenizer, beta)[0][0]


def train(config: DPOConfig) -> Path:
    """Train as the configuration says, by RMSprop; return the run's folder (training/run_folder).

    The reference is the model that the run begins with.  `best` in the folder has the weights of the first validation
    with the highest `val_accuracy`.

    Metrics of each update and, named `val_...`, of the pairs that are held out: `loss`; `accuracy`, the share of pairs
    whose chosen response has the larger implicit reward; `margin` with its tenth and ninetieth percentiles,
    `chosen_reward` and `rejected_reward`, means in nats.  With a task, also what evaluation.evaluate gives of one
    sampled answer to each validation problem, and `val_greedy_reward`.  With `resume` it goes on as an RL run does.
    Raises ValueError before the folder is made.
    """
    records = RunRecords(config)
    if records.says_complete():
        return records.folder
    policy, tokenizer = load_policy(config.model, config.device, config.gradient_checkpointing)
    reference, _ = load_policy(config.model, config.reference_device or str(policy.device))
    pairs, too_long = _that_fit(load_pairs(config.pairs), policy, tokenizer)
    train_pairs, val_pairs = hold_out(pairs, config.n_val_pairs, config.seed)
    if len(train_pairs) < config.batch_size:
        raise ValueError(
            f"pairs: {config.pairs} leaves {len(train_pairs)} pairs to train on beside {len(val_pairs)} held out; "
            f"accepted are at least batch_size={config.batch_size}"
        )
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=config.learning_rate)
    score = partial(losses_of, policy=policy, reference=reference, tokenizer=tokenizer, beta=config.beta)

    def update(step: int) -> dict[str, Any]:
        batch = draw_batch(train_pairs, step - 1, config.batch_size, config.seed)
        found: list[dict[str, Tensor]] = []

        def parts_of_loss() -> Iterator[Tensor]:
            for rows in config.microbatches(batch):
                losses, rewards = score(rows)
                found.append(rewards)
                yield losses.sum() / len(batch)

        return descend(policy, optimizer, parts_of_loss(), config.max_grad_norm) | describe_rewards(found)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        losses, found = zip(*map(score, config.microbatches(val_pairs)), strict=True)
        metrics = {"loss": torch.cat(losses).mean().item()} | describe_rewards(found)
        return {f"val_{name}": value for name, value in metrics.items()}

    steps = config.epochs * len(train_pairs) // config.batch_size
    remarks = [f"{too_long} pairs exceed the model's context and are left out."] if too_long else []
    run = OfflineRun(records, policy, tokenizer, optimizer, steps, update, validate, "val_accuracy", remarks)
    return run.train()


def losses_of(
    pairs: Pairs,
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return compute_dpo_losses of pairs, their instructions in Alpaca's template."""
    prompts = list(map(alpaca_prompt(tokenizer), [pair.instruction for pair in pairs]))
    chosen, rejected = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    return compute_dpo_losses(policy, reference, tokenizer, beta, prompts, chosen, rejected)


def describe_rewards(found: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Return metrics of the implicit rewards of some batches of pairs, in nats."""
    names = ("chosen_rewards", "rejected_rewards")
    chosen, rejected = (torch.cat([rewards[name] for rewards in found]) for name in names)
    margins = chosen - rejected
    low, high = margins.float().quantile(torch.tensor([0.1, 0.9], device=margins.device)).tolist()
    return {
        "accuracy": implicit_reward_accuracy(margins),
        "margin": margins.mean().item(),
        "margin_p10": low,
        "margin_p90": high,
        "chosen_reward": chosen.mean().item(),
        "rejected_reward": rejected.mean().item(),
    }


def hold_out(pairs: Pairs, n_val_pairs: int, seed: int) -> tuple[Pairs, Pairs]:
    """Return pairs to train on, and `n_val_pairs` drawn by the seed to validate on.  No instruction is in both.

    Raises ValueError unless there are more pairs than are held out, and for a number below 0.
    """
    check_whole(0, n_val_pairs=n_val_pairs)
    if n_val_pairs >= len(pairs):
        raise ValueError(f"n_val_pairs: got {n_val_pairs}; there are {len(pairs)} pairs, accepted are fewer")
    validation = draw_batch(pairs, 0, n_val_pairs, seed)
    held_out = {pair.instruction for pair in validation}
    return [pair for pair in pairs if pair.instruction not in held_out], validation


def _that_fit(pairs: Pairs, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Pairs, int]:
    """Return the pairs of which both texts fit the model's context with an end, and how many do not.  Raises ValueError
    where none does, or the tokenizer has no end."""
    end_id(tokenizer)
    context, prompt = policy.config.max_position_embeddings, alpaca_prompt(tokenizer)

    def length(pair: PreferencePair) -> int:
        response = max(len(encode(tokenizer, text)) for text in (pair.chosen, pair.rejected))
        return len(encode(tokenizer, prompt(pair.instruction))) + response + 1

    fitting = [pair for pair in pairs if length(pair) <= context]
    if not fitting:
        raise ValueError(f"pairs: none of {len(pairs)} fits the model's context of {context} tokens")
    return fitting, len(pairs) - len(fitting)
