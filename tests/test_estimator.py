"""The table of methods equals the one in the design, cell by cell."""

import inspect
import math
from dataclasses import FrozenInstanceError

import pytest

from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator

COLUMNS = ("baseline", "advantage_normalizer", "loss_normalization", "importance_reweighting_method", "cliprange")
TABLE = {
    "grpo": ("mean", "std", "sequence", "none", None),
    "grpo_constant": ("mean", "std", "constant", "none", None),
    "dr_grpo": ("mean", "none", "constant", "none", None),
    "rft": ("none", "none", "constant", "none", None),
    "maxrl": ("mean", "mean", "constant", "none", None),
    "offpolicy_naive": ("mean", "std", "sequence", "none", None),
    "offpolicy_noclip": ("mean", "std", "sequence", "noclip", None),
    "offpolicy_clip": ("mean", "std", "sequence", "grpo", 0.2),
    "gspo": ("mean", "std", "sequence", "gspo", 3e-4),
    "cispo": ("mean", "std", "sequence", "cispo", 0.2),
}


def test_rows_are_those_of_the_design():
    assert list(ESTIMATORS) == list(TABLE)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", TABLE)
def test_cell(row, column):
    assert getattr(ESTIMATORS[row], column) == TABLE[row][COLUMNS.index(column)]


@pytest.mark.parametrize("row", TABLE)
def test_a_row_knows_its_name_and_the_courses_eps(row):
    assert ESTIMATORS[row].name == row
    assert ESTIMATORS[row].advantage_eps == 1e-6


@pytest.mark.parametrize("row", TABLE)
def test_step_arguments_fit_the_train_step(row):
    arguments = ESTIMATORS[row].step_arguments()
    assert set(arguments) == {*COLUMNS, "advantage_eps"}
    # bind_partial raises TypeError at a name that the step does not take.
    inspect.signature(grpo_train_step).bind_partial(**arguments)


def test_a_readers_own_functions_arrive_as_they_are():
    def baseline(rewards):
        return rewards.median(dim=1, keepdim=True).values

    arguments = Estimator("mine", baseline=baseline).step_arguments()
    assert arguments["baseline"] is baseline


def test_a_row_cannot_be_changed_by_accident():
    with pytest.raises(FrozenInstanceError):
        ESTIMATORS["grpo"].cliprange = 0.5


@pytest.mark.parametrize("cap", [1, 1.0, 2.0, 50])
def test_a_cap_on_the_weights_against_the_engine_is_no_step_argument(cap):
    row = Estimator("grpo_tis", engine_ratio_cap=cap)
    assert row.engine_ratio_cap == cap
    assert row.step_arguments() == ESTIMATORS["grpo"].step_arguments()
    assert row != Estimator("grpo_tis")  # another method, so other runs


def test_the_weights_against_the_engine_are_off_in_every_row():
    assert {row.engine_ratio_cap for row in ESTIMATORS.values()} == {None}


@pytest.mark.parametrize("cap", [0.99, 0, -1.0, math.inf, math.nan, True, "2"])
def test_a_cap_that_would_weaken_agreement_is_refused(cap):
    with pytest.raises(ValueError, match=f"engine_ratio_cap: got {cap!r}; accepted is a finite number of at least 1"):
        Estimator("grpo_tis", engine_ratio_cap=cap)
