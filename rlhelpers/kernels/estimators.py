"""The table of methods: one row each.  The step reads the row; nothing branches on its name."""

from dataclasses import dataclass

import torch

from rlhelpers.checks import check_text
from rlhelpers.kernels.advantages import BASELINES, NORMALIZERS, Baseline, check_eps, look_up
from rlhelpers.kernels.losses import Reweighting, check_normalization, check_ratio_cap, check_reweighting


@dataclass(frozen=True)
class Estimator:
    """A row.  Baseline, normalizer and reweighting may be the reader's own functions instead of names.

    `engine_ratio_cap`: C of truncated importance sampling.  Every token's loss is multiplied by min(pi_0 / mu, C),
    where mu is the engine's policy, which sampled the token (losses.truncated_importance_weights).  None: off.  Below
    1 it would weaken every token on which engine and trainer agree, and is refused.  The step takes the weights and
    not the cap, so it is no step argument.

    Raises ValueError for an unknown name, eps below 0, a cliprange that the reweighting needs and does not have, or
    such a cap."""

    name: str
    baseline: str | Baseline = "mean"
    advantage_normalizer: str | Baseline = "std"
    loss_normalization: str = "sequence"
    importance_reweighting_method: str | Reweighting = "none"
    cliprange: float | None = None
    advantage_eps: float = 1e-6
    engine_ratio_cap: float | None = None

    def __post_init__(self):
        check_text(name=self.name)
        check_eps(self.advantage_eps)
        look_up("baseline", self.baseline, BASELINES)
        look_up("advantage_normalizer", self.advantage_normalizer, NORMALIZERS)
        # Constant and old log-probs are the run's to give, not the row's.
        check_normalization(self.loss_normalization, normalization_constant=1.0)
        check_reweighting(self.importance_reweighting_method, torch.empty(0), self.cliprange)
        if self.engine_ratio_cap is not None:
            check_ratio_cap("engine_ratio_cap", self.engine_ratio_cap)

    @property
    def needs_a_group(self) -> bool:
        """A group of one is its own mean and has no std."""
        return self.baseline == "mean" or self.advantage_normalizer == "std"

    def step_arguments(self) -> dict:
        """The row as keyword arguments of `grpo_train_step`; its weights against the engine depend on the batch."""
        return {cell: value for cell, value in vars(self).items() if cell not in ("name", "engine_ratio_cap")}


_ROWS = [
    Estimator("grpo"),
    Estimator("grpo_constant", loss_normalization="constant"),
    Estimator("dr_grpo", advantage_normalizer="none", loss_normalization="constant"),
    Estimator("rft", "none", "none", "constant"),
    Estimator("maxrl", "mean", "mean", "constant"),
    Estimator("offpolicy_naive"),
    Estimator("offpolicy_noclip", importance_reweighting_method="noclip"),
    Estimator("offpolicy_clip", importance_reweighting_method="grpo", cliprange=0.2),
    Estimator("gspo", importance_reweighting_method="gspo", cliprange=3e-4),
    Estimator("cispo", importance_reweighting_method="cispo", cliprange=0.2),
]
ESTIMATORS = {row.name: row for row in _ROWS}
