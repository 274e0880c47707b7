"""From text or token ids to the three aligned tensors that every loss of the workbook reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.checks import check_has, check_list, check_same_length, check_text, check_texts, check_whole, refused

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text` and nothing else: no BOS, no EOS; as the engines read prompts."""
    check_text(text=text)
    return _checked(tokenizer).encode(text, add_special_tokens=False)


def _checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    check_has("pad_token_id", "a tokenizer of transformers", tokenizer=tokenizer)
    return tokenizer


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Tokenize prompts and outputs apart, join them, and mark the output (handout, section 4.2).

    Returns `input_ids` and `labels` (int64) and `response_mask` (bool), each (batch, max_len - 1), where max_len is
    the longest prompt + output of the batch.  `labels` are `input_ids` one position later; `response_mask` is
    aligned with `labels`: True where the label is a token of the output.  Rows are padded on the right.

    Prompt and output are never encoded as one string: a tokenizer might merge across the border, and what was
    sampled would not be what is scored.  No special token is put between or around them.

    Raises ValueError when the two lists differ in length or are empty, or a prompt has no token: the first token of
    its output would have nothing that predicts it.
    """
    check_same_length(prompt_strs=prompt_strs, output_strs=output_strs)
    check_texts(prompt_strs=prompt_strs, output_strs=output_strs)
    return pad_prompts_and_outputs(
        [encode(tokenizer, prompt) for prompt in prompt_strs],
        [encode(tokenizer, output) for output in output_strs],
        padding_id(tokenizer),
    )


def pad_prompts_and_outputs(
    prompt_ids: Sequence[Sequence[int]], output_ids: Sequence[Sequence[int]], pad_id: int
) -> dict[str, Tensor]:
    """The same three tensors from token ids, such as an engine returns with its samples.

    The mask is made of lengths, not of token values, so a real EOS counts even where EOS and PAD share an id.
    Raises ValueError as tokenize_prompt_and_output does, and where an id is no whole number of at least 0.
    """
    check_same_length(prompt_ids=prompt_ids, output_ids=output_ids)
    check_whole(0, pad_id=pad_id)
    prompts, outputs = _as_tensors("prompt_ids", prompt_ids), _as_tensors("output_ids", output_ids)
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt_ids: prompt {i} has no token; accepted is at least 1")
    rows = [torch.cat(pair) for pair in zip(prompts, outputs, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    position = torch.arange(tokens.shape[1])
    start = torch.tensor([len(p) for p in prompt_ids])[:, None]
    end = torch.tensor([len(row) for row in rows])[:, None]
    is_output = (position >= start) & (position < end)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": is_output[:, 1:]}


def beginning(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token with which this tokenizer begins every text, as text; "" where it has none.  Engines encode prompts as
    they are, and a model such as Llama's that was trained with that token needs it."""
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[0] == tokenizer.bos_token_id
    return tokenizer.bos_token if begins else ""


def _as_tensors(name: str, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """(tokens,) int64 each.  torch itself would cut 1.5 down to 1, and -1 is an id to no model."""
    accepted = "a list of token ids, whole numbers of at least 0"
    tensors = []
    for i, row in enumerate(rows):
        where = f"{name}, row {i}"
        check_list(**{where: row})
        try:
            ids = torch.as_tensor(row) if len(row) else torch.zeros(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refused(where, row, accepted) from error
        if bool in map(type, row) or ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32) or (ids < 0).any():
            raise refused(where, row, accepted)
        tensors.append(ids.long().cpu())
    return tensors


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills short rows: PAD, else EOS, else 0.  It is never attended to from a real position."""
    for token_id in (_checked(tokenizer).pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    return 0
