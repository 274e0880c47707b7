"""What is accepted, and yet a reader of the results must know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

    from rlhelpers.training.config import RunConfig

FEW = 0.01  # of the weights


def cautions(config: RunConfig, policy: PreTrainedModel) -> Iterator[str]:
    """A sentence for each, before the first step.

    Of sampling that leaves tokens out, where the method has ratios of probabilities: those are of whole distributions,
    the trainer's and the engine's, while the policy that acted is another.  Of weights in half precision, which are
    trained without float32 copies: the share of them that an update is lost on, see `unmoved_share`.
    """
    row = config.estimator
    if row.importance_reweighting_method != "none" or row.engine_ratio_cap is not None:
        for name, whole in (("top_p", 1), ("min_tokens", 0)):
            if (value := getattr(config, name)) != whole:
                yield (
                    f"{name}={value} keeps tokens from being sampled that the ratios of {row.name} count as possible: "
                    f"its weights are not exactly those of the policy that acted, as they are with {name}={whole}."
                )
    if (share := unmoved_share(policy, config.learning_rate)) > FEW:
        yield (
            f"{share:.0%} of the weights are too large for their precision, {policy.dtype}, to be moved by one update "
            f"of the size of learning_rate={config.learning_rate:g}; a larger learning rate moves more of them."
        )


@torch.no_grad()
def unmoved_share(policy: torch.nn.Module, size: float) -> float:
    """The share of the weights that stay as they are when `size` is added or taken away, by rounding in their dtype.

    AdamW moves a weight by about the learning rate at most.  In bfloat16, which has 8 bits, that is lost where the
    weight is above some 256 to 512 times as large, and is lost again at every step: nothing adds up.
    """
    unmoved = sum(int(((w + size == w) & (w - size == w)).sum()) for w in policy.parameters())
    return unmoved / max(1, sum(w.numel() for w in policy.parameters()))
