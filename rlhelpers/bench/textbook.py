"""Dr. GRPO as a textbook has it, on transformers alone: what the package's own step and engine are compared with.

Every response is read with its whole prompt, all logits are computed, rows without an advantage are read like the
others, and sampling is `generate`'s.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.kernels.tokens import pad_prompts_and_outputs, padding_id
from rlhelpers.kernels.train_step import TokenIds
from rlhelpers.models import eval_mode
from rlhelpers.rollouts import Completion, Rollout, Sampling
from rlhelpers.rollouts.engine import encode_prompts, end_of_text_ids


def textbook_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    token_ids: TokenIds,
    rewards: Tensor,
    group_size: int,
    microbatch_size: int,
    normalization_constant: float,
    max_grad_norm: float,
) -> None:
    """One update: A log pi(y_t) with A = r - mean of the group, summed over all tokens of all responses and divided by
    a constant (arXiv:2503.20783).  rewards (B,) float32, a group's side by side; token_ids: of prompt and response."""
    groups = rewards.view(-1, group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    prompts, responses = zip(*token_ids, strict=True)
    batch = pad_prompts_and_outputs(prompts, responses, padding_id(tokenizer))
    for start in range(0, len(rewards), microbatch_size):
        rows = slice(start, start + microbatch_size)
        logits = model(input_ids=batch["input_ids"][rows], use_cache=False).logits
        log_probs = logits.log_softmax(dim=-1).gather(-1, batch["labels"][rows, :, None]).squeeze(-1)
        objective = (advantages[rows, None] * log_probs * batch["response_mask"][rows]).sum()
        (-objective / normalization_constant).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


class GenerateEngine:
    """Samples by `model.generate`; as much of a `RolloutEngine` as is measured.  Its samples have no log-probs."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer

    def sync_weights(self, policy: PreTrainedModel) -> None:
        self.model = policy

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`; all rows at a time."""
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
        """Of a row that `generate` filled up with padding."""
        end = next((i + 1 for i, token in enumerate(ids) if token in end_ids), None)
        ids = ids[:end]
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids.pop()
        text = cut(self.tokenizer.decode(ids, skip_special_tokens=True), stop)
        ended = end is not None or (stop is not None and text.endswith(stop))
        return Completion(text, ids, "stop" if ended else "length", [])


def cut(text: str, stop: str | None) -> str:
    """To the end of the stop string, where it has one."""
    before, found, _ = text.partition(stop) if stop else (text, "", "")
    return before + found
