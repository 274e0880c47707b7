"""Exercises of notebooks 05 to 07: rows of the table of estimators, and cells of them that are functions."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlhelpers.kernels.advantages import group_mean
from rlhelpers.kernels.estimator import ESTIMATORS, Estimator
from rlhelpers.workbook.checks.exercise import Exercise, Property

# ---- 05 and 06: rows


def _rows_of(names: tuple[str, ...], **changes: dict) -> Callable[[], dict[str, Estimator]]:
    """A function that gives these rows; `changes` are cells that it gets wrong, by the row's name."""

    def rows():
        given = {name: {"name": name, **ESTIMATORS[name].step_arguments()} for name in names}
        return {name: Estimator(**(cells | changes.get(name, {}))) for name, cells in given.items()}

    return rows


def _no_arguments() -> Iterator[dict]:
    yield {}


def _cells(*names: str) -> Callable[[Callable, dict], dict]:
    return lambda function, inputs: {row: function()[row].step_arguments() for row in names}


def _row_exercise(exercise: str, names: tuple[str, ...], mistakes: dict[str, dict]) -> Exercise:
    # One property for all rows: the report shows the rows that are wanted only where something is wrong.
    return Exercise(
        exercise,
        _rows_of(names),
        (Property(f"the rows {', '.join(names)}, cell by cell", _no_arguments),),
        {sentence: _rows_of(names, **changes) for sentence, changes in mistakes.items()},
        _cells(*names),
    )


ON_POLICY = ("grpo_constant", "dr_grpo", "rft", "maxrl")
OFF_POLICY = ("offpolicy_naive", "offpolicy_noclip", "offpolicy_clip", "gspo", "cispo")

variant_rows = _row_exercise(
    "variant_rows",
    ON_POLICY,
    {
        "a baseline in RFT, which has none": {"rft": {"baseline": "mean"}},
        "sequence normalization in Dr. GRPO": {"dr_grpo": {"loss_normalization": "sequence"}},
        "dividing MaxRL's advantages by the standard deviation": {"maxrl": {"advantage_normalizer": "std"}},
    },
)
off_policy_rows = _row_exercise(
    "off_policy_rows",
    OFF_POLICY,
    {
        "PPO's clip range in GSPO, whose weights move far less": {"gspo": {"cliprange": 0.2}},
        "reweighting in the naive method": {"offpolicy_naive": {"importance_reweighting_method": "noclip"}},
    },
)

# ---- 05 and 07: functions of the grouped rewards


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


def _tempered_std(rewards: Tensor) -> Tensor:
    return rewards.std(dim=1, keepdim=True).sqrt()


tempered_std = Exercise(
    "tempered_std",
    _tempered_std,
    (Property("the square root of the group's standard deviation, of shape (groups, 1)", _grouped),),
    {
        "the standard deviation itself": lambda rewards: rewards.std(dim=1, keepdim=True),
        "the population's standard deviation (n instead of n - 1)": lambda rewards: rewards.std(
            dim=1, keepdim=True, correction=0
        ).sqrt(),
        "one deviation for the whole batch": lambda rewards: rewards.std().sqrt().expand(len(rewards), 1),
    },
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
