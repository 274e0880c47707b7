"""Policy-gradient losses per token, and their aggregation to one scalar.

Notation of the handout: A advantage, pi_theta policy, pi_0 the policy that sampled, y_t a token of the response y,
w_t = pi_theta(y_t | x, y_<t) / pi_0(y_t | x, y_<t) importance ratio, eps clip range.  A loss is minus an objective.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlhelpers.checks import check_one_of, check_positive, is_number, refused, shown
from rlhelpers.kernels.checks import check_floats, check_same_shape, check_tensors

# exp(20) = 4.9e8: no ratio of a useful update is near it, and its square is still finite in float32.
MAX_LOG_RATIO = 20.0

Reweighting = Callable[[Tensor, Tensor, Tensor | None, float | None, Tensor], tuple[Tensor, Tensor]]
"""(advantages (batch, 1), policy_log_probs, old_log_probs, cliprange, mask) -> (per-token loss, clipped tokens).

The loss must vanish where the advantage is 0: the train step leaves such rows out."""


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: str | Reweighting = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss, minus the objective, by one of the methods below (handout, eq. 32 and 56-63).

    "none": on-policy, -A log pi_theta.  "noclip": -A w.  "grpo": -min(A w, A clip(w, 1-eps, 1+eps)).
    "gspo" and "cispo": see their functions.  A function of the reader's own is taken too (`Reweighting`).

    raw_rewards_or_advantages: (batch,) or (batch, 1); policy_log_probs, old_log_probs, response_mask: (batch, length),
    all on one device.  The mask is set where it is not 0.  What is no number stays none.  old_log_probs are constants:
    no gradient reaches them, also when they are the very tensor policy_log_probs.  A method reads what it needs of
    old_log_probs and cliprange, and no more.
    Log-ratios are bounded to +-MAX_LOG_RATIO, beyond which they carry no gradient.

    Returns the loss, (batch, length), to be masked by aggregate_loss_across_microbatch, and metadata: `clip_fraction`,
    the share of response tokens at which the clip range took the gradient away (cispo: bounded the weight).

    Raises ValueError naming the argument when a method lacks what it needs, or shapes, dtypes or devices do not fit.
    """
    method = importance_reweighting_method
    optional = {"old_log_probs": old_log_probs, "response_mask": response_mask}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tensors(raw_rewards_or_advantages=raw_rewards_or_advantages, policy_log_probs=policy_log_probs, **given)
    check_same_shape(policy_log_probs=policy_log_probs, **given)
    check_floats(policy_log_probs=policy_log_probs)
    advantages = _column("raw_rewards_or_advantages", raw_rewards_or_advantages, policy_log_probs)
    check_reweighting(method, old_log_probs, cliprange)
    if method == "gspo" and response_mask is None:
        raise ValueError('response_mask: got None; "gspo" needs it to know which tokens make the response')
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if response_mask is None else response_mask.bool()
    old = None if old_log_probs is None else old_log_probs.detach()
    reweight = method if callable(method) else REWEIGHTINGS[method]
    loss, clipped = _checked(reweight(advantages, policy_log_probs, old, cliprange, mask), policy_log_probs.shape)
    return loss, {"clip_fraction": masked_mean(clipped.float(), mask)}


