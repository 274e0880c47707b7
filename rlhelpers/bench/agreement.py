"""Whether an engine samples from the policy: its speed means nothing before that is shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhelpers.kernels.logprobs import engine_mismatch, get_response_log_probs
from rlhelpers.kernels.tokens import pad_prompts_and_outputs, padding_id
from rlhelpers.kernels.train_step import TokenIds
from rlhelpers.models import eval_mode
from rlhelpers.rollouts import Rollout, Sampling
from rlhelpers.training.sampler import LIMITS

ROWS = 64
MAX_STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Agreement:
    """Of an engine and the policy, over the tokens of some samples.

    `mismatch_mean` and `mismatch_max` of |log pi - log mu| in nats: is what the engine says of its samples true?  None
    for an engine that says nothing.
    `bias`: in standard errors, the mean over tokens of log pi(y_t) + H(pi), which is 0 on average where tokens are
    drawn from pi: are the samples what a policy of that entropy would say?  A greedy engine can be right about its
    log-probs and still draw the wrong tokens.  None where `min_tokens` bars the end, for pi does not.
    """

    mismatch_mean: float | None
    mismatch_max: float | None
    bias: float | None


def agreement(
    rollouts: Sequence[Rollout], sampling: Sampling, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Agreement:
    """Scores every sampled token by the policy.  `sampling`: at temperature 1, with top_p 1."""
    samples = [(r.prompt_token_ids, c) for r in rollouts for c in r.completions]
    log_probs, entropy = score([(prompt, c.token_ids) for prompt, c in samples], policy, tokenizer)
    engine = torch.tensor([log_prob for _, c in samples for log_prob in c.log_probs])
    mean, largest = None, None
    if len(engine):
        found = engine_mismatch(log_probs[None], engine[None], torch.ones_like(log_probs)[None])
        mean, largest = found["mismatch_mean"], found["mismatch_max"]
    return Agreement(mean, largest, None if sampling.min_tokens else sampling_bias(log_probs, entropy))


def sampling_bias(log_probs: Tensor, entropy: Tensor) -> float:
    """See Agreement; of tokens that were sampled at temperature 1, (tokens,) each, as `score` gives them."""
    surplus = (log_probs + entropy).double()
    return (surplus.mean() / (surplus.std() / math.sqrt(len(surplus)))).item()


def refuse_unless_same(found: Agreement, engine: str, dtype: torch.dtype) -> None:
    """Raises ValueError naming the engine where its speed would be that of another computation."""
    limit = LIMITS[dtype]
    if found.mismatch_mean is not None and not found.mismatch_mean <= limit:
        raise ValueError(
            f"engines: no speeds, for {engine}'s log-probs differ from the policy's by {found.mismatch_mean:.3g} nats "
            f"on average, at most {found.mismatch_max:.3g}; accepted is a mean of up to {limit}"
        )
    if found.bias is not None:
        refuse_unless_unbiased(found.bias, engine)


def refuse_unless_unbiased(bias: float, engine: str) -> None:
    """Raises ValueError naming the engine that does not sample from the policy."""
    if not abs(bias) <= MAX_STANDARD_ERRORS:
        raise ValueError(
            f"engines: no speeds, for {engine} does not sample from the policy: the mean log-prob of its tokens is "
            f"{bias:.1f} standard errors from minus the policy's entropy; accepted are {MAX_STANDARD_ERRORS:.0f}"
        )


def refuse_unless_done(rollouts: Sequence[Rollout], prompts: Sequence[str], sampling: Sampling, engine: str) -> None:
    """Raises ValueError naming the engine where it did other work than it was given."""
    lengths = [len(completion.token_ids) for rollout in rollouts for completion in rollout.completions]
    same = [rollout.prompt for rollout in rollouts] == list(prompts) and len(lengths) == len(prompts) * sampling.n
    if not same or not all(sampling.min_tokens <= length <= sampling.max_tokens for length in lengths):
        raise ValueError(
            f"engines: no speeds, for {engine} gave {len(lengths)} samples of {min(lengths, default=0)} to "
            f"{max(lengths, default=0)} tokens; accepted are {sampling.n} for each of {len(prompts)} prompts, "
            f"of {sampling.min_tokens} to {sampling.max_tokens} tokens"
        )


def score(token_ids: TokenIds, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """The policy's log-probs of the response tokens and the entropies of its distributions there, (tokens,) each, row
    by row.  Whole rows are read, nothing is shared."""
    parts = [_score(token_ids[start : start + ROWS], policy, tokenizer) for start in range(0, len(token_ids), ROWS)]
    log_probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return log_probs, entropy


@torch.no_grad()
def _score(pairs: TokenIds, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    prompts, outputs = zip(*pairs, strict=True)
    batch = pad_prompts_and_outputs(prompts, outputs, padding_id(tokenizer))
    inputs, labels = batch["input_ids"].to(policy.device), batch["labels"].to(policy.device)
    with eval_mode(policy):
        scored = get_response_log_probs(policy, inputs, labels, return_token_entropy=True)
    mask = batch["response_mask"]
    return scored["log_probs"].cpu()[mask], scored["token_entropy"].cpu()[mask]
