"""The listed policy against a model written in loops, and expectations against finite differences."""

import itertools
import math

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
    Row,
    check_refusal,
    name_of,
)

from rlhelpers.kernels import aggregate_loss_across_microbatch, compute_policy_gradient_loss
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.theory.enumeration import (
    TabularPolicy,
    all_groups,
    block_estimates,
    expected_update,
    group_estimates,
    kernel_advantage,
    moments,
    optimal_baseline,
    surrogate,
)
from rlhelpers.theory.symbolic import P, group_weight


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.fixture
def policy():
    return TabularPolicy(3, 3, end_token=2, seed=1)


@pytest.fixture
def rewards(policy):
    return (policy.tokens == 0).any(dim=1).double()


def test_responses_are_all_there_and_once():
    policy = TabularPolicy(3, 2, end_token=2)
    listed = [tuple(row[mask].tolist()) for row, mask in zip(policy.tokens, policy.mask, strict=True)]
    wanted = [(a, b) for a in (0, 1) for b in (0, 1, 2)] + [(2,)]
    assert sorted(listed) == sorted(wanted)
    assert policy.lengths.tolist() == [len(response) for response in listed]


def test_without_an_end_token_every_response_has_all_tokens():
    policy = TabularPolicy(2, 4)
    assert policy.tokens.tolist() == [list(response) for response in itertools.product((0, 1), repeat=4)]
    assert policy.mask.all()


@pytest.mark.parametrize("end_token", [None, 0, 2])
def test_log_probs_against_a_table_of_prefixes(end_token):
    policy = TabularPolicy(3, 3, end_token, seed=3)
    prefixes = [prefix for t in range(3) for prefix in itertools.product(range(3), repeat=t)]
    table = dict(zip(prefixes, policy.theta.detach(), strict=True))
    for row, log_probs, length in zip(policy.tokens, policy.token_log_probs(), policy.lengths, strict=True):
        response = row[:length].tolist()
        wanted = [table[tuple(response[:t])].log_softmax(0)[token].item() for t, token in enumerate(response)]
        assert log_probs.tolist() == pytest.approx(wanted + [0.0] * (3 - len(response)))
    assert policy.probabilities().sum().item() == pytest.approx(1, abs=1e-14)


def test_scores_against_autograd_one_response_at_a_time(policy):
    for y, score in enumerate(policy.scores()):
        close(score, policy.gradient(policy.token_log_probs()[y].sum()))
    close(policy.token_scores()[~policy.mask], torch.zeros(int((~policy.mask).sum()), policy.theta.numel()).double())


def test_policy_gradient_against_finite_differences(policy, rewards):
    gradient, step = policy.policy_gradient(rewards), 1e-6
    for i in range(0, policy.theta.numel(), 7):
        values = []
        for sign in (1, -1):
            theta = policy.theta.detach().clone()
            theta.view(-1)[i] += sign * step
            values.append(TabularPolicy(3, 3, 2, theta).probabilities() @ rewards)
        assert ((values[0] - values[1]) / (2 * step)).item() == pytest.approx(gradient[i].item(), abs=1e-8)


def test_exactly_a_million_responses_are_accepted():
    assert len(TabularPolicy(10, 6).tokens) == 10**6


