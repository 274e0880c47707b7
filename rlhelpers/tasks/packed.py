"""Documents end to end, cut into pieces of one length: every position of a batch is a token to learn from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rlhelpers.checks import check_flag, check_whole
from rlhelpers.tasks.instructions import read_instructions, render

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


class PackedSFTDataset(Dataset):
    """Instructions and responses as pieces of `seq_length` tokens (supplement, problem `data_loading`).

    `dataset_path`: JSON lines with `prompt` and `response`, plain or gzipped.  Each is written in the template of
    Alpaca and encoded as one text, BOS before it and EOS after it where the tokenizer has them.  With `shuffle` the
    documents are put into an order that `seed` decides, before they are joined; the pieces keep the order of the
    stream.  The labels of a piece are the tokens that follow its own in the stream, so the last piece needs one token
    beyond its length, and what is left over after it is dropped: there are (tokens - 1) // seq_length pieces.

    An item is {"input_ids", "labels"}, each (seq_length,) int64.  Raises ValueError for a seq_length below 1, a
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
    """One epoch: dicts of stacked tensors, (batch_size, seq_length) each, a short last batch kept; its `len` is the
    number of batches.  With `shuffle`, torch's global generator decides the order of the pieces, a new one each time
    that it is iterated over.  Raises ValueError for a batch_size below 1, or a shuffle that is no bool."""
    check_whole(1, batch_size=batch_size)
    check_flag(shuffle=shuffle)
    return DataLoader(dataset, batch_size, shuffle=shuffle)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    begin, end = ([i] if i is not None else [] for i in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    return [*begin, *tokenizer.encode(text, add_special_tokens=False), *end]
