"""Bad input to what proves, enumerates and samples: refused by name.  A new case is a row of ROWS."""

import math

import numpy as np
import pytest
import torch
from bad_input import (
    NOT_A_FUNCTION,
    NOT_A_LIST,
    NOT_A_NAME,
    NOT_A_NUMBER,
    NOT_A_TENSOR,
    NOT_WHOLE,
    SOMETHING_ELSE,
    Nothing,
    Row,
    check_refusal,
    name_of,
)

from rlhelpers.evidence.statistics import Interval
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.theory import enumeration, montecarlo, symbolic
from rlhelpers.theory.enumeration import TabularPolicy

POLICY, OLD, OTHER = TabularPolicy(2, 2), TabularPolicy(2, 2, seed=1), TabularPolicy(3, 2)
REWARDS = torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)
CHANCES, SCORES = POLICY.probabilities().detach(), POLICY.scores()
GROUPS, _ = enumeration.all_groups(POLICY, 2)
TWO = {"policy": POLICY, "old": OLD, "rewards": REWARDS, "blocks": [[0], [1]]}
SAMPLES = np.arange(5.0)
GOOD = {
    "TabularPolicy": (TabularPolicy, {"vocabulary": 2, "steps": 2, "end_token": None, "theta": None, "seed": 0}),
    "TabularPolicy.policy_gradient": (POLICY.policy_gradient, {"rewards": REWARDS}),
    "moments": (enumeration.moments, {"probabilities": CHANCES, "estimates": SCORES}),
    "optimal_baseline": (
        enumeration.optimal_baseline,
        {"probabilities": CHANCES, "rewards": REWARDS, "scores": SCORES},
    ),
    "all_groups": (enumeration.all_groups, {"policy": POLICY, "group_size": 2}),
    "group_estimates": (
        enumeration.group_estimates,
        {"policy": POLICY, "rewards": REWARDS, "groups": GROUPS, "advantage": enumeration.leave_one_out},
    ),
    "kernel_advantage": (
        enumeration.kernel_advantage,
        {"baseline": "mean", "advantage_normalizer": "std", "eps": 1e-6},
    ),
    "leave_one_out": (enumeration.leave_one_out, {"grouped": REWARDS[GROUPS]}),
    "expected_update": (
        enumeration.expected_update,
        {"policy": POLICY, "rewards": REWARDS, "group_size": 2, "estimator": Estimator("grpo"), "sampled_from": OLD},
    ),
    "surrogate": (enumeration.surrogate, TWO),
    "block_estimates": (enumeration.block_estimates, TWO),
    "bernoulli_score": (symbolic.bernoulli_score, {"action": 1}),
    "bernoulli_expectation": (symbolic.bernoulli_expectation, {"f": lambda action: action}),
    "bernoulli_variance": (symbolic.bernoulli_variance, {"f": lambda action: action}),
    "binomial_expectation": (symbolic.binomial_expectation, {"f": lambda k: k, "group_size": 3}),
    "spread": (symbolic.spread, {"normalizer": "std", "k": 1, "group_size": 3}),
    "group_weight": (symbolic.group_weight, {"normalizer": "std", "group_size": 3, "eps": 0}),
    "limit_weight": (symbolic.limit_weight, {"normalizer": "std"}),
    "SoftmaxPolicy": (symbolic.SoftmaxPolicy, {"responses": 3}),
    "TokenTree": (symbolic.TokenTree, {"length": 2}),
    "draw": (montecarlo.draw, {"probabilities": CHANCES, "shape": 3, "seed": 0}),
    "mean_interval": (montecarlo.mean_interval, {"samples": SAMPLES, "level": 0.9}),
    "variance_interval": (montecarlo.variance_interval, {"samples": SAMPLES, "level": 0.9}),
    "three_ways": (
        montecarlo.three_ways,
        {"name": "mean", "closed": 1.0, "enumerated": 1.0, "sampled": Interval(1.0, 0.5, 1.5, 100)},
    ),
}
NO_REWARDS = [*NOT_A_TENSOR[:-2], REWARDS.float(), REWARDS.long(), REWARDS[:3], REWARDS[:, None]]
NO_CHANCES = [-CHANCES, 2 * CHANCES, CHANCES[:3]]
NO_BLOCKS = [*NOT_A_LIST, [[2]], [[-1]], [[0, 0]], [0, 1], [[0.5]], ["0"], [None]]
NO_SAMPLES = [None, "text", [], [1.0], 3, ["a", "b"], [1.0, math.nan], [1.0, math.inf], [Nothing(), Nothing()]]
ROWS = [
    Row("TabularPolicy", "vocabulary", [*NOT_WHOLE, 1]),
    Row("TabularPolicy", "vocabulary", [1001, 10**20], "responses; accepted are at most 1,000,000"),
    Row("TabularPolicy", "steps", [*NOT_WHOLE, 0]),
    Row("TabularPolicy", "steps", [20, 10**20], "responses; accepted are at most 1,000,000"),
    Row("TabularPolicy", "end_token", [*NOT_WHOLE[1:], 2]),
    Row("TabularPolicy", "theta", NOT_A_TENSOR[1:]),
    Row("TabularPolicy", "theta", [torch.zeros(3, 2), torch.zeros(2, 3).double()]),
    Row("TabularPolicy", "theta", [torch.full((3, 2), math.nan).double()], "theta: not all of its numbers are finite"),
    Row("TabularPolicy", "seed", NOT_WHOLE),
    Row("TabularPolicy.policy_gradient", "rewards", NO_REWARDS),
    Row("TabularPolicy.policy_gradient", "rewards", [REWARDS * math.nan], "rewards: not all of its numbers are finite"),
    Row("moments", "probabilities", NOT_A_TENSOR),
    Row("moments", "probabilities", NO_CHANCES, "probabilities: one is below 0, or their sum is not 1"),
    Row("moments", "estimates", NOT_A_TENSOR),
    Row("moments", "estimates", [SCORES[:3], SCORES.float(), SCORES[:, 0, None, None]]),
    Row("optimal_baseline", "probabilities", NO_CHANCES, "probabilities: one is below 0, or their sum is not 1"),
    Row("optimal_baseline", "rewards", NO_REWARDS),
    Row("optimal_baseline", "scores", [*NOT_A_TENSOR, SCORES[:3], SCORES.float()]),
    Row("all_groups", "policy", SOMETHING_ELSE),
    Row("all_groups", "group_size", [*NOT_WHOLE, 0]),
    Row("all_groups", "group_size", [10, 10**20], "groups; accepted are at most 1,000,000"),
    Row("group_estimates", "policy", SOMETHING_ELSE),
    Row("group_estimates", "rewards", NO_REWARDS),
    Row("group_estimates", "groups", [*NOT_A_TENSOR, GROUPS - 1, GROUPS + 1, GROUPS[0], GROUPS.double()]),
    Row("group_estimates", "advantage", NOT_A_FUNCTION),
    Row("group_estimates", "advantage", [lambda rewards: rewards[:, :1], lambda rewards: 1.0]),
    Row("kernel_advantage", "baseline", NOT_A_NAME),
    Row("kernel_advantage", "advantage_normalizer", NOT_A_NAME),
    Row("kernel_advantage", "eps", [*NOT_A_NUMBER, -1, math.inf], "advantage_eps: got "),
    Row("leave_one_out", "grouped", [*NOT_A_TENSOR, REWARDS, REWARDS[:, None]]),
    Row("expected_update", "policy", SOMETHING_ELSE),
    Row("expected_update", "rewards", NO_REWARDS),
    Row("expected_update", "group_size", [*NOT_WHOLE, 0]),
    Row("expected_update", "group_size", [1], '"std" need'),
    Row("expected_update", "estimator", SOMETHING_ELSE),
    Row("expected_update", "sampled_from", SOMETHING_ELSE[1:]),
    Row("expected_update", "sampled_from", [OTHER], "policy, sampled_from: their responses are not the same ones"),
    *(
        row
        for function in ("surrogate", "block_estimates")
        for row in (
            Row(function, "policy", SOMETHING_ELSE),
            Row(function, "old", SOMETHING_ELSE),
            Row(function, "old", [OTHER], "policy, old: their responses are not the same ones"),
            Row(function, "rewards", NO_REWARDS),
            Row(function, "blocks", NO_BLOCKS),
        )
    ),
    Row("bernoulli_score", "action", [None, 2, -1, 0.5, "1", []]),
    Row("bernoulli_expectation", "f", NOT_A_FUNCTION),
    Row("bernoulli_variance", "f", NOT_A_FUNCTION),
    Row("binomial_expectation", "f", NOT_A_FUNCTION),
    Row("binomial_expectation", "group_size", [*NOT_WHOLE, 0]),
    Row("spread", "normalizer", [*NOT_A_NAME, "median"]),
    Row("group_weight", "normalizer", [*NOT_A_NAME, "median"]),
    Row("group_weight", "group_size", [*NOT_WHOLE, 1]),
    Row("limit_weight", "normalizer", NOT_A_NAME),
    Row("SoftmaxPolicy", "responses", [*NOT_WHOLE, 1]),
    Row("TokenTree", "length", [*NOT_WHOLE, 0]),
    Row("draw", "probabilities", NOT_A_TENSOR),
    Row("draw", "probabilities", NO_CHANCES, "probabilities: one is below 0, or their sum is not 1"),
    Row("draw", "probabilities", [CHANCES * math.nan], "probabilities: not all of its numbers are finite"),
    Row("draw", "shape", [*NOT_WHOLE, (3, -1), (3, 0.5)]),
    Row("draw", "seed", NOT_WHOLE),
    Row("mean_interval", "samples", [*NO_SAMPLES, np.ones((3, 2))]),
    Row("mean_interval", "level", [*NOT_A_NUMBER, 0, 1, -1, math.inf]),
    Row("variance_interval", "samples", NO_SAMPLES),
    Row("variance_interval", "level", [*NOT_A_NUMBER, 0, 1]),
    Row("three_ways", "closed", [None, "text", [], Nothing()]),
    Row("three_ways", "enumerated", [None, "text", [], Nothing()]),
    Row("three_ways", "sampled", SOMETHING_ELSE),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)


def test_exactly_a_million_is_accepted():
    assert len(TabularPolicy(10, 6).tokens) == 10**6
