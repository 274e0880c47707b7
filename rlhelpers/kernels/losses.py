"""Policy-gradient losses per token, and their aggregation to one scalar.  The methods are in `estimators`."""

import torch
from torch import Tensor

from rlhelpers.checks import check_floats, check_same_shape, check_tensors, shown
from rlhelpers.kernels.estimators import (
    AGGREGATIONS,
    REWEIGHTINGS,
    Aggregation,
    BatchSizes,
    ClipRange,
    Reweighting,
    check_aggregation,
    check_ratio_cap,
    check_reweighting,
    importance_ratio,
    look_up,
)


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: str | Reweighting = "none",
    old_log_probs: Tensor | None = None,
    cliprange: ClipRange | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss, minus the objective, of one method (handout, eq. 32 and 56-63), and metadata.

    raw_rewards_or_advantages: (batch,) or (batch, 1); policy_log_probs, old_log_probs, response_mask: (batch, length),
    all on one device.  The method is a name in `estimators.REWEIGHTINGS`, or a function of that signature.  The mask is
    set where it is not 0.  No gradient reaches old_log_probs.  NaNs propagate.  Log-ratios are bounded to
    +-MAX_LOG_RATIO, beyond which they carry no gradient.

    The loss, (batch, length), is to be masked by aggregate_loss_across_microbatch.  Metadata: `clip_fraction`, the
    share of response tokens at which the clip range took the gradient away (cispo: bounded the weight).

    Raises ValueError naming the argument when a method lacks what it needs, or shapes, dtypes or devices do not fit.
    """
    method = importance_reweighting_method
    optional = {"old_log_probs": old_log_probs, "response_mask": response_mask}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tensors(raw_rewards_or_advantages=raw_rewards_or_advantages, policy_log_probs=policy_log_probs, **given)
    check_same_shape(policy_log_probs=policy_log_probs, **given)
    check_floats(policy_log_probs=policy_log_probs)
    advantages = _column("raw_rewards_or_advantages", raw_rewards_or_advantages, policy_log_probs)
    check_reweighting(method, cliprange)
    check_has_old_log_probs(method, old_log_probs)
    if method == "gspo" and response_mask is None:
        raise ValueError('response_mask: got None; "gspo" needs it to know which tokens make the response')
    mask = torch.ones_like(policy_log_probs, dtype=torch.bool) if response_mask is None else response_mask.bool()
    return reweighted_loss(advantages, policy_log_probs, method, old_log_probs, cliprange, mask)


def reweighted_loss(
    advantages: Tensor,
    policy_log_probs: Tensor,
    method: str | Reweighting,
    old_log_probs: Tensor | None,
    cliprange: ClipRange | None,
    mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """compute_policy_gradient_loss of arguments that are checked; advantages (batch, 1), mask bool."""
    reweight = REWEIGHTINGS[method] if isinstance(method, str) else method
    old = None if old_log_probs is None else old_log_probs.detach()
    result = reweight(advantages, policy_log_probs, old, cliprange, mask)
    if reweight is method:
        _check_own_result(result, policy_log_probs.shape)
    loss, clipped = result
    return loss, {"clip_fraction": masked_mean(clipped.float(), mask)}


def _check_own_result(result: tuple[Tensor, Tensor], shape: torch.Size) -> None:
    """A function of the reader's own may return anything."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or any(not isinstance(part, Tensor) or part.shape != shape for part in result):
        gave = " and ".join(map(shown, result)) if is_pair else shown(result)
        wanted = f"a per-token loss and the clipped tokens, both {tuple(shape)}"
        raise ValueError(f"importance_reweighting_method: gave {gave}; it must be {wanted}")


def truncated_importance_weights(
    policy_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """Return min(pi_0 / mu, C) per token, (batch, length): the weight of its loss where mu, not pi_0, sampled it.

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


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: str | Aggregation = "sequence",
    normalization_constant: float | None = None,
) -> Tensor:
    """Return one scalar from a (batch, length) loss; only tokens where the mask is not 0 count (handout, section 4.2).

    `loss_normalization`: a name in `estimators.AGGREGATIONS`, or a function of that signature; "constant" divides by
    normalization_constant.  These rows are taken for the whole batch.

    Raises ValueError for an unknown name, shapes or devices that differ, or a constant that is missing or not positive.
    """
    loss = per_token_policy_gradient_loss
    check_same_shape(per_token_policy_gradient_loss=loss, mask=mask)
    check_aggregation(loss_normalization, normalization_constant)
    mask = mask.bool()
    aggregate = look_up("loss_normalization", loss_normalization, AGGREGATIONS)
    return aggregate(loss, mask, BatchSizes(len(loss), int(mask.sum()), normalization_constant))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` where `mask` is not 0; 0 where there is none."""
    mask = mask.bool()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def check_has_old_log_probs(method: str | Reweighting, old_log_probs: Tensor | None) -> None:
    if isinstance(method, str) and method != "none" and old_log_probs is None:
        raise ValueError(f'old_log_probs: got None; importance_reweighting_method "{method}" needs them')


def _column(name: str, values: Tensor, policy_log_probs: Tensor) -> Tensor:
    rows = len(policy_log_probs)
    if values.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, wanted ({rows},) or ({rows}, 1)")
    return values.reshape(rows, 1)
