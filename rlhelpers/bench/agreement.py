"""Does an engine sample from the policy?  Its speed means nothing before that is shown."""

import math
from collections.abc import Sequence

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


def agreement(
    rollouts: Sequence[Rollout], sampling: Sampling, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float | None]:
    """Score every sampled token by the policy.  `sampling`: at temperature 1, with top_p 1.

    Returns `mismatch_mean` and `mismatch_max` of |log pi - log mu| in nats, None for an engine that gives no log-probs;
    and `bias`, see `sampling_bias`, None where `min_tokens` bars the end of text, which pi does not.
    """
    samples = [(r.prompt_token_ids, c) for r in rollouts for c in r.completions]
    log_probs, entropy = score([(prompt, c.token_ids) for prompt, c in samples], policy, tokenizer)
    engine = torch.tensor([log_prob for _, c in samples for log_prob in c.log_probs])
    found = engine_mismatch(log_probs[None], engine[None], torch.ones_like(log_probs)[None]) if len(engine) else {}
    bias = None if sampling.min_tokens else sampling_bias(log_probs, entropy)
    return {name: found.get(name) for name in ("mismatch_mean", "mismatch_max")} | {"bias": bias}


def sampling_bias(log_probs: Tensor, entropy: Tensor) -> float:
    """Return the mean over tokens of log pi(y_t) + H(pi), in standard errors; (tokens,) each, as `score` gives them.

    Its expectation is 0 where tokens are drawn from pi.  A greedy engine can give true log-probs and still draw the
    wrong tokens.
    """
    surplus = (log_probs + entropy).double()
    return (surplus.mean() / (surplus.std() / math.sqrt(len(surplus)))).item()


def refuse_unless_same(found: dict[str, float | None], engine: str, dtype: torch.dtype) -> None:
    """Raise ValueError naming the engine where it computes something else than the policy, or does not sample from it;
    what `found` has no number for is not looked at."""
    mean, bias, limit = found.get("mismatch_mean"), found["bias"], LIMITS[dtype]
    if mean is not None and not mean <= limit:
        raise ValueError(
            f"engines: no speeds, for {engine}'s log-probs differ from the policy's by {mean:.3g} nats on average, at "
            f"most {found['mismatch_max']:.3g}; accepted is a mean of up to {limit}"
        )
    if bias is not None and not abs(bias) <= MAX_STANDARD_ERRORS:
        raise ValueError(
            f"engines: no speeds, for {engine} does not sample from the policy: the mean log-prob of its tokens is "
            f"{bias:.1f} standard errors from minus the policy's entropy; accepted are {MAX_STANDARD_ERRORS:.0f}"
        )


def refuse_unless_done(rollouts: Sequence[Rollout], prompts: Sequence[str], sampling: Sampling, engine: str) -> None:
    """Raise ValueError naming the engine where it did other work than it was given."""
    lengths = [len(completion.token_ids) for rollout in rollouts for completion in rollout.completions]
    same = [rollout.prompt for rollout in rollouts] == list(prompts) and len(lengths) == len(prompts) * sampling.n
    if not same or not all(sampling.min_tokens <= length <= sampling.max_tokens for length in lengths):
        raise ValueError(
            f"engines: no speeds, for {engine} gave {len(lengths)} samples of {min(lengths, default=0)} to "
            f"{max(lengths, default=0)} tokens; accepted are {sampling.n} for each of {len(prompts)} prompts, "
            f"of {sampling.min_tokens} to {sampling.max_tokens} tokens"
        )


@torch.no_grad()
def score(token_ids: TokenIds, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return the policy's log-probs of the response tokens and its entropies there, (tokens,) each, row by row.

    Whole rows are read: nothing is shared that could be wrong in the engine too.
    """
    found = []
    for start in range(0, len(token_ids), ROWS):
        batch = pad_prompts_and_outputs(*zip(*token_ids[start : start + ROWS], strict=True), padding_id(tokenizer))
        inputs, labels = batch["input_ids"].to(policy.device), batch["labels"].to(policy.device)
        with eval_mode(policy):
            scored = get_response_log_probs(policy, inputs, labels, return_token_entropy=True)
        found.append([scored[name].cpu()[batch["response_mask"]] for name in ("log_probs", "token_entropy")])
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
