"""The formulas in sympy against numbers, and the claims that they prove."""

import itertools
import math
import random

import pytest
import sympy
import torch
from bad_input import NOT_A_FUNCTION, NOT_A_NAME, NOT_WHOLE, Row, check_refusal, name_of

from rlhelpers.kernels.estimators import NORMALIZERS
from rlhelpers.theory.symbolic import (
    B,
    G,
    K,
    P,
    SoftmaxPolicy,
    TokenTree,
    bernoulli_expectation,
    bernoulli_score,
    bernoulli_variance,
    binomial_expectation,
    group_weight,
    limit_weight,
    spread,
)


def test_the_score_of_the_sigmoid_policy():
    assert bernoulli_score(1) == 1 - P
    assert bernoulli_score(0) == -P


@pytest.mark.parametrize(
    ("b", "wanted"),
    [(0, P * (1 - P) ** 3), (B, P * (1 - P) * (1 - P - B) ** 2), (P, P * (1 - P) * (1 - 2 * P) ** 2), (1 - P, 0)],
)
def test_baseline_calcs(b, wanted):
    def term(action):
        return (action - b) * bernoulli_score(action)

    assert sympy.expand(bernoulli_variance(term) - wanted) == 0
    assert sympy.expand(bernoulli_expectation(term) - P * (1 - P)) == 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_binomial_moments(size):
    assert sympy.expand(binomial_expectation(lambda k: sympy.Integer(1), size)) == 1
    assert sympy.expand(binomial_expectation(sympy.Integer, size) - size * P) == 0
    variance = binomial_expectation(lambda k: sympy.Integer(k) ** 2, size) - (size * P) ** 2
    assert sympy.expand(variance - size * P * (1 - P)) == 0


