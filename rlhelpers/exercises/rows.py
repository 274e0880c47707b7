"""Exercises of notebooks 05 and 06: rows of the table of estimators."""

from collections.abc import Callable, Iterator

from rlhelpers.exercises.exercise import Exercise, Property
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator


def _rows_of(names: tuple[str, ...], **changes: dict) -> Callable[[], dict[str, Estimator]]:
    """A function that gives these rows; `changes` are cells that it gets wrong, by the row's name."""

    def rows():
        given = {name: {"name": name, **ESTIMATORS[name].step_arguments()} for name in names}
        return {name: Estimator(**(cells | changes.get(name, {}))) for name, cells in given.items()}

    return rows


def _asking_for(row: str) -> Callable[[], Iterator[dict]]:
    return lambda: iter([{"row": row}])


def _cells(function: Callable, inputs: dict) -> dict:
    row = function()[inputs["row"]]
    return {"name": row.name, **row.step_arguments()}


def _row_exercise(exercise: str, names: tuple[str, ...], mistakes: dict[str, dict]) -> Exercise:
    return Exercise(
        exercise,
        _rows_of(names),
        tuple(Property(f"the row {name}, cell by cell", _asking_for(name)) for name in names),
        {sentence: _rows_of(names, **changes) for sentence, changes in mistakes.items()},
        _cells,
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
