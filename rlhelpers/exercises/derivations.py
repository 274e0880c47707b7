"""Exercises of notebook 02: what estimators do on average, and how much they vary."""

import functools
import math

import torch

from rlhelpers.exercises.exercise import Exercise
from rlhelpers.theory import enumeration


@functools.cache
def _symbols() -> dict:
    import sympy  # here, because it takes half a second and most notebooks do without

    return {name: sympy.Symbol(name, positive=True) for name in "npb"}


def _variance(n, p, b):
    return p * (1 - p) * (1 - p - b) ** 2 / n


def _second_moment_of_the_estimate(n, p, b):
    return (p * ((1 - b) * (1 - p)) ** 2 + (1 - p) * (b * p) ** 2) / n


baseline_variance = Exercise(
    "baseline_variance",
    _variance,
    {
        "without a baseline it is the variance of eq. 18": lambda: [
            {"n": 1, "p": 0.5, "b": 0},
            {"n": 10, "p": 0.2, "b": 0},
            _symbols() | {"b": 0},
        ],
        "with a baseline it is the variance of eq. 19": lambda: [
            {"n": 1, "p": 0.5, "b": 1},
            {"n": 4, "p": 0.9, "b": 0.3},
            _symbols(),
        ],
        "the baseline may be p itself": lambda: [{"n": 1, "p": 0.9, "b": 0.9}, _symbols() | {"b": _symbols()["p"]}],
    },
    {
        "E[Z^2]/n, without taking E[Z]^2 away": _second_moment_of_the_estimate,
        "the variance of one sample: the mean of n varies less": lambda n, p, b: _variance(1, p, b),
        "a baseline that is not used": lambda n, p, b: _variance(n, p, 0),
        "the variance of (r - b), without the score": lambda n, p, b: p * (1 - p) / n,
    },
)


@functools.cache
def _policies() -> list[dict]:
    """Probabilities, rewards, scores: baseline_calcs' two actions at three p, then three small language models."""
    cases = []
    for p in (0.5, 0.2, 0.9):
        chances = torch.tensor([1 - p, p], dtype=torch.float64)
        actions = torch.tensor([0.0, 1.0], dtype=torch.float64)
        cases.append({"probabilities": chances, "rewards": actions, "scores": (actions - p)[:, None]})
    for seed in range(3):
        policy = enumeration.TabularPolicy(3, 2, end_token=2, seed=seed)
        rewards = (policy.tokens[:, 0] == seed).double()
        chances = policy.probabilities().detach()
        cases.append({"probabilities": chances, "rewards": rewards, "scores": policy.scores()})
    return cases


def _weighted_by(probabilities, rewards, weights):
    weights = probabilities * weights
    return (weights @ rewards / weights.sum()).item()


optimal_baseline = Exercise(
    "optimal_baseline",
    enumeration.optimal_baseline,
    {
        "for one parameter and two actions it is best": lambda: _policies()[:3],
        "for a language model it is best": lambda: _policies()[3:],
        "where every response is rewarded alike, it is that reward": lambda: [
            inputs | {"rewards": torch.full_like(inputs["rewards"], 0.7)} for inputs in _policies()
        ],
    },
    {
        "the mean reward E[r]": lambda probabilities, rewards, scores: (probabilities @ rewards).item(),
        "weights |score| that are not squared": lambda probabilities, rewards, scores: _weighted_by(
            probabilities, rewards, scores.norm(dim=1)
        ),
        "a mean in which every response counts the same, whatever its probability": (
            lambda probabilities, rewards, scores: _weighted_by(
                torch.ones_like(probabilities), rewards, scores.square().sum(dim=1)
            )
        ),
    },
)


def _group_weight(p, group_size, normalizer, eps, correction=1):
    total = 0.0
    for k in range(1, group_size):
        std = math.sqrt(k * (group_size - k) / (group_size * (group_size - correction)))
        spread = {"none": 1.0, "std": std + eps, "mean": k / group_size + eps}[normalizer]
        chance = math.comb(group_size, k) * p**k * (1 - p) ** (group_size - k)
        total += chance * k * (group_size - k) / group_size**2 / spread
    return total / (p * (1 - p))


def _in_the_limit(p, group_size, normalizer, eps):
    return {"none": 1.0, "std": 1 / math.sqrt(p * (1 - p)), "mean": 1 / p}[normalizer]


def _weights(normalizer, eps=0.0):
    return [
        {"p": p, "group_size": size, "normalizer": normalizer, "eps": eps}
        for p, size in ((0.5, 2), (0.1, 2), (0.5, 8), (0.02, 8), (0.9, 16))
    ]


group_weight = Exercise(
    "group_weight",
    _group_weight,
    {
        '"none" gives the weight of Dr. GRPO': _weights("none"),
        '"std" gives the weight of GRPO': _weights("std"),
        '"mean" gives the weight of MaxRL': _weights("mean"),
        "eps is added to what is divided by": _weights("std", 0.1) + _weights("mean", 0.1),
        "without a normalizer eps plays no part": _weights("none", 0.1),
    },
    {
        "a standard deviation with n in it, where torch's has n - 1": functools.partial(_group_weight, correction=0),
        "the limit G -> infinity": _in_the_limit,
        "the factor of grad log-odds: dividing by p (1 - p) is missing": lambda **given: (
            given["p"] * (1 - given["p"]) * _group_weight(**given)
        ),
        "an eps that is left out": lambda **given: _group_weight(**given | {"eps": 0.0}),
        "a sum over the rewarded responses only": lambda **given: (1 - given["p"]) * _group_weight(**given),
    },
)


