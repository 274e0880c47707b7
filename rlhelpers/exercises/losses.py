"""Exercises of notebook 03: from log-probabilities and advantages to one loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhelpers import kernels
from rlhelpers.exercises.exercise import Exercise
from rlhelpers.kernels import estimators


def _tokens(advantages: list, new: list, old: list | None = None, mask: list | None = None, **settings) -> dict:
    inputs = {"raw_rewards_or_advantages": torch.tensor(advantages), "policy_log_probs": torch.tensor(new)}
    if old is not None:
        inputs["old_log_probs"] = torch.tensor(old)
    if mask is not None:
        inputs["response_mask"] = torch.tensor(mask)
    return inputs | settings


def _ratio_tokens(method: str, cliprange: float | None = None) -> list[dict]:
    """All pairs of a ratio and the sign of an advantage, one token at a time, and then in one batch."""
    settings = {"importance_reweighting_method": method, "cliprange": cliprange}
    logs = torch.tensor([1.0, 1.5, 0.5, 4.0, 0.1]).log().tolist()
    single = [_tokens([sign], [[log - 1]], [[-1.0]], [[True]], **settings) for sign in (1.0, -1.0) for log in logs]
    rows = [[log - 2 for log in logs] for _ in range(2)]
    mask = [[True] * 5, [True] * 3 + [False] * 2]
    return [*single, _tokens([0.7, -1.3], rows, [[-2.0] * 5] * 2, mask, **settings)]


GSPO = {"importance_reweighting_method": "gspo", "cliprange": 0.2}
GSPO_ROWS = [
    _tokens([1.0], [[-1.0, -1.2]], [[-1.0, -1.0]], [[True, True]], **GSPO),
    _tokens([1.0], [[-1.0, -1.2, -9.0]], [[-1.0, -1.0, -1.0]], [[True, True, False]], **GSPO),
    _tokens([1.0, -1.0], [[-1.0, -0.4], [-3.0, -1.0]], [[-1.0, -1.0]] * 2, [[True, True]] * 2, **GSPO),
]
LONG_ROWS = [
    _tokens([advantage], [[new] * 400], [[-2.0] * 400], [[True] * 400], **GSPO | {"cliprange": 1.0})
    for advantage, new in ((1.0, -2.5), (-1.0, -1.5))
]


def _loss_and_gradient(function: Callable, inputs: dict) -> dict[str, Tensor]:
    """At the response's tokens only: all others are masked later."""
    log_probs = inputs["policy_log_probs"].requires_grad_()
    # No leaf, as in training: a function may work in place.
    loss, metadata = function(**(inputs | {"policy_log_probs": log_probs.clone()}))
    mask = inputs.get("response_mask", torch.ones_like(log_probs, dtype=torch.bool))
    loss = loss.where(mask, 0.0) if loss.shape == mask.shape else loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    wanted = {"loss": loss.detach(), "gradient": gradient}
    if inputs.get("cliprange"):
        wanted["clip_fraction"] = metadata["clip_fraction"]
    return wanted


def _reweighted_by(method: str, reweight: Callable) -> Callable:
    """A wrong function: right but for one method of reweighting."""

    def loss(raw_rewards_or_advantages, policy_log_probs, importance_reweighting_method="none", *rest, **settings):
        chosen = reweight if importance_reweighting_method == method else importance_reweighting_method
        return kernels.compute_policy_gradient_loss(
            raw_rewards_or_advantages, policy_log_probs, chosen, *rest, **settings
        )

    return loss


def _clamped_only(advantages, new, old, cliprange, mask):
    ratio = (new - old).exp()
    clamped = ratio.clamp(1 - cliprange, 1 + cliprange)
    return -advantages * clamped, clamped != ratio


def _turned_round(advantages, new, old, cliprange, mask):
    return estimators.token_clip(advantages, 2 * old - new, old, cliprange, mask)


def _product_then_root(advantages, new, old, cliprange, mask):
    product = torch.where(mask, (new - old).exp(), 1.0).prod(dim=1, keepdim=True)
    ratio = (product ** (1 / mask.sum(dim=1, keepdim=True))).expand_as(new)
    plain, clipped = advantages * ratio, advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return -torch.minimum(plain, clipped), clipped < plain


def _mean_over_padding(advantages, new, old, cliprange, mask):
    return estimators.sequence_clip(advantages, new, old, cliprange, torch.ones_like(mask))


def _weight_with_gradient(advantages, new, old, cliprange, mask):
    ratio = (new - old).exp()
    return -advantages * ratio.clamp(max=1 + cliprange) * new, ratio > 1 + cliprange


def _ascending(*arguments, **settings):
    loss, metadata = kernels.compute_policy_gradient_loss(*arguments, **settings)
    return -loss, metadata