def test_moments():
    chances = torch.tensor([0.25, 0.75], dtype=torch.float64)
    got = moments(chances, torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    assert got.mean.tolist() == [1, 3]
    assert got.total_variance == pytest.approx(16 * 0.25 * 0.75 * 2)


def test_groups_are_independent(policy):
    groups, chance = all_groups(policy, 2)
    assert groups.shape == (15**2, 2) and chance.sum().item() == pytest.approx(1, abs=1e-14)
    single = policy.probabilities().detach()
    assert chance[17].item() == pytest.approx((single[1] * single[2]).item())


@pytest.mark.parametrize("size", [2, 3])
def test_group_mean_and_leave_one_out(policy, rewards, size):
    groups, chance = all_groups(policy, size)
    gradient = policy.policy_gradient(rewards)
    by_mean = group_estimates(policy, rewards, groups, kernel_advantage("mean", "none"))
    left_out = group_estimates(policy, rewards, groups, kernel_advantage("leave_one_out", "none"))
    close(moments(chance, by_mean).mean, (size - 1) / size * gradient)
    close(moments(chance, left_out).mean, gradient)
    close(left_out, by_mean * size / (size - 1))


@pytest.mark.parametrize("name", ["dr_grpo", "grpo_constant", "maxrl"])
def test_expected_update_is_the_group_weight_times_gradient(policy, rewards, name):
    row = ESTIMATORS[name]
    p = (policy.probabilities() @ rewards).item()
    weight = float(group_weight(row.advantage_normalizer, 3, row.advantage_eps).subs(P, p))
    close(expected_update(policy, rewards, 3, row), weight * policy.policy_gradient(rewards))


def test_expected_update_of_rft_is_the_gradient(policy, rewards):
    close(expected_update(policy, rewards, 2, ESTIMATORS["rft"]), policy.policy_gradient(rewards))


@pytest.mark.parametrize("name", ["grpo", "offpolicy_noclip", "offpolicy_clip", "gspo", "cispo"])
def test_expected_update_is_the_mean_of_the_groups_own_updates(name):
    """Every group's loss and gradient apart, weighted by its probability: one backward pass gives the same."""
    row = ESTIMATORS[name]
    old, new = TabularPolicy(2, 2, end_token=1, seed=1), TabularPolicy(2, 2, end_token=1, seed=2)
    rewards = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    groups, chance = all_groups(old, 2)
    advantages = kernel_advantage(row.baseline, row.advantage_normalizer)(rewards[groups])
    wanted = torch.zeros(new.theta.numel(), dtype=torch.float64)
    for group, probability, advantage in zip(groups, chance, advantages, strict=True):
        loss, _ = compute_policy_gradient_loss(
            advantage,
            new.token_log_probs()[group],
            row.importance_reweighting_method,
            old.token_log_probs()[group],
            row.cliprange,
            new.mask[group],
        )
        wanted -= probability * new.gradient(aggregate_loss_across_microbatch(loss, new.mask[group]))
    close(expected_update(new, rewards, 2, row, sampled_from=old), wanted)
    assert wanted.norm() > 1e-3


def test_length_normalization_follows_a_reward_of_its_own(policy, rewards):
    """(r - eta) / len with eta held fixed; and a learning rate where all lengths are equal."""
    row = Estimator("sequence", "mean", "none", "sequence")
    eta = (policy.probabilities() @ rewards).detach()
    own = policy.gradient(policy.probabilities() @ ((rewards - eta) / policy.lengths))
    update = expected_update(policy, rewards, 2, row)
    close(update, own / 2)
    assert torch.cosine_similarity(update, policy.policy_gradient(rewards), dim=0) < 0.99
    equal = TabularPolicy(2, 3, seed=4)
    first = (equal.tokens[:, 0] == 0).double()
    close(expected_update(equal, first, 2, row), equal.policy_gradient(first) / 2 / 3)


@pytest.mark.parametrize("seed", range(3))
def test_optimal_baseline_has_the_least_total_variance(seed):
    policy = TabularPolicy(3, 2, end_token=2, seed=seed)
    rewards = (policy.tokens[:, 0] == 0).double()
    chances, scores = policy.probabilities(), policy.scores()

    def total_variance(b):
        return moments(chances, (rewards - b)[:, None] * scores).total_variance

    best = optimal_baseline(chances, rewards, scores)
    assert all(total_variance(best) < total_variance(best + step) for step in (-0.1, -1e-3, 1e-3, 0.1))


@pytest.mark.parametrize("blocks", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]], ids=str)
def test_surrogates(blocks):
    new, old = TabularPolicy(2, 4, seed=5), TabularPolicy(2, 4, seed=6)
    rewards = (new.tokens.sum(dim=1) == 2).double()
    expected = moments(old.probabilities(), block_estimates(new, old, rewards, blocks)).mean
    close(new.gradient(surrogate(new, old, rewards, blocks)), expected)
    if len(blocks) == 1:
        close(expected, new.policy_gradient(rewards))
    else:
        assert (expected - new.policy_gradient(rewards)).norm() > 1e-3


