"""Checks of what is enumerated: policies, their rewards, probabilities and blocks of positions.  All of it is small and
on the CPU, so values are looked at too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhelpers.checks import check_has, check_list, check_tensors, refused

if TYPE_CHECKING:
    from rlhelpers.theory.enumeration import TabularPolicy


def check_doubles(shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raise ValueError unless all are float64 tensors of this shape, of finite numbers."""
    check_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor.shape != shape or tensor.dtype != torch.float64:
            raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}; accepted is float64 {tuple(shape)}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name}: not all of its numbers are finite")


def check_probabilities(probabilities: Tensor) -> None:
    """Raise ValueError unless it is (cases,) float64, none below 0, and their sum is 1."""
    check_tensors(probabilities=probabilities)
    check_doubles((probabilities.numel(),), probabilities=probabilities)
    if (probabilities < 0).any() or abs(probabilities.sum().item() - 1) > 1e-6:
        raise ValueError("probabilities: one is below 0, or their sum is not 1")


def check_blocks(blocks: Sequence[Sequence[int]], steps: int) -> None:
    """Raise ValueError unless each holds positions of a response, none twice."""
    check_list(blocks=blocks)
    for block in blocks:
        if not isinstance(block, Sequence) or len(set(block)) < len(block) or not set(block) <= set(range(steps)):
            raise refused("blocks", blocks, f"lists of positions from 0 to {steps - 1}, none of them twice in a list")


def check_policies(**policies: TabularPolicy) -> None:
    """Raise ValueError unless all are TabularPolicies with the same responses."""
    check_has("token_log_probs", "a TabularPolicy", **policies)
    first, *others = policies.values()
    for other in others:
        if not (torch.equal(first.tokens, other.tokens) and torch.equal(first.mask, other.mask)):
            raise ValueError(f"{', '.join(policies)}: their responses are not the same ones")


def check_groups(groups: Tensor, responses: int) -> None:
    """Raise ValueError unless it is (groups, G) int64, numbers of responses."""
    check_tensors(groups=groups)
    if groups.ndim != 2 or groups.dtype != torch.int64 or not ((groups >= 0) & (groups < responses)).all():
        raise refused("groups", groups, f"(groups, G) int64, 0 to {responses - 1}, as all_groups gives them")


def check_two(policy: TabularPolicy, old: TabularPolicy, rewards: Tensor, blocks: Sequence[Sequence[int]]) -> None:
    """What an expectation under two policies takes."""
    check_policies(policy=policy, old=old)
    check_doubles((len(policy.tokens),), rewards=rewards)
    check_blocks(blocks, policy.tokens.shape[1])
