"""Dr. GRPO as a textbook has it, on transformers alone: what the package's own step and engine are compared with.

Every response is read with its whole prompt.  All logits are computed.  Rows without an advantage are read too.
`generate` samples.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.bench.case import Rows
from rlhelpers.kernels.tokens import pad_prompts_and_outputs
from rlhelpers.models import eval_mode
from rlhelpers.rollouts import Completion, Rollout, Sampling
from rlhelpers.rollouts.engine import encode_prompts, end_of_text_ids

LogProbs = Callable[[PreTrainedModel, Tensor, Tensor, Tensor], Tensor]
"""(model, input_ids, labels, response_mask) -> log-probs of the labels; all (rows, length)."""


def all_logits(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, response_mask: Tensor) -> Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits
    return logits.log_softmax(dim=-1).gather(-1, labels[..., None]).squeeze(-1)


def textbook_step(
    model, pad_id: int, optimizer: Optimizer, rows: Rows, size: int, max_grad_norm: float | None, log_probs=all_logits
) -> tuple[Tensor, dict[str, float]]:
    """Take one step: A log pi(y_t) with A = r - mean of the group, summed over all tokens of all responses and divided
    by a constant (arXiv:2503.20783).  Return loss and gradient norm, as `package_step` does."""
    groups = torch.tensor(rows.rewards).view(-1, rows.group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    padded = pad_prompts_and_outputs(*zip(*rows.token_ids, strict=True), pad_id)
    loss = torch.zeros(())
    for start in range(0, len(advantages), size):
        part = slice(start, start + size)
        names = ("input_ids", "labels", "response_mask")
        ids, labels, mask = (padded[name][part].to(model.device) for name in names)
        objective = advantages[part, None].to(model.device) * log_probs(model, ids, labels, mask) * mask
        microbatch_loss = -objective.sum() / rows.constant
        microbatch_loss.backward()
        loss += microbatch_loss.detach().cpu()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm)
    optimizer.step()
    model.zero_grad()
    return loss, {"grad_norm": norm.item()}


class GenerateEngine:
    """As much of a `RolloutEngine` as is measured, by `model.generate`.  Its samples have no log-probs."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer

    def sync_weights(self, policy: PreTrainedModel) -> None:
        self.model = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """Sample all rows at a time; see `RolloutEngine.generate`."""
        context = self.model.config.max_position_embeddings
        prompt_ids = encode_prompts(self.tokenizer, prompts, sampling.max_tokens, context)
        inputs = self.tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        with eval_mode(self.model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(sampling.seed)
            sequences = self.model.generate(
                **inputs,
                num_return_sequences=sampling.n,
                do_sample=True,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=0,
                max_new_tokens=sampling.max_tokens,
                min_new_tokens=sampling.min_tokens,
                stop_strings=sampling.stop,
                tokenizer=self.tokenizer,
            )
        rows = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        end_ids = set(end_of_text_ids(self.model, self.tokenizer))
        completions = [self._completion(row, end_ids, sampling.stop) for row in rows]
        groups = [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]
        return [Rollout(*row) for row in zip(prompts, prompt_ids, groups, strict=True)]

    def _completion(self, ids: list[int], end_ids: set[int], stop: str | None) -> Completion:
        """Take off the padding that `generate` filled the row up with."""
        end = next((i + 1 for i, token in enumerate(ids) if token in end_ids), None)
        ids = ids[:end]
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        text = cut(self.tokenizer.decode(ids, skip_special_tokens=True), stop)
        ended = end is not None or (stop is not None and text.endswith(stop))
        return Completion(text, ids, "stop" if ended else "length", [])


def cut(text: str, stop: str | None) -> str:
    """Cut the text after its first stop string."""
    before, found, _ = text.partition(stop) if stop else (text, "", "")
    return before + found