@pytest.mark.parametrize("normalizer", ["none", "std", "mean"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_spread_is_what_the_kernel_divides_by(normalizer, size):
    for k in range(size + 1):
        rewards = torch.tensor([[1.0] * k + [0.0] * (size - k)], dtype=torch.float64)
        function = NORMALIZERS[normalizer]
        wanted = 1.0 if function is None else function(rewards).item()
        assert float(spread(normalizer, k, size)) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("normalizer", ["none", "std", "mean"])
@pytest.mark.parametrize(("size", "p", "eps"), [(2, 0.5, 0.0), (4, 0.1, 0.0), (8, 0.7, 0.05)])
def test_group_weight_against_a_sum_over_reward_vectors(normalizer, size, p, eps):
    """The expected update of the sigmoid policy over its gradient p (1 - p), with every group written out."""
    total = 0.0
    for rewards in itertools.product((0, 1), repeat=size):
        mean = sum(rewards) / size
        if mean in (0, 1):
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (size - 1))
        divisor = {"none": 1.0, "std": std + eps, "mean": mean + eps}[normalizer]
        chance = math.prod(p if r else 1 - p for r in rewards)
        total += chance * sum((r - mean) / divisor * (r - p) for r in rewards) / size
    weight = float(group_weight(normalizer, size, eps).subs(P, p))
    assert weight == pytest.approx(total / (p * (1 - p)), rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_closed_forms_of_the_weights(size):
    assert sympy.expand(group_weight("none", size)) == sympy.Rational(size - 1, size)
    series = sum((1 - P) ** m for m in range(size - 1))
    assert sympy.expand(group_weight("mean", size) - series) == 0


def test_limits_of_the_weights():
    wanted = {"none": 1, "std": 1 / sympy.sqrt(P * (1 - P)), "mean": 1 / P}
    for normalizer, weight in wanted.items():
        assert sympy.simplify(limit_weight(normalizer) - weight) == 0
        at = [float(group_weight(normalizer, size).subs(P, 0.3)) for size in (8, 64, 256)]
        errors = [abs(value - float(weight.subs(P, 0.3) if normalizer != "none" else 1)) for value in at]
        assert errors[0] > errors[1] > errors[2] or errors[2] < 1e-9


def test_spread_takes_symbols():
    assert sympy.simplify(spread("std", K, G) ** 2 - K * (G - K) / (G * (G - 1))) == 0


@pytest.fixture(scope="module")
def softmax():
    return SoftmaxPolicy(3)


def test_softmax_score_is_one_hot_minus_probabilities(softmax):
    for y in softmax.responses:
        wanted = sympy.Matrix([int(i == y) - softmax.probabilities[i] for i in softmax.responses])
        assert (softmax.score(y) - wanted).applyfunc(sympy.cancel).is_zero_matrix


def test_score_function_identity_and_baseline(softmax):
    gradient = softmax.gradient(softmax.expectation(lambda y: softmax.rewards[y]))
    estimate = softmax.expectation(lambda y: (softmax.rewards[y] - B) * softmax.score(y))
    assert (estimate - gradient).applyfunc(sympy.cancel).is_zero_matrix
    a_baseline_of_the_response = softmax.expectation(
        lambda y: (softmax.rewards[y] - B * softmax.rewards[y]) * softmax.score(y)
    )
    assert not (a_baseline_of_the_response - gradient).applyfunc(sympy.cancel).is_zero_matrix


def test_a_group_expectation_of_one_response_is_its_expectation(softmax):
    over_groups = softmax.group_expectation(lambda group: softmax.rewards[group[0]], 2)
    alone = softmax.expectation(lambda y: softmax.rewards[y])
    assert sympy.cancel(over_groups - alone) == 0


BLOCKINGS = [[[0], [1], [2]], [[0, 1], [2]], [[0, 2], [1]], [[0, 1, 2]]]


@pytest.mark.parametrize("blocks", BLOCKINGS, ids=str)
def test_the_gradient_of_the_surrogate_is_the_expected_estimator(blocks):
    tree = TokenTree(3)
    surrogate = tree.surrogate(blocks)
    for prefix in tree.prefixes:
        parameter = tree.symbol("p", prefix)
        assert sympy.expand(sympy.diff(surrogate, parameter) - tree.expected_estimator(blocks, parameter)) == 0


def test_surrogates_of_different_blocks_differ():
    tree = TokenTree(3)
    parameters = [tree.symbol("p", prefix) for prefix in tree.prefixes]
    for blocks, others in itertools.permutations(BLOCKINGS, 2):
        slopes = [sympy.diff(tree.surrogate(blocks), parameter) for parameter in parameters]
        estimators = [tree.expected_estimator(others, parameter) for parameter in parameters]
        assert any(sympy.expand(s - e) != 0 for s, e in zip(slopes, estimators, strict=True))


def test_tree_probabilities_sum_to_one():
    tree = TokenTree(3)
    total = sum(tree.block("p", response, range(3)) for response in tree.responses)
    assert sympy.expand(total) == 1
    generator = random.Random(0)
    values = {tree.symbol("p", prefix): generator.random() for prefix in tree.prefixes}
    assert all(0 < tree.block("p", response, range(3)).subs(values) < 1 for response in tree.responses)


# ---- bad input is refused by name; a new case is a row of ROWS

GOOD = {
    "bernoulli_score": (bernoulli_score, {"action": 1}),
    "bernoulli_expectation": (bernoulli_expectation, {"f": lambda action: action}),
    "bernoulli_variance": (bernoulli_variance, {"f": lambda action: action}),
    "binomial_expectation": (binomial_expectation, {"f": lambda k: k, "group_size": 3}),
    "spread": (spread, {"normalizer": "std", "k": 1, "group_size": 3}),
    "group_weight": (group_weight, {"normalizer": "std", "group_size": 3, "eps": 0}),
    "limit_weight": (limit_weight, {"normalizer": "std"}),
    "SoftmaxPolicy": (SoftmaxPolicy, {"responses": 3}),
    "TokenTree": (TokenTree, {"length": 2}),
}
ROWS = [
    Row("bernoulli_score", "action", [None, 2, -1, 0.5, "1", []]),
    Row("bernoulli_expectation", "f", NOT_A_FUNCTION),
    Row("bernoulli_variance", "f", NOT_A_FUNCTION),
    Row("binomial_expectation", "f", NOT_A_FUNCTION),
    Row("binomial_expectation", "group_size", [*NOT_WHOLE, 0]),
    Row("spread", "normalizer", [*NOT_A_NAME, "median"]),
    Row("group_weight", "normalizer", NOT_A_NAME),
    Row("group_weight", "normalizer", ["median"], "normalizer: got 'median'; accepted are none, std, mean"),
    Row("group_weight", "group_size", NOT_WHOLE),
    Row("group_weight", "group_size", [1], "group_size: got 1; accepted is a whole number of at least 2"),
    Row("limit_weight", "normalizer", NOT_A_NAME),
    Row("SoftmaxPolicy", "responses", [*NOT_WHOLE, 1]),
    Row("TokenTree", "length", [*NOT_WHOLE, 0]),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
