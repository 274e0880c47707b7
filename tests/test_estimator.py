"""The table of methods equals the one in the design, cell by cell."""

import inspect
import math
from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.estimators import ESTIMATORS, KL_ESTIMATORS, Estimator

COLUMNS = ("baseline", "advantage_normalizer", "loss_normalization", "importance_reweighting_method", "cliprange")
TABLE = {
    "grpo": ("mean", "std", "sequence", "none", None),
    "grpo_constant": ("mean", "std", "constant", "none", None),
    "dr_grpo": ("mean", "none", "constant", "none", None),
    "rft": ("none", "none", "constant", "none", None),
    "maxrl": ("mean", "mean", "constant", "none", None),
    "rloo": ("leave_one_out", "none", "constant", "none", None),
    "offpolicy_naive": ("mean", "std", "sequence", "none", None),
    "offpolicy_noclip": ("mean", "std", "sequence", "noclip", None),
    "offpolicy_clip": ("mean", "std", "sequence", "grpo", 0.2),
    "dapo": ("mean", "std", "token", "grpo", (0.2, 0.28)),
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


@pytest.mark.parametrize("cliprange", [(0.2,), (0.2, 0), (-0.1, 0.2), (0.1, 0.2, 0.3), (0.2, math.nan), "0.2", True])
def test_a_clip_range_that_is_none_is_refused(cliprange):
    with pytest.raises(ValueError, match=r"cliprange: got .*above 0, or a pair"):
        Estimator("mine", importance_reweighting_method="grpo", cliprange=cliprange)


def test_a_pair_from_yaml_is_a_pair():
    row = Estimator("mine", importance_reweighting_method="grpo", cliprange=[0.2, 0.28])
    assert row.cliprange == (0.2, 0.28)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"kl_coefficient": -1.0}, r"kl_coefficient: got -1.0; accepted is a finite number of at least 0"),
        ({"kl_coefficient": math.inf}, "kl_coefficient: got inf"),
        ({"kl_estimator": "k4"}, "kl_estimator: got 'k4'; accepted are k1, k2, k3"),
        ({"kl_coefficient": 0.1}, "prunes: got True; accepted is False with a KL penalty"),
        ({"prunes": "no"}, "prunes: got 'no'; accepted is True or False"),
        ({"loss_normalization": "tokens"}, "loss_normalization: got 'tokens'; accepted are sequence, constant, token"),
    ],
)
def test_a_cell_that_is_none_is_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        Estimator("mine", **cells)


@pytest.mark.parametrize(
    ("cells", "needs"),
    [
        ({}, True),
        ({"baseline": "leave_one_out", "advantage_normalizer": "none"}, True),
        ({"baseline": "none", "advantage_normalizer": "std"}, True),
        ({"baseline": "none", "advantage_normalizer": "mean"}, False),
        ({"baseline": lambda r: r.median(1, keepdim=True).values, "advantage_normalizer": "none"}, True),
        ({"baseline": lambda r: r * 0 + 0.5, "advantage_normalizer": "none"}, False),
    ],
)
def test_which_rows_need_a_group(cells, needs):
    assert Estimator("mine", **cells).needs_a_group == needs


# --- the KL estimators: exact enumeration and Monte Carlo; sympy has them in test_symbolic ----------------------------

POLICY = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)


def kl(p, q):
    return (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_mean_of_a_kl_estimator(name, unbiased):
    exact = (POLICY * KL_ESTIMATORS[name](POLICY.log() - REFERENCE.log())).sum()
    assert torch.isclose(exact, kl(POLICY, REFERENCE), rtol=1e-12) == unbiased
    samples = torch.multinomial(POLICY, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    drawn = KL_ESTIMATORS[name]((POLICY.log() - REFERENCE.log())[samples])
    assert abs(drawn.mean() - exact) < 5 * drawn.std() / len(drawn) ** 0.5


def test_k2_and_k3_are_never_negative():
    log_ratio = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    assert (KL_ESTIMATORS["k2"](log_ratio) >= 0).all() and (KL_ESTIMATORS["k3"](log_ratio) >= -1e-15).all()
    assert (KL_ESTIMATORS["k1"](log_ratio) < 0).any()


@pytest.mark.parametrize(
    ("name", "divergence"),
    [("k1", lambda p: 0 * p.sum()), ("k2", lambda p: kl(p, REFERENCE)), ("k3", lambda p: kl(REFERENCE, p))],
)
def test_the_mean_gradient_of_a_kl_estimator_as_a_loss(name, divergence):
    """Over all tokens exactly: k1 does not pull, k2 pulls by KL(pi | ref), and k3 by KL(ref | pi)."""
    logits = POLICY.log().requires_grad_()
    log_probs = torch.log_softmax(logits, dim=0)
    sampled = log_probs.exp().detach()  # a loss does not differentiate what was sampled
    (found,) = torch.autograd.grad((sampled * KL_ESTIMATORS[name](log_probs - REFERENCE.log())).sum(), logits)
    (expected,) = torch.autograd.grad(divergence(torch.log_softmax(logits, dim=0).exp()), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [0.99, 0, -1.0, math.inf, math.nan, True, "2"])
def test_a_cap_that_would_weaken_agreement_is_refused(cap):
    with pytest.raises(ValueError, match=f"engine_ratio_cap: got {cap!r}; accepted is a finite number of at least 1"):
        Estimator("grpo_tis", engine_ratio_cap=cap)