def _checked(result: tuple[Tensor, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """What a method gave; a reader's own may give anything."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or any(not isinstance(part, Tensor) or part.shape != shape for part in result):
        gave = " and ".join(map(shown, result)) if is_pair else shown(result)
        wanted = f"a per-token loss and the clipped tokens, both {tuple(shape)}"
        raise ValueError(f"importance_reweighting_method: gave {gave}; it must be {wanted}")
    return result


def on_policy(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-A log pi_theta: REINFORCE's surrogate, right where the policy that acts is the policy that learns."""
    return -advantages * policy_log_probs, torch.zeros_like(mask)


def no_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-A w: corrects each token for its own probability only (handout, eq. 56).

    The whole correction would be the product of all ratios of the response, whose variance explodes with length."""
    ratio = importance_ratio(policy_log_probs, old_log_probs, mask)
    return -advantages * ratio, torch.zeros_like(mask)


def token_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-min(A w, A clip(w, 1-eps, 1+eps)) per token (handout, eq. 57; PPO, arXiv:1707.06347, eq. 7)."""
    ratio = importance_ratio(policy_log_probs, old_log_probs, mask)
    return _clipped_surrogate(advantages, ratio, cliprange)


def sequence_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """The same with one ratio per response (handout, eq. 62-63; GSPO, arXiv:2507.18071, eq. 5-7).

    s = (pi_theta(y | x) / pi_0(y | x))^(1 / len(y)) = exp(mean_t log w_t): the geometric mean over response
    tokens, computed in log space, where a long product neither over- nor underflows.  The paper's eps, 3e-4, is less
    than two passes over the same response may differ by in bfloat16: what is clipped on the first step there is
    rounding, and no drift of the policy.
    """
    log_ratio = _log_ratio(policy_log_probs, old_log_probs, mask)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length).exp().expand_as(log_ratio)
    return _clipped_surrogate(advantages, ratio, cliprange)


def weight_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-A sg(min(w, 1+eps)) log pi_theta (handout, eq. 61; CISPO, arXiv:2506.13585, eq. 4-5).

    The weight is a constant (sg: stop gradient) and only its upper side is bounded, so that every token keeps a
    gradient, the rare one that starts a new line of thought included.
    """
    ratio = importance_ratio(policy_log_probs, old_log_probs, mask).detach()
    return -advantages * ratio.clamp(max=1 + cliprange) * policy_log_probs, ratio > 1 + cliprange


REWEIGHTINGS: dict[str, Reweighting] = {
    "none": on_policy,
    "noclip": no_clip,
    "grpo": token_clip,
    "gspo": sequence_clip,
    "cispo": weight_clip,
}


def importance_ratio(policy_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """w = pi_theta / pi_0 per token; 1 where the mask is False.  Shapes (batch, length)."""
    return _log_ratio(policy_log_probs, old_log_probs, mask).exp()


def truncated_importance_weights(
    policy_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """min(pi_0 / mu, C) per token, (batch, length): what its loss is multiplied by where mu, not pi_0, has sampled it.

    mu is the engine's policy: other kernels than the trainer's, another dtype, or older weights.  pi_0 is the trainer's
    policy before the first update on these samples.  The weights are constants; they are 1 where the mask is not set.
    C bounds the variance; the bias is that of the tokens with pi_0 / mu > C (E. L. Ionides, Truncated importance
    sampling, 2008; F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025).

    policy_log_probs (log pi_0), engine_log_probs (log mu), mask: (batch, length), on one device.  Raises ValueError
    when shapes differ, or the cap is not a finite number of at least 1.
    """
    check_same_shape(policy_log_probs=policy_log_probs, engine_log_probs=engine_log_probs, mask=mask)
    check_ratio_cap("cap", cap)
    return importance_ratio(policy_log_probs.detach(), engine_log_probs.detach(), mask.bool()).clamp(max=cap)


def _log_ratio(policy_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    difference = torch.where(mask, policy_log_probs - old_log_probs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_surrogate(advantages: Tensor, ratio: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    plain = advantages * ratio
    clipped = advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return -torch.minimum(plain, clipped), clipped < plain


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: str = "sequence",
    normalization_constant: float | None = None,
) -> Tensor:
    """One scalar from a (batch, length) loss; only tokens where the mask is set count (handout, section 4.2).

    "sequence": the mean over responses of the mean over their tokens; a response without tokens adds 0 and still
    counts as a response.  "constant": the sum over all tokens / normalization_constant (Dr. GRPO), which depends
    neither on padding nor on how the batch is cut.  The mask is set where it is not 0.

    Raises ValueError for an unknown name, shapes or devices that differ, or a constant that is missing or not positive.
    """
    loss = per_token_policy_gradient_loss
    check_same_shape(per_token_policy_gradient_loss=loss, mask=mask)
    check_normalization(loss_normalization, normalization_constant)
    mask = mask.bool()
    row_sums = torch.where(mask, loss, 0.0).sum(dim=1)
    if loss_normalization == "sequence":
        return (row_sums / mask.sum(dim=1).clamp(min=1)).mean()
    return row_sums.sum() / normalization_constant


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of `values` where `mask` is set; 0 where it is set nowhere."""
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def _column(name: str, values: Tensor, policy_log_probs: Tensor) -> Tensor:
    rows = len(policy_log_probs)
    if values.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, wanted ({rows},) or ({rows}, 1)")
    return values.reshape(rows, 1)


def check_reweighting(method: str | Reweighting, old_log_probs: Tensor | None, cliprange: float | None) -> None:
    """Raise ValueError unless the method is known and has what it needs."""
    if callable(method):
        return
    check_one_of(REWEIGHTINGS, " or a function", importance_reweighting_method=method)
    if method == "none":
        return
    if old_log_probs is None:
        raise ValueError(f'old_log_probs: got None; importance_reweighting_method "{method}" needs them')
    if method != "noclip":
        check_positive("cliprange", cliprange, f'a finite number above 0, which "{method}" needs')


def check_normalization(loss_normalization: str, normalization_constant: float | None) -> None:
    """Raise ValueError unless the normalization is known and has its constant."""
    check_one_of(("sequence", "constant"), loss_normalization=loss_normalization)
    if loss_normalization == "constant":
        accepted = 'a finite number above 0, which "constant" needs'
        check_positive("normalization_constant", normalization_constant, accepted)


def check_ratio_cap(name: str, cap: float) -> None:
    """Raise ValueError unless tokens on which engine and trainer agree, whose ratio is 1, keep their full weight."""
    if not is_number(cap) or not 1 <= cap < math.inf:
        raise refused(name, cap, "a finite number of at least 1")
