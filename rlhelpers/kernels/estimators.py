"""The table of methods.  A method is a row; the train step reads the row, and nothing branches on a method's name.

Each cell of a row is an entry of one of the tables below, a number, or a function of the reader's own with the same
signature.

Symbols of the handout: r reward, A advantage, G group size, pi_theta policy, pi_0 the policy that sampled, y_t a token
of the response y, w_t = pi_theta(y_t | x, y_<t) / pi_0(y_t | x, y_<t) importance ratio, eps clip range, Z normalization
constant.  A loss is minus an objective.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhelpers.checks import check_flag, check_one_of, check_positive, check_text, is_number, refused

# --- baselines and normalizers: grouped rewards (groups, G) -> (groups, 1) or (groups, G) -----------------------------

Baseline = Callable[[Tensor], Tensor]


def no_baseline(rewards: Tensor) -> Tensor:
    """0: a response is pushed up by its whole reward (RFT; REINFORCE without a baseline)."""
    return torch.zeros_like(rewards[:, :1])


def group_mean(rewards: Tensor) -> Tensor:
    """mu_i, the mean reward of group i (handout, eq. 29)."""
    return rewards.mean(dim=1, keepdim=True)


def leave_one_out(rewards: Tensor) -> Tensor:
    """The mean reward of the other G - 1 responses (RLOO, arXiv:2402.14740).  No response is part of its own baseline,
    so the gradient is unbiased."""
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def group_std(rewards: Tensor) -> Tensor:
    """std_i with n - 1, as torch.std computes it (handout, eq. 30).  Undefined for G = 1."""
    return rewards.std(dim=1, keepdim=True)


BASELINES: dict[str, Baseline] = {"none": no_baseline, "mean": group_mean, "leave_one_out": leave_one_out}
NORMALIZERS: dict[str, Baseline | None] = {"none": None, "std": group_std, "mean": group_mean}

# --- reweightings: (A (batch, 1), log pi_theta, log pi_0, clip range, mask) -> (per-token loss, clipped tokens) -------

ClipRange = float | tuple[float, float]
"""eps, or (low, high): the ratio is bounded to 1 - low and 1 + high (clip-higher, DAPO, arXiv:2503.14476)."""

Reweighting = Callable[[Tensor, Tensor, Tensor | None, ClipRange | None, Tensor], tuple[Tensor, Tensor]]
"""All tensors but the first are (batch, length), and so are both results.  The mask is True at response tokens.  A row
whose loss does not vanish where A is 0 must say `prunes=False`."""

# exp(20) = 4.9e8: no ratio of a useful update is near it, and its square is still finite in float32.
MAX_LOG_RATIO = 20.0


def on_policy(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-A log pi_theta: REINFORCE's surrogate.  It is right where the policy that acts is the policy that learns."""
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

    s = (pi_theta(y | x) / pi_0(y | x))^(1 / len(y)) = exp(mean_t log w_t), the geometric mean over response tokens.
    Two passes over one response may differ by more than the paper's eps of 3e-4 in bfloat16: what is clipped on the
    first step there is rounding."""
    log_ratio = _log_ratio(policy_log_probs, old_log_probs, mask)
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = (log_ratio.sum(dim=1, keepdim=True) / length).exp().expand_as(log_ratio)
    return _clipped_surrogate(advantages, ratio, cliprange)


def weight_clip(advantages, policy_log_probs, old_log_probs, cliprange, mask):
    """-A sg(min(w, 1+eps)) log pi_theta (handout, eq. 61; CISPO, arXiv:2506.13585, eq. 4-5; sg: stop gradient).

    The weight is a constant and only its upper side is bounded, so every token keeps a gradient."""
    ratio, (_, high) = importance_ratio(policy_log_probs, old_log_probs, mask).detach(), clip_bounds(cliprange)
    return -advantages * ratio.clamp(max=high) * policy_log_probs, ratio > high


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


def _log_ratio(policy_log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    difference = torch.where(mask, policy_log_probs - old_log_probs, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_bounds(cliprange: ClipRange) -> tuple[float, float]:
    """(1 - eps, 1 + eps), or (1 - low, 1 + high)."""
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    return 1 - low, 1 + high


def _clipped_surrogate(advantages: Tensor, ratio: Tensor, cliprange: ClipRange) -> tuple[Tensor, Tensor]:
    plain = advantages * ratio
    clipped = advantages * ratio.clamp(*clip_bounds(cliprange))
    return -torch.minimum(plain, clipped), clipped < plain


# --- aggregations: (per-token loss, mask) of some rows, and the whole batch's sizes -> their share of its loss --------


class BatchSizes(NamedTuple):
    """Of the whole batch, pruned rows included: `rows` B, response `tokens`, and the `constant` Z, if there is one."""

    rows: int
    tokens: int
    constant: float | None


Aggregation = Callable[[Tensor, Tensor, BatchSizes], Tensor]
"""The shares of all microbatches add up to the loss of the batch, however it was cut."""


def mean_over_sequences(loss: Tensor, mask: Tensor, batch: BatchSizes) -> Tensor:
    """The mean over responses of the mean over their tokens.  A response without tokens adds 0, and still counts."""
    means = _row_sums(loss, mask) / mask.sum(dim=1).clamp(min=1)
    return means.mean() * (len(means) / batch.rows)


def sum_over_constant(loss: Tensor, mask: Tensor, batch: BatchSizes) -> Tensor:
    """The sum over tokens / Z (Dr. GRPO, arXiv:2503.20783): each token weighs the same in every batch."""
    return _row_sums(loss, mask).sum() / batch.constant


def mean_over_tokens(loss: Tensor, mask: Tensor, batch: BatchSizes) -> Tensor:
    """The mean over all response tokens of the batch (DAPO, arXiv:2503.14476): a long response weighs more."""
    return _row_sums(loss, mask).sum() / max(batch.tokens, 1)


def _row_sums(loss: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, loss, 0.0).sum(dim=1)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence": mean_over_sequences,
    "constant": sum_over_constant,
    "token": mean_over_tokens,
}

# --- penalties towards a reference policy: log pi_theta - log pi_ref per token -> estimate of KL(pi_theta | pi_ref) ---
# J. Schulman's names (Approximating KL divergence, 2020), with w = pi_ref / pi_theta.  As numbers, k1 and k3 are
# unbiased and k2 is nearly so.  As losses they differ: the gradient of k1 is 0 on average, so it measures and does not
# pull; that of k2 is the gradient of KL(pi_theta | pi_ref), and that of k3 the gradient of KL(pi_ref | pi_theta).


def k1(log_ratio: Tensor) -> Tensor:
    """-log w: unbiased, and of high variance."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log w)^2 / 2: biased, and never negative."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """w - 1 - log w: unbiased, and never negative (GRPO, arXiv:2402.03300, eq. 4)."""
    return torch.expm1(-log_ratio) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