def test_noclip_is_the_token_surrogate():
    new, old = TabularPolicy(2, 3, seed=5), TabularPolicy(2, 3, seed=6)
    rewards = (new.tokens[:, 2] == 1).double()
    row = Estimator("noclip", "none", "none", "constant", "noclip")
    close(
        expected_update(new, rewards, 1, row, sampled_from=old),
        new.gradient(surrogate(new, old, rewards, [[0], [1], [2]])),
    )


# ---- bad input is refused by name; a new case is a row of ROWS

POLICY, OLD, OTHER = TabularPolicy(2, 2), TabularPolicy(2, 2, seed=1), TabularPolicy(3, 2)
REWARDS = torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)
CHANCES, SCORES = POLICY.probabilities().detach(), POLICY.scores()
GROUPS, _ = all_groups(POLICY, 2)
GROUPED = {"policy": POLICY, "rewards": REWARDS, "groups": GROUPS, "advantage": kernel_advantage("mean", "none")}
UPDATED = {"policy": POLICY, "rewards": REWARDS, "group_size": 2, "estimator": Estimator("grpo"), "sampled_from": OLD}
TWO = {"policy": POLICY, "old": OLD, "rewards": REWARDS, "blocks": [[0], [1]]}
GOOD = {
    "TabularPolicy": (TabularPolicy, {"vocabulary": 2, "steps": 2, "end_token": None, "theta": None, "seed": 0}),
    "TabularPolicy.policy_gradient": (POLICY.policy_gradient, {"rewards": REWARDS}),
    "moments": (moments, {"probabilities": CHANCES, "estimates": SCORES}),
    "optimal_baseline": (optimal_baseline, {"probabilities": CHANCES, "rewards": REWARDS, "scores": SCORES}),
    "all_groups": (all_groups, {"policy": POLICY, "group_size": 2}),
    "group_estimates": (group_estimates, GROUPED),
    "kernel_advantage": (kernel_advantage, {"baseline": "mean", "advantage_normalizer": "std", "eps": 1e-6}),
    "expected_update": (expected_update, UPDATED),
    "surrogate": (surrogate, TWO),
    "block_estimates": (block_estimates, TWO),
}
NO_REWARDS = [*NOT_A_TENSOR[:-2], REWARDS.float(), REWARDS.long(), REWARDS[:3], REWARDS[:, None]]
NO_CHANCES = [-CHANCES, 2 * CHANCES, CHANCES[:3]]
NO_BLOCKS = [*NOT_A_LIST, [[2]], [[-1]], [[0, 0]], [0, 1], [[0.5]], ["0"], [None]]
ROWS = [
    Row("TabularPolicy", "vocabulary", [*NOT_WHOLE, 1]),
    Row("TabularPolicy", "vocabulary", [1001, 10**20], "responses; accepted are at most 1,000,000"),
    Row("TabularPolicy", "steps", [*NOT_WHOLE, 0]),
    Row("TabularPolicy", "steps", [20, 10**20], "responses; accepted are at most 1,000,000"),
    Row("TabularPolicy", "end_token", NOT_WHOLE[1:]),
    Row("TabularPolicy", "end_token", [2], "end_token: got 2; accepted is None or 0 to 1"),
    Row("TabularPolicy", "theta", NOT_A_TENSOR[1:]),
    Row("TabularPolicy", "theta", [torch.zeros(3, 2)], "theta: got torch.float32 (3, 2); accepted is float64 (3, 2)"),
    Row("TabularPolicy", "theta", [torch.zeros(2, 3).double()], "theta: got torch.float64 (2, 3); accepted is"),
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
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
