"""The in-process engine: plain torch on a transformers model and its cache.

Each prompt is read once, and its G rows share its keys and values where the model allows it.  All rows of a chunk grow
by one token per forward pass; rows that are done leave.  Left out: continuous batching, paged memory and everything
else that makes a server; see the vLLM engines for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.checks import check_has, check_kind, check_whole
from rlhelpers.models import can_share, eval_mode
from rlhelpers.rollouts.engine import Completion, Rollout, Sampling, encode_prompts, end_of_text_ids

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TorchEngine:
    """A `RolloutEngine` that samples with the policy's own module, on its device.

    `max_rows`: how many rows are sampled at a time, except that the rows of one prompt stay together.  It changes
    memory and speed, not the samples.  Raises ValueError naming an argument of another kind.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_rows: int = 256):
        check_has("pad_token_id", "a tokenizer of transformers", tokenizer=tokenizer)
        check_whole(1, max_rows=max_rows)
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.sync_weights(model)

    def sync_weights(self, policy: PreTrainedModel) -> None:
        """Sample from this policy from now on; it lives in this process, so no weight is copied."""
        check_has("generation_config", "a language model of transformers", policy=policy)
        self.model = policy
        self.eos_ids = end_of_text_ids(policy, self.tokenizer)

    def sleep(self) -> None:
        """Do nothing: the weights are the policy's, and the cache lives only while it samples."""

    def restart(self) -> None:
        """Do nothing: there is no other process."""

    def close(self) -> None:
        self.model = None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`.  Raises ValueError when a prompt and max_tokens exceed the context."""
        check_kind(Sampling, "a Sampling", sampling=sampling)
        context = self.model.config.max_position_embeddings
        prompt_ids = encode_prompts(self.tokenizer, prompts, sampling.max_tokens, context)
        # One uniform number for each row and token, drawn beforehand: a row's samples depend neither on its neighbours
        # nor on when they finish.
        generator = torch.Generator().manual_seed(sampling.seed)
        shape = len(prompts), sampling.n, sampling.max_tokens
        uniforms = torch.rand(shape, dtype=torch.float64, generator=generator)
        chunk, completions = max(1, self.max_rows // sampling.n), []
        with eval_mode(self.model):
            for start in range(0, len(prompts), chunk):
                rows = slice(start, start + chunk)
                completions += self._sample(prompt_ids[rows], uniforms[rows].flatten(0, 1), sampling)
        groups = [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]
        return [Rollout(*row) for row in zip(prompts, prompt_ids, groups, strict=True)]

    def _sample(self, prompt_ids: list[list[int]], uniforms: Tensor, sampling: Sampling) -> list[Completion]:
        """Return the completions of one chunk, those of one prompt side by side."""
        from rlhelpers.rollouts.group_cache import GroupCache, PlainCache  # here, because it imports transformers

        make_cache = GroupCache if can_group(self.model) else PlainCache
        pad_id = self.eos_ids[0] if self.eos_ids else 0
        cache = make_cache(self.model, prompt_ids, sampling.n, sampling.max_tokens, pad_id)
        logits, device = cache.logits, cache.logits.device
        written = _Written(len(uniforms), sampling, self.tokenizer, self.eos_ids, logits.shape[-1])
        slots, uniforms = torch.arange(len(uniforms)).view(-1, sampling.n), uniforms.to(device)
        with cache.growing(self.model):
            for step in range(sampling.max_tokens):
                barred = self.eos_ids if step < sampling.min_tokens else []
                rows = slots.flatten()
                tokens, log_probs = draw_tokens(logits, uniforms[rows.to(device), step], sampling, barred)
                written.append(rows, tokens.cpu(), log_probs.cpu())
                growing = written.is_growing[slots]
                if not growing.any() or step + 1 == sampling.max_tokens:
                    break
                slots, tokens = self._leave(cache, slots, growing, tokens)
                logits = cache.advance(self.model, tokens)
        return written.completions()

    def _leave(self, cache, slots: Tensor, growing: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Remove rows that are done, once that makes the batch an eighth smaller: it costs a copy of the cache.

        slots, growing (groups, n).  Each group keeps as many rows as the fullest one, so some rows may be done.
        """
        groups, n = growing.any(dim=1).nonzero().squeeze(1), int(growing.sum(dim=1).max())
        if 8 * len(groups) * n > 7 * slots.numel():
            return slots, tokens
        first = growing[groups].sort(dim=1, descending=True, stable=True).indices[:, :n]
        rows = (groups[:, None] * slots.shape[1] + first).flatten()
        cache.keep(groups.to(tokens.device), rows.to(tokens.device))
        return slots[groups].gather(1, first), tokens[rows.to(tokens.device)]


class _Written:
    """The tokens of each row so far, and whether it goes on."""

    def __init__(
        self,
        rows: int,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        vocabulary: int,
    ):
        self.sampling, self.tokenizer, self.eos_ids = sampling, tokenizer, torch.tensor(eos_ids, dtype=torch.long)
        self.tokens = torch.zeros(rows, sampling.max_tokens, dtype=torch.long)
        self.log_probs = torch.zeros(rows, sampling.max_tokens)
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.is_growing = torch.ones(rows, dtype=torch.bool)
        self.hit_stop = torch.zeros(rows, dtype=torch.bool)
        self.may_end_stop = None if sampling.stop is None else tokens_with(tokenizer, sampling.stop[-1], vocabulary)

    def append(self, rows: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        """Add one token to each of the rows that are not done."""
        growing = self.is_growing[rows]
        rows, tokens = rows[growing], tokens[growing]
        step = self.lengths[rows]
        self.tokens[rows, step], self.log_probs[rows, step] = tokens, log_probs[growing]
        self.lengths[rows] += 1
        checked = self.lengths[rows] >= self.sampling.min_tokens
        ended = checked & torch.isin(tokens, self.eos_ids)
        if self.may_end_stop is not None:
            for i in (checked & ~ended & self.may_end_stop[tokens]).nonzero().flatten().tolist():
                self.hit_stop[rows[i]] = ended[i] = self._ends_with_stop(rows[i])
        self.is_growing[rows] = ~ended

    def _ends_with_stop(self, row: Tensor) -> bool:
        # A token has at least one byte, so the stop string lies within as many tokens as it has bytes.
        end = int(self.lengths[row])
        tail = self.tokens[row, max(0, end - len(self.sampling.stop)) : end]
        return self.sampling.stop in self.tokenizer.decode(tail.tolist(), skip_special_tokens=True)

    def completions(self) -> list[Completion]:
        rows = range(len(self.lengths))
        ids = [self.tokens[row, : self.lengths[row]].tolist() for row in rows]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [self._completion(row, ids[row], texts[row]) for row in rows]

    def _completion(self, row: int, ids: list[int], text: str) -> Completion:
        if self.hit_stop[row]:
            text = text[: text.rindex(self.sampling.stop) + len(self.sampling.stop)]
        reason = "length" if self.is_growing[row] else "stop"
        return Completion(text, ids, reason, self.log_probs[row, : len(ids)].tolist())


@lru_cache(maxsize=8)
def tokens_with(tokenizer: PreTrainedTokenizerBase, sign: str, vocabulary: int) -> Tensor:
    """Return which tokens hold a sign: (vocabulary,) bool.

    A stop string that ends with the sign can be complete only after one of these, so only then is the text searched.
    `vocabulary` is the model's.  It may be larger than the tokenizer's; the tokens beyond hold no text.
    """
    if not sign.isascii():  # a sign of several bytes may come in pieces
        return torch.ones(vocabulary, dtype=torch.bool)
    return torch.tensor([sign in text for text in tokenizer.batch_decode([[i] for i in range(vocabulary)])])


def can_group(model: PreTrainedModel) -> bool:
    """Return whether the rows of a group can share their prompt's keys and values while they grow."""
    return can_share(model) and model._can_set_attn_implementation()


def draw_tokens(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, barred: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at `uniforms`; never a `barred` one.

    logits (rows, vocabulary); uniforms (rows,) in [0, 1), float64.  Returns token ids and their log-probs, (rows,),
    under the whole distribution, with nothing barred.  Raises ValueError for logits that are not finite.
    """
    log_distribution = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
    allowed = log_distribution
    if barred:
        allowed = log_distribution.index_fill(-1, torch.tensor(barred, device=logits.device), -torch.inf)
    if sampling.temperature == 0:
        tokens = allowed.argmax(dim=-1)
    else:
        probabilities = allowed.double().exp()
        if sampling.top_p < 1:
            probabilities = keep_nucleus(probabilities, sampling.top_p)
        cumulative = probabilities.cumsum(dim=-1)
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
        tokens = tokens.squeeze(-1).clamp(max=logits.shape[-1] - 1)
    log_probs = log_distribution.gather(-1, tokens[:, None]).squeeze(-1)
    if log_probs.isnan().any():  # one logit that is not finite makes its whole row NaN
        raise ValueError("logits: not finite; the policy's weights are broken, or training has diverged")
    return tokens, log_probs


def keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return the probabilities (rows, vocabulary), zero outside the smallest set that has at least `top_p`."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.where(before < top_p, 0.0))
