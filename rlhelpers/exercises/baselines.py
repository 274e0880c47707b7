"""Exercises of notebooks 05 and 07: baselines and normalizers, functions of the grouped rewards."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhelpers.exercises.exercise import Exercise, Property
from rlhelpers.kernels.estimators import group_mean


def _grouped() -> Iterator[dict]:
    for rows in (
        [[1.0, 0.0]],
        [[1.0, 0.0, 0.0, 0.0]],
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]],
        [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]],
    ):
        yield {"rewards": torch.tensor(rows)}


def _batch_mean(rewards: Tensor) -> Tensor:
    return rewards.mean().expand(len(rewards), 1)


maxrl_normalizer = Exercise(
    "maxrl_normalizer",
    group_mean,
    (Property("mu_i for each group, of shape (groups, 1)", _grouped),),
    {"one mean for the whole batch": _batch_mean},
)


def _leave_one_out(rewards: Tensor) -> Tensor:
    others = rewards.shape[1] - 1
    return (rewards.sum(dim=1, keepdim=True) - rewards) / others


def _own_reward_too(rewards: Tensor) -> Tensor:
    return rewards.mean(dim=1, keepdim=True).expand_as(rewards)


def _next_one_out(rewards: Tensor) -> Tensor:
    return _leave_one_out(rewards).roll(1, dims=1)


leave_one_out = Exercise(
    "leave_one_out",
    _leave_one_out,
    (Property("for each response the mean reward of the others in its group, of shape (groups, G)", _grouped),),
    {
        "the response's own reward in its baseline": _own_reward_too,
        "leaving out the neighbour": _next_one_out,
        "dividing by G, where G - 1 rewards were added": lambda rewards: (
            (rewards.sum(dim=1, keepdim=True) - rewards) / rewards.shape[1]
        ),
    },
)
