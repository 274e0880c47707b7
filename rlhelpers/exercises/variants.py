"""Exercises of notebooks 05 to 07: rows of the table of estimators, and functions for their cells."""

from collections.abc import Callable

import torch

from rlhelpers.exercises.exercise import Exercise
from rlhelpers.kernels.estimators import BASELINES, ESTIMATORS, Estimator

GROUPED = [
    {"rewards": torch.tensor(rows)}
    for rows in (
        [[1.0, 0.0]],
        [[1.0, 0.0, 0.0, 0.0]],
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]],
        [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]],
    )
]

maxrl_normalizer = Exercise(
    "maxrl_normalizer",
    BASELINES["mean"],
    {"mu_i for each group, of shape (groups, 1)": GROUPED},
    {"one mean for the whole batch": lambda rewards: rewards.mean().expand(len(rewards), 1)},
)


leave_one_out = Exercise(
    "leave_one_out",
    BASELINES["leave_one_out"],
    {"for each response the mean reward of the others in its group, of shape (groups, G)": GROUPED},
    {
        "the response's own reward in its baseline": lambda rewards: rewards.mean(1, keepdim=True).expand_as(rewards),
        "leaving out the neighbour": lambda rewards: BASELINES["leave_one_out"](rewards).roll(1, dims=1),
        "dividing by G, where G - 1 rewards were added": lambda rewards: (
            rewards.mean(1, keepdim=True) - rewards / rewards.shape[1]
        ),
    },
)


def _rows(*names: str, **changes: dict) -> Callable[[], dict[str, Estimator]]:
    """A function that gives these rows; `changes` are cells that it gets wrong, by the row's name."""

    def rows():
        given = {name: {"name": name, **ESTIMATORS[name].step_arguments()} for name in names}
        return {name: Estimator(**(cells | changes.get(name, {}))) for name, cells in given.items()}

    return rows


def _cells(function: Callable, inputs: dict) -> dict:
    row = function()[inputs["row"]]
    return {"name": row.name, **row.step_arguments()}


def _row_exercise(exercise: str, names: tuple[str, ...], mistakes: dict[str, dict]) -> Exercise:
    return Exercise(
        exercise,
        _rows(*names),
        {f"the row {name}, cell by cell": [{"row": name}] for name in names},
        {sentence: _rows(*names, **changes) for sentence, changes in mistakes.items()},
        _cells,
    )


variant_rows = _row_exercise(
    "variant_rows",
    ("grpo_constant", "dr_grpo", "rft", "maxrl"),
    {
        "a baseline in RFT, which has none": {"rft": {"baseline": "mean"}},
        "sequence normalization in Dr. GRPO": {"dr_grpo": {"loss_normalization": "sequence"}},
        "dividing MaxRL's advantages by the standard deviation": {"maxrl": {"advantage_normalizer": "std"}},
    },
)
off_policy_rows = _row_exercise(
    "off_policy_rows",
    ("offpolicy_naive", "offpolicy_noclip", "offpolicy_clip", "gspo", "cispo"),
    {
        "PPO's clip range in GSPO, whose weights move far less": {"gspo": {"cliprange": 0.2}},
        "reweighting in the naive method": {"offpolicy_naive": {"importance_reweighting_method": "noclip"}},
    },
)
