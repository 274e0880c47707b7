"""A language model so small that every response is listed: expectations are sums, gradients come from autograd.

Nothing is sampled.  Groups go through the kernels themselves: a claim about an estimator is a claim about the code that
trains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhelpers.checks import check_callable, check_has, check_kind, check_list, check_whole, is_whole, refused
from rlhelpers.kernels import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
)
from rlhelpers.kernels.estimators import Estimator

MAX_CASES = 1_000_000  # responses, or groups of them
Blocks = Sequence[Sequence[int]]
"""Positions that share one importance weight: [[0], [1]] token by token, [[0, 1]] the whole response."""


class TabularPolicy:
    """A categorical language model with its own logits for every prefix (handout, eq. 2).

    `theta`: (prefixes, V) float64, a leaf that requires grad; drawn from a normal distribution where it is not given.
    `tokens`: (N, T) int64, all N responses of at most T tokens, in order.  `mask`: (N, T) bool, True at the tokens of
    the response.  With an end token, a response ends at its first one, which counts; padding follows.  Without, every
    response has T tokens.

    Raises ValueError when the sizes are not positive, the end token is not in the vocabulary, or theta does not fit.
    """

    def __init__(
        self, vocabulary: int, steps: int, end_token: int | None = None, theta: Tensor | None = None, seed: int = 0
    ):
        check_whole(2, vocabulary=vocabulary)
        check_whole(1, steps=steps)
        check_whole(0, seed=seed)
        if end_token is not None and (not is_whole(end_token) or end_token not in range(vocabulary)):
            raise refused("end_token", end_token, f"None or 0 to {vocabulary - 1}")
        if vocabulary ** min(steps, 20) > MAX_CASES:  # the power of 10**20 would not come to an end
            raise ValueError(f"vocabulary, steps: {vocabulary}^{steps} responses; accepted are at most {MAX_CASES:,}")
        shape = ((vocabulary**steps - 1) // (vocabulary - 1), vocabulary)
        if theta is None:
            theta = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        _check_doubles(shape, theta=theta)
        self.theta = theta.detach().clone().requires_grad_()
        self.tokens, self.mask = _all_responses(vocabulary, steps, end_token)
        self._prefix_rows = _prefix_rows(self.tokens, vocabulary)

    @property
    def lengths(self) -> Tensor:
        """(N,) int64."""
        return self.mask.sum(dim=1)

    def token_log_probs(self, theta: Tensor | None = None) -> Tensor:
        """log pi(y_t | y_<t), (N, T) with gradient; 0 at padding."""
        distributions = torch.log_softmax(self.theta if theta is None else theta, dim=-1)
        return torch.where(self.mask, distributions[self._prefix_rows, self.tokens], 0.0)

    def probabilities(self) -> Tensor:
        """pi(y) of every response, (N,) with gradient; they sum to 1."""
        return self.token_log_probs().sum(dim=1).exp()

    def token_scores(self) -> Tensor:
        """grad log pi(y_t | y_<t), (N, T, parameters), by autograd; 0 at padding."""
        return torch.func.jacrev(self.token_log_probs)(self.theta.detach()).flatten(2)

    def scores(self) -> Tensor:
        """grad log pi(y), (N, parameters)."""
        return self.token_scores().sum(dim=1)

    def gradient(self, objective: Tensor) -> Tensor:
        """d objective / d theta, (parameters,), of a scalar that was computed from this policy."""
        return torch.autograd.grad(objective, self.theta)[0].flatten()

    def policy_gradient(self, rewards: Tensor) -> Tensor:
        """The exact grad J = grad sum_y pi(y) r(y), (parameters,) (handout, eq. 11)."""
        _check_doubles((len(self.tokens),), rewards=rewards)
        return self.gradient(self.probabilities() @ rewards)


def _all_responses(vocabulary: int, steps: int, end_token: int | None) -> tuple[Tensor, Tensor]:
    tokens = torch.cartesian_prod(*[torch.arange(vocabulary)] * steps).reshape(-1, steps)
    if end_token is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    is_end = tokens == end_token
    ended_before = (is_end.cumsum(dim=1) - is_end.long()) > 0
    # One row for each response: padding is written as the end token.
    once = (~ended_before | is_end).all(dim=1)
    return tokens[once], ~ended_before[once]


def _prefix_rows(tokens: Tensor, vocabulary: int) -> Tensor:
    """The row of theta for each position, (N, T): prefixes by length, then as numbers in base V."""
    rows, number, first = [], torch.zeros(len(tokens), dtype=torch.long), 0
    for t in range(tokens.shape[1]):
        rows.append(first + number)
        first += vocabulary**t
        number = number * vocabulary + tokens[:, t]
    return torch.stack(rows, dim=1)


@dataclass(frozen=True)
class Moments:
    """Of a random vector: its mean, (parameters,), and the sum of the variances of its components."""

    mean: Tensor
    total_variance: float


def moments(probabilities: Tensor, estimates: Tensor) -> Moments:
    """Exact moments of an estimator that takes the value estimates[c], (cases, parameters), in case c."""
    check_probabilities(probabilities)
    _check_doubles((len(probabilities), "parameters"), estimates=estimates)
    probabilities = probabilities.detach()
    mean = probabilities @ estimates
    return Moments(mean, (probabilities @ (estimates - mean).square().sum(dim=1)).item())


def optimal_baseline(probabilities: Tensor, rewards: Tensor, scores: Tensor) -> float:
    """b* = E[r |score|^2] / E[|score|^2], the constant baseline with the least total variance.

    probabilities, rewards: (N,); scores: (N, parameters).  The total variance of (r - b) score is
    E[(r - b)^2 |score|^2] - |grad J|^2, quadratic in b; at b* its derivative is 0.
    """
    check_probabilities(probabilities)
    _check_doubles((len(probabilities), "parameters"), scores=scores)
    _check_doubles((len(probabilities),), rewards=rewards)
    weights = probabilities.detach() * scores.square().sum(dim=1)
    return (weights @ rewards / weights.sum()).item()


def all_groups(policy: TabularPolicy, group_size: int) -> tuple[Tensor, Tensor]:
    """Every group of `group_size` independent responses: their rows, (N^G, G) int64, and probabilities, (N^G,).

    Raises ValueError when there are more than a million.
    """
    _check_policies(policy=policy)
    check_whole(1, group_size=group_size)
    responses = len(policy.tokens)
    if responses ** min(group_size, 20) > MAX_CASES:
        raise ValueError(f"group_size: {responses}^{group_size} groups; accepted are at most {MAX_CASES:,}")
    groups = torch.cartesian_prod(*[torch.arange(responses)] * group_size).reshape(-1, group_size)
    return groups, policy.probabilities().detach()[groups].prod(dim=1)


def group_estimates(
    policy: TabularPolicy, rewards: Tensor, groups: Tensor, advantage: Callable[[Tensor], Tensor]
) -> Tensor:
    """(1/G) sum_j A_j grad log pi(y_j) of every group, (groups, parameters) (handout, eq. 20 and 25 for one prompt).

    `advantage` maps the rewards of all groups, (groups, G), to advantages of the same shape.
    """
    _check_policies(policy=policy)
    _check_doubles((len(policy.tokens),), rewards=rewards)
    check_callable(advantage=advantage)
    _check_groups(groups, len(rewards))
    weights = advantage(rewards[groups])
    _check_doubles(tuple(groups.shape), advantage=weights)
    return torch.einsum("gj,gjd->gd", weights, policy.scores()[groups]) / groups.shape[1]


def kernel_advantage(baseline: str, advantage_normalizer: str, eps: float = 1e-6) -> Callable[[Tensor], Tensor]:
    """compute_group_normalized_rewards as an `advantage` of group_estimates."""
    Estimator("own", baseline, advantage_normalizer, advantage_eps=eps)  # refuses what is no cell of a row

    def advantage(grouped: Tensor) -> Tensor:
        rewards, size = grouped.reshape(-1), grouped.shape[1]
        flat, _ = compute_group_normalized_rewards(rewards, size, baseline, eps, advantage_normalizer)
        return flat.reshape(grouped.shape)

    return advantage


def expected_update(
    policy: TabularPolicy,
    rewards: Tensor,
    group_size: int,
    estimator: Estimator,
    sampled_from: TabularPolicy | None = None,
) -> Tensor:
    """The expected update of one prompt, (parameters,): minus the kernels' gradient, over all groups, with Z = G.

    Responses come from `sampled_from`; from the policy itself where that is None.
    """
    old = policy if sampled_from is None else sampled_from
    _check_policies(policy=policy, sampled_from=old)
    check_kind(Estimator, "an Estimator", estimator=estimator)
    _check_doubles((len(policy.tokens),), rewards=rewards)
    groups, chance = all_groups(old, group_size)
    rows = groups.reshape(-1)
    advantage = kernel_advantage(estimator.baseline, estimator.advantage_normalizer, estimator.advantage_eps)
    # In every method a positive factor of an advantage is a factor of its loss.  So each group's advantages are
    # weighted by its probability, and one gradient of all groups together is the expectation.
    loss, _ = compute_policy_gradient_loss(
        (advantage(rewards[groups]) * chance[:, None] * len(groups)).reshape(-1),
        policy.token_log_probs()[rows],
        estimator.importance_reweighting_method,
        old.token_log_probs().detach()[rows],
        estimator.cliprange,
        policy.mask[rows],
    )
    loss = aggregate_loss_across_microbatch(loss, policy.mask[rows], estimator.loss_normalization, float(len(rows)))
    return policy.gradient(-loss)


def surrogate(policy: TabularPolicy, old: TabularPolicy, rewards: Tensor, blocks: Blocks) -> Tensor:
    """sum over blocks of E[r(y)], a scalar with gradient (handout, eq. 50-51, where every block is one token).

    The tokens at the block's positions come from `policy`, all others from `old`.
    """
    _check_two(policy, old, rewards, blocks)
    new_log_probs, old_log_probs = policy.token_log_probs(), old.token_log_probs().detach()
    values = []
    for block in blocks:
        from_new = torch.zeros(new_log_probs.shape[1], dtype=torch.bool)
        from_new[list(block)] = True
        values.append(torch.where(from_new, new_log_probs, old_log_probs).sum(dim=1).exp() @ rewards)
    return torch.stack(values).sum()


def block_estimates(policy: TabularPolicy, old: TabularPolicy, rewards: Tensor, blocks: Blocks) -> Tensor:
    """r(y) sum_blocks w_block grad log pi(block) of every response, (N, parameters); its mean is taken under `old`.

    w_block is the block's importance weight: eq. 48 with a block for each token, 49 with one for the whole response,
    55 with pairs.
    """
    _check_two(policy, old, rewards, blocks)
    scores = policy.token_scores()
    log_ratios = (policy.token_log_probs() - old.token_log_probs()).detach()
    weighted = [log_ratios[:, b].sum(dim=1).exp()[:, None] * scores[:, b].sum(dim=1) for b in map(list, blocks)]
    return rewards[:, None] * torch.stack(weighted).sum(dim=0)


# ---- What is accepted.  All tensors are small and on the CPU, so values are checked too.


def check_probabilities(probabilities: Tensor) -> None:
    """Raise ValueError unless it is (cases,) float64, none below 0, and their sum is 1."""
    _check_doubles(("cases",), probabilities=probabilities)
    if (probabilities < 0).any() or abs(probabilities.sum().item() - 1) > 1e-6:
        raise ValueError("probabilities: one is below 0, or their sum is not 1")


def _check_doubles(shape: tuple[int | str, ...], **tensors: Tensor) -> None:
    """Of finite numbers; the size of a dimension that has a name is free."""
    accepted = f"float64 {shape}".replace("'", "")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise refused(name, tensor, f"a tensor, {accepted}")
        wanted = tuple(size if isinstance(n, str) else n for n, size in zip(shape, tensor.shape, strict=False))
        if tensor.ndim != len(shape) or tensor.shape != wanted or tensor.dtype != torch.float64:
            raise ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)}; accepted is {accepted}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name}: not all of its numbers are finite")


def _check_policies(**policies: TabularPolicy) -> None:
    """With the same responses."""
    check_has("token_log_probs", "a TabularPolicy", **policies)
    first, *others = policies.values()
    for other in others:
        if not (torch.equal(first.tokens, other.tokens) and torch.equal(first.mask, other.mask)):
            raise ValueError(f"{', '.join(policies)}: their responses are not the same ones")


def _check_groups(groups: Tensor, responses: int) -> None:
    is_table = isinstance(groups, Tensor) and groups.ndim == 2 and groups.dtype == torch.int64
    if not is_table or not ((groups >= 0) & (groups < responses)).all():
        raise refused("groups", groups, f"(groups, G) int64, 0 to {responses - 1}, as all_groups gives them")


def _check_two(policy: TabularPolicy, old: TabularPolicy, rewards: Tensor, blocks: Blocks) -> None:
    """What an expectation under two policies takes."""
    _check_policies(policy=policy, old=old)
    _check_doubles((len(policy.tokens),), rewards=rewards)
    check_list(blocks=blocks)
    steps = policy.tokens.shape[1]
    for block in blocks:
        if not isinstance(block, Sequence) or len(set(block)) < len(block) or not set(block) <= set(range(steps)):
            raise refused("blocks", blocks, f"lists of positions from 0 to {steps - 1}, none of them twice in a list")
