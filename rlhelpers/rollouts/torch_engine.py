"""The in-process engine: plain torch on a transformers model and its cache.

Each prompt is read once and its keys and values are shared out to its G rows; all rows of a chunk then grow by one
token per forward pass, and rows that are done leave.  What it leaves out: continuous batching, paged memory, and
anything else that makes a server; see the vLLM engines for those.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.eval_mode import eval_mode
from rlhelpers.rollouts.engine import Completion, Rollout, Sampling, encode_prompts, end_of_text_ids


class TorchEngine:
    """A `RolloutEngine` that samples with the policy's own module, on its device.

    `max_rows` bounds how many rows are sampled at a time; it changes memory and speed, not the samples.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_rows: int = 256):
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.sync_weights(model)

    def sync_weights(self, policy: PreTrainedModel) -> None:
        """The policy lives in this process: sampling from it needs no copy."""
        self.model = policy
        self.eos_ids = end_of_text_ids(policy, self.tokenizer)

    def rest(self) -> None:
        """The policy's weights are in use, and the cache lives only while it samples."""

    def restart(self) -> None:
        """There is nothing to start."""

    def close(self) -> None:
        self.model = None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`.  Raises ValueError when a prompt and max_tokens exceed the context."""
        context = self.model.config.max_position_embeddings
        prompt_ids = encode_prompts(self.tokenizer, prompts, sampling.max_tokens, context)
        # One uniform number for each row and token, drawn before anything else: a row's luck depends neither on
        # its neighbours nor on when they finish.
        generator = torch.Generator().manual_seed(sampling.seed)
        shape = len(prompts), sampling.n, sampling.max_tokens
        luck = torch.rand(shape, dtype=torch.float64, generator=generator)
        chunk, completions = max(1, self.max_rows // sampling.n), []
        with eval_mode(self.model):
            for start in range(0, len(prompts), chunk):
                rows = slice(start, start + chunk)
                completions += self._sample(prompt_ids[rows], luck[rows].flatten(0, 1), sampling)
        groups = [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]
        return [Rollout(*row) for row in zip(prompts, prompt_ids, groups, strict=True)]

    def _sample(self, prompt_ids: list[list[int]], luck: Tensor, sampling: Sampling) -> list[Completion]:
        """Completions of one chunk, a prompt's rows side by side."""
        logits, state = self._prefill(prompt_ids, sampling.n)
        rows = [_Row() for _ in range(len(luck))]
        alive = torch.arange(len(luck))
        for step in range(sampling.max_tokens):
            barred = self.eos_ids if step < sampling.min_tokens else []
            tokens, log_probs = draw_tokens(logits, luck[alive, step].to(logits.device), sampling, barred)
            for row, token, log_prob in zip(alive.tolist(), tokens.tolist(), log_probs.tolist(), strict=True):
                if rows[row].finish_reason is None:
                    self._append(rows[row], token, log_prob, sampling)
            staying = torch.tensor([rows[row].finish_reason is None for row in alive.tolist()])
            if not staying.any() or step + 1 == sampling.max_tokens:
                break
            # Leaving costs a copy of the cache, so wait until an eighth of the rows is done.
            if 8 * (~staying).sum() >= len(alive):
                kept = staying.nonzero().squeeze(1)
                alive, tokens = alive[kept], tokens[kept.to(tokens.device)]
                state.keep(kept)
            logits = state.advance(self.model, tokens[:, None])
        return [self._complete(row, sampling.stop) for row in rows]

    def _prefill(self, prompt_ids: list[list[int]], n: int) -> tuple[Tensor, "_State"]:
        """Read each prompt once, padded on the left so that all end together, then repeat everything n times."""
        width = max(len(ids) for ids in prompt_ids)
        pad = self.eos_ids[0] if self.eos_ids else 0
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids], device=self.model.device)
        lengths = torch.tensor([len(ids) for ids in prompt_ids], device=self.model.device)
        mask = (torch.arange(width, device=self.model.device) >= width - lengths[:, None]).long()
        state = _State(DynamicCache(config=self.model.config), mask[:, :0])
        logits = state.advance(self.model, input_ids, mask)
        state.repeat(n)
        return logits.repeat_interleave(n, dim=0), state

    def _append(self, row: "_Row", token: int, log_prob: float, sampling: Sampling) -> None:
        row.token_ids.append(token)
        row.log_probs.append(log_prob)
        if len(row.token_ids) < sampling.min_tokens:
            return
        if token in self.eos_ids:
            row.finish_reason = "stop"
        elif sampling.stop is not None:
            # Every token is at least one byte, so the stop string lies within its length in tokens.
            tail = self.tokenizer.decode(row.token_ids[-len(sampling.stop) :], skip_special_tokens=True)
            if sampling.stop in tail:
                row.finish_reason, row.hit_stop = "stop", True

    def _complete(self, row: "_Row", stop: str | None) -> Completion:
        text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        if row.hit_stop:
            text = text[: text.rindex(stop) + len(stop)]
        return Completion(text, row.token_ids, row.finish_reason or "length", row.log_probs)


class _Row:
    """One growing sample."""

    def __init__(self):
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason: str | None = None
        self.hit_stop = False


class _State:
    """What a batch of rows has read: the cache, and which positions of it are real."""

    def __init__(self, cache: DynamicCache, mask: Tensor):
        self.cache, self.mask = cache, mask

    def advance(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read more tokens; returns the logits after the last one, (rows, vocabulary) float32."""
        mask = torch.ones_like(input_ids) if mask is None else mask
        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        outputs = model(
            input_ids=input_ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): self.cache},
        )
        return outputs.logits[:, -1].float()

    def repeat(self, n: int) -> None:
        self.cache.batch_repeat_interleave(n)
        self.mask = self.mask.repeat_interleave(n, dim=0)

    def keep(self, rows: Tensor) -> None:
        rows = rows.to(self.mask.device)
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


def draw_tokens(logits: Tensor, luck: Tensor, sampling: Sampling, barred: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at `luck`; `barred` tokens are never drawn.

    logits (rows, vocabulary), luck (rows,) in [0, 1) float64.  Returns token ids and their log-probs, (rows,), under
    the whole distribution, nothing barred.
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
        tokens = torch.searchsorted(cumulative, (luck * cumulative[:, -1])[:, None], right=True)
        tokens = tokens.squeeze(-1).clamp(max=logits.shape[-1] - 1)
    log_probs = log_distribution.gather(-1, tokens[:, None]).squeeze(-1)
    if log_probs.isnan().any():  # one logit that is not finite makes its whole row NaN
        raise ValueError("logits: not finite; the policy's weights are broken, or training has diverged")
    return tokens, log_probs


def keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero outside the smallest set of tokens with at least `top_p` of the probability.  (rows, vocabulary)."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.where(before < top_p, 0.0))


def cache_argument(model: PreTrainedModel) -> str:
    """transformers 5.24 calls the argument `cache`, 5.19 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
