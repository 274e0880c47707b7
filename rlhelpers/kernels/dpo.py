"""Direct preference optimisation (DPO; Rafailov et al., arXiv:2305.18290): the loss of pairs of responses.

The implicit reward of a response is r(x, y) = beta log(pi_theta(y|x) / pi_ref(y|x)), up to a term that only depends on
the prompt x and cancels between two responses to it (eq. 5 and 6 there).  The loss is -log sigma of the margin, the
reward of the chosen response minus that of the rejected one (eq. 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhelpers.checks import check_positive, check_same_length
from rlhelpers.kernels.logprobs import get_response_log_probs
from rlhelpers.kernels.tokens import encode, pad_prompts_and_outputs, padding_id
from rlhelpers.models import eval_mode

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def compute_dpo_losses(
    lm: PreTrainedModel,
    lm_ref: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beta: float,
    prompts: Sequence[str],
    chosen: Sequence[str],
    rejected: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The DPO loss of each pair, (pairs,) float32 on the policy's device, with gradient to `lm` alone.

    `prompts` are whole: everything that stands before the response.  To each response the end-of-text id is appended,
    since to stop is part of it.  A response's log-probability is the sum over its own tokens: neither the prompt's nor
    padding is in it, so the loss of a pair does not depend on the others of its batch.  `lm_ref` may be on another
    device; it gets no gradient.  Dropout is off in both.  The loss is finite for every finite margin: logsigmoid, and
    not the logarithm of a sigmoid that has become 0.

    Returns the losses and, without gradient, `chosen_rewards` and `rejected_rewards`, (pairs,) on the same device, in
    nats; the margin is their difference.  Raises ValueError for a beta that is not positive, lists that differ in
    length or are empty, a prompt without a token, or a tokenizer without an end-of-text token.
    """
    check_positive("beta", beta)
    check_same_length(prompts=prompts, chosen=chosen, rejected=rejected)
    batch = _tokenize_pairs(tokenizer, prompts, chosen, rejected)
    with torch.no_grad():
        reference = sequence_log_probs(lm_ref, batch)
    rewards = beta * (sequence_log_probs(lm, batch) - reference.to(lm.device))
    chosen_rewards, rejected_rewards = rewards.view(-1, 2).unbind(dim=1)
    losses = -logsigmoid(chosen_rewards - rejected_rewards)
    return losses, {"chosen_rewards": chosen_rewards.detach(), "rejected_rewards": rejected_rewards.detach()}


def sequence_log_probs(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """log pi(y|x) of each row of a batch as `pad_prompts_and_outputs` gives it: (rows,) float32, in nats."""
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with eval_mode(model):
        log_probs = get_response_log_probs(model, **batch)["log_probs"]
    return torch.where(batch["response_mask"], log_probs, 0.0).sum(dim=1)


def implicit_reward_accuracy(margins: Tensor) -> float:
    """The share of pairs whose chosen response has the larger implicit reward, from their margins, (pairs,).

    A tie counts one half: before training every margin is 0, and the policy knows nothing of the preferences.
    """
    return ((margins > 0).double() + 0.5 * (margins == 0).double()).mean().item()


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """With which a response ends.  Raises ValueError where there is none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: it has no end-of-text token; accepted is one that has, as responses end with it")
    return tokenizer.eos_token_id


def _tokenize_pairs(tokenizer, prompts: Sequence[str], chosen: Sequence[str], rejected: Sequence[str]):
    """Two rows for each pair, side by side: what stands before both is then read once."""
    end = end_id(tokenizer)
    responses = [response for pair in zip(chosen, rejected, strict=True) for response in pair]
    return pad_prompts_and_outputs(
        [ids for prompt in prompts for ids in [encode(tokenizer, prompt)] * 2],
        [[*encode(tokenizer, response), end] for response in responses],
        padding_id(tokenizer),
    )