compute_policy_gradient_loss = Exercise(
    "compute_policy_gradient_loss",
    kernels.compute_policy_gradient_loss,
    {
        "on-policy: -A log pi_theta at every token": [
            _tokens([1.0], [[-0.5]]),
            _tokens([[1.0], [-2.0]], [[-0.5, -1.0], [-2.0, -0.1]]),
        ],
        "noclip: -A w": _ratio_tokens("noclip"),
        "grpo: -min(A w, A clip(w, 1 - eps, 1 + eps))": _ratio_tokens("grpo", 0.2),
        "gspo: one weight, the geometric mean over the response's tokens": GSPO_ROWS,
        "gspo: a response of 400 tokens neither under- nor overflows": LONG_ROWS,
        "cispo: -A min(w, 1 + eps) log pi_theta, no gradient through the weight": _ratio_tokens("cispo", 0.2),
    },
    {
        "the sign: a loss is minus an objective": _ascending,
        "clamping the weight without the min": _reweighted_by("grpo", _clamped_only),
        "the ratio turned round, pi_0 / pi_theta": _reweighted_by("grpo", _turned_round),
        "the product first and then its root": _reweighted_by("gspo", _product_then_root),
        "a mean over padding too": _reweighted_by("gspo", _mean_over_padding),
        "a gradient through the weight": _reweighted_by("cispo", _weight_with_gradient),
    },
    _loss_and_gradient,
)


def _losses(loss_normalization: str, constant: float | None = None) -> list[dict]:
    return [
        {
            "per_token_policy_gradient_loss": torch.tensor(loss),
            "mask": torch.tensor(mask),
            "loss_normalization": loss_normalization,
            "normalization_constant": constant,
        }
        for loss, mask in (
            ([[1.0, 2.0]], [[True, True]]),
            ([[1.0, 5.0]], [[True, False]]),
            ([[1.0, 2.0], [4.0, 9.0]], [[True, True], [True, False]]),
            ([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [7.0] * 3], [[True] * 3, [True, False, False], [False] * 3]),
        )
    ]


def _aggregated_by(rule: Callable[[Tensor, Tensor, float | None], Tensor], which: str) -> Callable:
    """A wrong function: `rule` for one normalization."""

    def aggregate(per_token_policy_gradient_loss, mask, loss_normalization="sequence", normalization_constant=None):
        if loss_normalization == which:
            return rule(per_token_policy_gradient_loss, mask, normalization_constant)
        return kernels.aggregate_loss_across_microbatch(
            per_token_policy_gradient_loss, mask, loss_normalization, normalization_constant
        )

    return aggregate


def _row_sums(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum(dim=1)


def _total_and_gradient(function: Callable, inputs: dict) -> dict[str, Tensor]:
    per_token = inputs["per_token_policy_gradient_loss"].requires_grad_()
    total = function(**(inputs | {"per_token_policy_gradient_loss": per_token.clone()}))
    (gradient,) = torch.autograd.grad(total, per_token)
    return {"loss": total.detach(), "gradient": gradient}


aggregate_loss_across_microbatch = Exercise(
    "aggregate_loss_across_microbatch",
    kernels.aggregate_loss_across_microbatch,
    {
        "sequence: the mean over responses of the mean over their tokens": _losses("sequence"),
        "constant: the sum over all tokens / Z": _losses("constant", 8.0),
    },
    {
        "one mean over all tokens of the batch: long responses weigh more": _aggregated_by(
            lambda loss, mask, _: (loss * mask).sum() / mask.sum(), "sequence"
        ),
        "a mean over padding": _aggregated_by(lambda loss, mask, _: (loss * mask).mean(), "sequence"),
        "a sum over responses in the place of their mean": _aggregated_by(
            lambda loss, mask, _: (_row_sums(loss, mask) / mask.sum(dim=1).clamp(min=1)).sum(), "sequence"
        ),
        "dividing by the number of responses as well as by Z": _aggregated_by(
            lambda loss, mask, Z: (_row_sums(loss, mask) / Z).mean(), "constant"
        ),
        "forgetting the mask": _aggregated_by(lambda loss, mask, Z: loss.sum() / Z, "constant"),
    },
    _total_and_gradient,
)


BATCH = _losses("constant", 8.0)[-1]

accumulated_loss = Exercise(
    "accumulated_loss",
    lambda per_token_loss, mask, microbatch_size, normalization_constant: kernels.aggregate_loss_across_microbatch(
        per_token_loss, mask, "constant", normalization_constant
    ),
    {
        "the loss is that of the whole batch, however it is cut": [
            {
                "per_token_loss": BATCH["per_token_policy_gradient_loss"],
                "mask": BATCH["mask"],
                "normalization_constant": 8.0,
                "microbatch_size": size,
            }
            for size in (3, 1, 2)
        ]
    },
)
