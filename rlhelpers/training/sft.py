"""Supervised fine-tuning: next-token prediction on instructions and responses (supplement, problem `sft_script`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from rlhelpers.checks import check_flag, check_one_of, check_whole
from rlhelpers.kernels import get_response_log_probs
from rlhelpers.models import eval_mode, load_policy, make_optimizer
from rlhelpers.tasks.datasets import read_instructions
from rlhelpers.tasks.prompts import render
from rlhelpers.training.draws import draw_batch
from rlhelpers.training.offline import OfflineConfig, OfflineRun, descend
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.settings import Betas, Count, LearningRate, Real, Text, make_settings, setting

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class SFTConfig(OfflineConfig):
    """The defaults are for the tiny model.  A batch has `batch_size` pieces of `seq_length` tokens."""

    method: Literal["sft"] = "sft"
    train_data: Text = setting(..., "content", named=False, description="JSON lines with prompt and response")
    val_data: Text = setting(..., "content", named=False, description="the same, to measure the loss on")
    seq_length: Count = 128
    epochs: Count = 2
    batch_size: Count = 16
    gradient_accumulation_steps: Count = 1
    learning_rate: LearningRate = 1e-3
    warmup: Real = Field(0.03, ge=0, le=1)  # share of the steps over which the rate rises
    betas: Betas = (0.9, 0.95)
    weight_decay: Real = Field(0.0, ge=0)
    eval_every: Count = 20


# Of the supplement, whose data are UltraChat and SafetyLlama, for a model of 8B parameters.
COURSE = {
    "model": "meta-llama/Llama-3.1-8B",
    "task": "none",
    "seq_length": 512,
    "epochs": 1,
    "batch_size": 32,
    "gradient_accumulation_steps": 16,
    "gradient_checkpointing": True,
    "learning_rate": 2e-5,
    "eval_every": 200,
    "checkpoint_every": 200,
}
PRESETS: dict[str, dict[str, Any]] = {"tiny": {}, "course": COURSE}


def make_sft_config(preset: str = "tiny", **settings: Any) -> SFTConfig:
    """Return a checked configuration: the preset, then the settings that are not None.  Raises ValueError with a line
    for each wrong setting."""
    check_one_of(PRESETS, preset=preset)
    return make_settings(SFTConfig, preset, PRESETS[preset], settings, also=["preset"])


def train(config: SFTConfig) -> Path:
    """Tune as the configuration says; return the run's folder (training/run_folder).

    Metrics: `loss`, `learning_rate` and `grad_norm` of each update; `val_loss` on all pieces of val_data.  Losses are
    in nats per token.  With a task, also what evaluation.evaluate gives of one sampled answer to each validation
    problem, and `val_greedy_reward`.  With `resume` it goes on as an RL run does.  Raises ValueError before the folder
    is made.
    """
    records = RunRecords(config)
    if records.says_complete():
        return records.folder
    policy, tokenizer = load_policy(config.model, config.device, config.gradient_checkpointing)
    pieces, val_pieces = (
        PackedSFTDataset(tokenizer, path, config.seq_length, shuffle=True, seed=config.seed)
        for path in (config.train_data, config.val_data)
    )
    _check_sizes(config, len(pieces), len(val_pieces), policy.config.max_position_embeddings)
    steps = config.epochs * len(pieces) // config.batch_size
    optimizer, factor = make_optimizer(policy, config), warmup_and_cosine(config.warmup, steps)

    def update(step: int) -> dict[str, Any]:
        rate = config.learning_rate * factor(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = draw_batch(pieces, step - 1, config.batch_size, config.seed)
        cut = config.microbatches(batch)
        means = (_losses(policy, default_collate(rows)).mean() * len(rows) / len(batch) for rows in cut)
        return descend(policy, optimizer, means, config.max_grad_norm) | {"learning_rate": rate}

    def validate() -> dict[str, float]:
        return {"val_loss": mean_loss(policy, val_pieces)}

    return OfflineRun(records, policy, tokenizer, optimizer, steps, update, validate).train()


def warmup_and_cosine(warmup: float, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate in updates 1 to `steps`: up from 0 in a line over this share of them, then
    down along a cosine.  It depends on the update alone, so checkpoints need not keep it."""
    from transformers import get_cosine_schedule_with_warmup

    nothing = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    [factor] = get_cosine_schedule_with_warmup(nothing, round(warmup * steps), steps).lr_lambdas
    return lambda step: factor(step - 1)


@torch.no_grad()
def mean_loss(policy: PreTrainedModel, pieces: PackedSFTDataset) -> float:
    """Return the loss in nats per token over all pieces."""
    with eval_mode(policy):
        sums = [_losses(policy, batch).sum().item() for batch in iterate_batches(pieces, 16, shuffle=False)]
    return sum(sums) / (len(pieces) * pieces.seq_length)


def _losses(policy: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """-log pi(label), (pieces, seq_length)."""
    ids, labels = (batch[name].to(policy.device) for name in ("input_ids", "labels"))
    return -get_response_log_probs(policy, ids, labels)["log_probs"]


def _check_sizes(config: SFTConfig, pieces: int, val_pieces: int, context: int) -> None:
    if config.seq_length > context:
        raise ValueError(f"seq_length: got {config.seq_length}; accepted is at most the model's context of {context}")
    if pieces < config.batch_size:
        raise ValueError(
            f"train_data: got {config.train_data}, which is less than one batch of {config.batch_size} pieces of "
            f"{config.seq_length} tokens"
        )
    if val_pieces < 1:
        raise ValueError(f"val_data: got {config.val_data}, which is no piece of {config.seq_length} tokens")


class PackedSFTDataset(Dataset):
    """Instructions and responses as pieces of `seq_length` tokens (supplement, problem `data_loading`).

    dataset_path: JSON lines with `prompt` and `response`, plain or gzipped.  Each is written in Alpaca's template and
      encoded as one text, with BOS and EOS where the tokenizer has them; the texts are joined into one stream.
    shuffle: the texts are joined in an order that `seed` decides.  Pieces keep the order of the stream.

    An item is {"input_ids", "labels"}, each (seq_length,) int64; labels are the tokens that follow in the stream.
    There are (tokens - 1) // seq_length pieces; the rest is dropped.  Raises ValueError for a seq_length below 1, a
    shuffle or seed of another kind, and what read_instructions raises.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dataset_path: str | Path,
        seq_length: int,
        shuffle: bool,
        *,
        seed: int = 0,
    ):
        check_whole(1, seq_length=seq_length)
        check_whole(0, seed=seed)  # of None every run would make another order
        check_flag(shuffle=shuffle)
        documents = [render(*row) for row in read_instructions(Path(dataset_path))]
        if shuffle:
            random.Random(seed).shuffle(documents)
        self.seq_length = seq_length
        self.tokens = torch.tensor([token for text in documents for token in _encode(tokenizer, text)])

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"piece {i}; there are {len(self)}")
        start = (i % len(self)) * self.seq_length
        piece = self.tokens[start : start + self.seq_length + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """Return one epoch of dicts of stacked tensors, (batch_size, seq_length) each; its `len` is the number of batches.
    A short last batch is kept.

    shuffle: torch's global generator decides the order of the pieces, a new one for each iteration.
    Raises ValueError for a batch_size below 1, or a shuffle that is no bool.
    """
    check_whole(1, batch_size=batch_size)
    check_flag(shuffle=shuffle)
    return DataLoader(dataset, batch_size, shuffle=shuffle)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    begin, end = ([i] if i is not None else [] for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    return [*begin, *tokenizer.encode(text, add_special_tokens=False), *end]