# --- what a cell may hold ---------------------------------------------------------------------------------------------


def look_up(argument: str, choice: str | Callable, table: dict[str, Any]) -> Any:
    """Return the table's entry of that name; a function stands for itself.  Raise ValueError for an unknown name."""
    if callable(choice):
        return choice
    check_one_of(table, " or a function", **{argument: choice})
    return table[choice]


def needs_a_group(baseline: str | Baseline, normalizer: str | Baseline) -> bool:
    """Found by trying two groups of one response: is its baseline always its own reward, or its scale no number?"""
    alone = torch.tensor([[0.0], [1.0]])
    scale = look_up("advantage_normalizer", normalizer, NORMALIZERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the std of one number
        base = look_up("baseline", baseline, BASELINES)(alone)
        scaled = alone if scale is None else scale(alone)
    return torch.equal(base, alone) or not (base.isfinite().all() and scaled.isfinite().all())


def check_eps(advantage_eps: float) -> None:
    if not is_number(advantage_eps) or not 0 <= advantage_eps < math.inf:
        raise refused("advantage_eps", advantage_eps, "a finite number of at least 0")


def check_reweighting(method: str | Reweighting, cliprange: ClipRange | None) -> None:
    """Raise ValueError unless the method is known and has the clip range that it needs."""
    if callable(method):
        return
    check_one_of(REWEIGHTINGS, " or a function", importance_reweighting_method=method)
    if method in ("none", "noclip"):
        return
    bounds = cliprange if isinstance(cliprange, tuple) and len(cliprange) == 2 else (cliprange,)
    for bound in bounds:
        if not is_number(bound) or not 0 < bound < math.inf:
            accepted = f'a finite number above 0, or a pair (low, high) of them, which "{method}" needs'
            raise refused("cliprange", cliprange, accepted)


def check_aggregation(loss_normalization: str | Aggregation, normalization_constant: float | None) -> None:
    """Raise ValueError unless the aggregation is known and has the constant that it needs."""
    look_up("loss_normalization", loss_normalization, AGGREGATIONS)
    if loss_normalization == "constant":
        accepted = 'a finite number above 0, which "constant" needs'
        check_positive("normalization_constant", normalization_constant, accepted)


def check_ratio_cap(name: str, cap: float) -> None:
    """Raise ValueError below 1: tokens on which engine and trainer agree, whose ratio is 1, keep their full weight."""
    if not is_number(cap) or not 1 <= cap < math.inf:
        raise refused(name, cap, "a finite number of at least 1")


def check_penalty(kl_coefficient: float, kl_estimator: str) -> None:
    if not is_number(kl_coefficient) or not 0 <= kl_coefficient < math.inf:
        raise refused("kl_coefficient", kl_coefficient, "a finite number of at least 0")
    check_one_of(KL_ESTIMATORS, kl_estimator=kl_estimator)


# --- the row ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimator:
    """A row of the table.  A cell that names an entry may hold a function of the same signature instead.

    `cliprange`: eps or (low, high).  `kl_coefficient`: beta, by which the `kl_estimator` of the KL divergence from a
    reference policy is added to each token's loss; 0 for none.  `prunes`: rows whose advantage is exactly 0 may be left
    out, because their loss is 0; with a KL penalty it must be False.
    `engine_ratio_cap`: C of truncated importance sampling.  Every token's loss is multiplied by min(pi_0 / mu, C),
    where mu is the engine's policy, which sampled the token (losses.truncated_importance_weights); None for none.

    Raises ValueError naming the cell whose value is not accepted.
    """

    name: str
    baseline: str | Baseline = "mean"
    advantage_normalizer: str | Baseline = "std"
    loss_normalization: str | Aggregation = "sequence"
    importance_reweighting_method: str | Reweighting = "none"
    cliprange: ClipRange | None = None
    advantage_eps: float = 1e-6
    engine_ratio_cap: float | None = None
    # Runs from before these cells were recorded without them; see settings.recorded_cells.
    kl_coefficient: float = field(default=0.0, metadata={"added_later": True})
    kl_estimator: str = field(default="k3", metadata={"added_later": True})
    prunes: bool = field(default=True, metadata={"added_later": True})

    def __post_init__(self):
        check_text(name=self.name)
        if isinstance(self.cliprange, list):  # as JSON and YAML have a pair
            object.__setattr__(self, "cliprange", tuple(self.cliprange))
        look_up("baseline", self.baseline, BASELINES)
        look_up("advantage_normalizer", self.advantage_normalizer, NORMALIZERS)
        look_up("loss_normalization", self.loss_normalization, AGGREGATIONS)
        check_reweighting(self.importance_reweighting_method, self.cliprange)
        check_eps(self.advantage_eps)
        if self.engine_ratio_cap is not None:
            check_ratio_cap("engine_ratio_cap", self.engine_ratio_cap)
        check_penalty(self.kl_coefficient, self.kl_estimator)
        check_flag(prunes=self.prunes)
        if self.kl_coefficient and self.prunes:
            raise refused("prunes", True, "False with a KL penalty, whose gradient is not 0 where the advantage is")

    @property
    def needs_a_group(self) -> bool:
        """Whether a group of one has no advantage, or none that is a number."""
        return needs_a_group(self.baseline, self.advantage_normalizer)

    @property
    def needs_old_log_probs(self) -> bool:
        return self.importance_reweighting_method != "none"

    def step_arguments(self) -> dict[str, Any]:
        """The row as keyword arguments of `grpo_train_step`: the cells that the handout has."""
        not_of_the_handout = ("name", "engine_ratio_cap", "kl_coefficient", "kl_estimator", "prunes")
        return {cell: value for cell, value in vars(self).items() if cell not in not_of_the_handout}


# fmt: off
_ROWS = [
    #         name                baseline         normalizer  aggregation  reweighting  clip range
    Estimator("grpo",             "mean",          "std",      "sequence"),
    Estimator("grpo_constant",    "mean",          "std",      "constant"),
    Estimator("dr_grpo",          "mean",          "none",     "constant"),
    Estimator("rft",              "none",          "none",     "constant"),
    Estimator("maxrl",            "mean",          "mean",     "constant"),
    Estimator("rloo",             "leave_one_out", "none",     "constant"),
    Estimator("offpolicy_naive",  "mean",          "std",      "sequence"),
    Estimator("offpolicy_noclip", "mean",          "std",      "sequence",  "noclip"),
    Estimator("offpolicy_clip",   "mean",          "std",      "sequence",  "grpo",      0.2),
    Estimator("dapo",             "mean",          "std",      "token",     "grpo",      (0.2, 0.28)),
    Estimator("gspo",             "mean",          "std",      "sequence",  "gspo",      3e-4),
    Estimator("cispo",            "mean",          "std",      "sequence",  "cispo",     0.2),
]
# fmt: on
# dapo is DAPO's loss; its sampling of groups with a signal and its length penalty are not in the table.
ESTIMATORS = {row.name: row for row in _ROWS}
