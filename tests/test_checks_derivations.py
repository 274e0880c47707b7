"""The exercises of notebook 02, beyond what test_exercises asks of all: other right and wrong solutions."""

import pytest
import torch

from rlhelpers import exercises as check
from rlhelpers.theory import symbolic


@pytest.mark.parametrize("normalizer", ["none", "std", "mean"])
def test_the_weights_of_the_check_are_those_of_the_theory(normalizer):
    wanted = float(symbolic.group_weight(normalizer, 6, 0.1).subs(symbolic.P, 0.3))
    assert check.group_weight.reference(0.3, 6, normalizer, 0.1) == pytest.approx(wanted, rel=1e-12)


def test_a_function_that_only_takes_numbers_fails_on_symbols(capsys):
    def with_math(n, p, b):
        return float(p * (1 - p) * (1 - p - b) ** 2 / n)

    assert check.baseline_variance(with_math) == 0
    assert "an error, TypeError" in capsys.readouterr().out


def test_a_factor_that_depends_on_nothing_is_not_enough():
    def variance_with_wrong_power(n, p, b):
        return p * (1 - p) * (1 - p - b) / n

    assert check.baseline_variance(variance_with_wrong_power) < 1


def test_the_silent_bug_is_found_and_its_repair_accepted(capsys):
    def buggy(contributions):
        return (contributions.std() / contributions.numel() ** 0.5).item()

    def repaired(contributions):
        return contributions.mean(dim=1).std() / len(contributions) ** 0.5

    assert check.standard_error.repairs(buggy, repaired) == 1
    assert "The bug is found: copies within a group are no new evidence" in capsys.readouterr().out
    assert check.standard_error.repairs(buggy, buggy) < 1
    assert "The bug is found" not in capsys.readouterr().out


def test_a_policy_of_three_tokens_and_autograd_may_be_used():
    """A solution may return a tensor with one element."""

    def as_tensor(probabilities, rewards, scores):
        weights = probabilities * torch.linalg.vector_norm(scores, dim=1) ** 2
        return weights @ rewards / weights.sum()

    assert check.optimal_baseline(as_tensor) == 1