def _surrogate(new_log_probs, old_log_probs, rewards, blocks):
    total = 0.0
    for block in blocks:
        log_probs = old_log_probs.clone()
        log_probs[:, block] = new_log_probs[:, block]
        total += (log_probs.sum(dim=1).exp() @ rewards).item()
    return total


def _with_blocks(blocks_of):
    """A surrogate whose blocks are a function of the length."""
    return lambda new_log_probs, old_log_probs, rewards: _surrogate(
        new_log_probs, old_log_probs, rewards, blocks_of(new_log_probs.shape[1])
    )


_of_pairs = _with_blocks(lambda length: [[t, t + 1] for t in range(0, length, 2)])


def _two_policies(length, seed):
    """Log-probs of all 2^length responses under two policies; the reward asks for as many zeros as ones."""
    new, old = enumeration.TabularPolicy(2, length, seed=seed), enumeration.TabularPolicy(2, length, seed=seed + 100)
    return {
        "new_log_probs": new.token_log_probs().detach(),
        "old_log_probs": old.token_log_probs().detach(),
        "rewards": (new.tokens.sum(dim=1) == length // 2).double(),
    }


pairwise_surrogate = Exercise(
    "pairwise_surrogate",
    _of_pairs,
    {
        "with one pair it is the new policy's own J": lambda: [_two_policies(2, seed) for seed in range(3)],
        "it is the surrogate of eq. 55": lambda: [
            _two_policies(length, seed) for length in (4, 6) for seed in range(3)
        ],
    },
    {
        "one token at a time: the surrogate of eq. 51": _with_blocks(lambda length: [[t] for t in range(length)]),
        "all tokens from the new policy: J itself": _with_blocks(lambda length: [list(range(length))]),
        "pairs that overlap: each token but the first and the last is in two": _with_blocks(
            lambda length: [[t, t + 1] for t in range(length - 1)]
        ),
        "a mean over the pairs, where eq. 55 has a sum": lambda **given: (
            2 * _of_pairs(**given) / given["new_log_probs"].shape[1]
        ),
    },
)


def _second_moment(p, q, length):
    return (p**2 / q + (1 - p) ** 2 / (1 - q)) ** length


second_moment = Exercise(
    "second_moment",
    _second_moment,
    {
        "it is 1 where nothing has changed": [{"p": 0.5, "q": 0.5, "length": n} for n in (1, 8)],
        "it is right for one token": [{"p": p, "q": q, "length": 1} for p, q in ((0.6, 0.5), (0.5, 0.6), (0.9, 0.2))],
        "it is right for many tokens": [{"p": 0.6, "q": 0.5, "length": n} for n in (2, 3, 10, 100)],
    },
    {
        "the variance: E[w]^2 = 1 is already taken away": lambda p, q, length: _second_moment(p, q, length) - 1,
        "the old and the new policy exchanged": lambda p, q, length: _second_moment(q, p, length),
        "the mean E[w], which is 1": lambda p, q, length: 1.0,
        "an expectation under the new policy: w^2 averaged with p": lambda p, q, length: (
            (p * (p / q) ** 2 + (1 - p) * ((1 - p) / (1 - q)) ** 2) ** length
        ),
        "moments that are added up where they multiply": lambda p, q, length: _second_moment(p, q, 1) * length,
    },
)


def _standard_error(contributions):
    return (contributions.mean(dim=1).std() / math.sqrt(len(contributions))).item()


def _contributions(groups, size, seed):
    """(r - mu) score of sampled groups, one difficulty for each."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(groups, 1, generator=generator, dtype=torch.float64)
    rewards = (torch.rand(groups, size, generator=generator, dtype=torch.float64) < p).double()
    return {"contributions": (rewards - rewards.mean(dim=1, keepdim=True)) * (rewards - p)}


def _copies(size):
    return {"contributions": torch.tensor([[1.0], [0.0], [0.5]], dtype=torch.float64).expand(3, size)}


standard_error = Exercise(
    "standard_error",
    _standard_error,
    {
        "one response per group: std over the square root of their number": [_copies(1)],
        "copies within a group are no new evidence": [_copies(2), _copies(8)],
        "it is right for groups whose responses share a mean and a difficulty": [
            _contributions(groups, size, groups) for groups, size in ((2, 2), (4, 8), (50, 8))
        ],
    },
    {
        "responses of one group that are taken for independent": lambda contributions: (
            contributions.std() / math.sqrt(contributions.numel())
        ).item(),
        "the spread of one group's mean: it is not yet divided by the square root of their number": (
            lambda contributions: contributions.mean(dim=1).std().item()
        ),
        "a standard deviation with n in it": lambda contributions: (
            contributions.mean(dim=1).std(correction=0) / math.sqrt(len(contributions))
        ).item(),
    },
)
