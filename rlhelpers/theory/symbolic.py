"""Policies small enough for sympy: one Bernoulli action, a softmax over a few responses, a tree of binary tokens.

Every function returns sympy expressions: an equality is proved for all values of the symbols at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import sympy
from sympy import Expr, Matrix, Symbol

from rlhelpers.checks import check_callable, check_one_of, check_whole, refused

THETA = Symbol("theta", real=True)
P = Symbol("p", positive=True)  # pi_theta(A = 1), or the chance that a response is right
B = Symbol("b", real=True)  # a baseline
K, G = sympy.symbols("k G", positive=True, integer=True)  # right responses in a group, and its size

NORMALIZERS = ("none", "std", "mean")  # of kernels/advantages
Blocks = Sequence[Sequence[int]]  # positions that share one importance weight, as in enumeration


def bernoulli_score(action: int) -> Expr:
    """d/dtheta log pi_theta(action) for pi_theta(1) = p = sigma(theta), written in p: action - p."""
    if action not in (0, 1):
        raise refused("action", action, "0 or 1")
    right = 1 / (1 + sympy.exp(-THETA))
    log_prob = sympy.log(right if action else 1 - right)
    return sympy.simplify(sympy.diff(log_prob, THETA).subs(THETA, sympy.log(P / (1 - P))))


def bernoulli_expectation(f: Callable[[int], Expr]) -> Expr:
    """E[f(A)], the sum over the two actions."""
    check_callable(f=f)
    return P * f(1) + (1 - P) * f(0)


def bernoulli_variance(f: Callable[[int], Expr]) -> Expr:
    """E[f(A)^2] - E[f(A)]^2 of one sample, factored.  The mean of n independent samples has 1/n of it."""
    mean = bernoulli_expectation(f)
    return sympy.factor(bernoulli_expectation(lambda a: f(a) ** 2) - mean**2)


def binomial_expectation(f: Callable[[int], Expr], group_size: int) -> Expr:
    """E[f(k)] where k of `group_size` independent responses are right, each with chance p."""
    check_callable(f=f)
    check_whole(1, group_size=group_size)
    chance = [sympy.binomial(group_size, k) * P**k * (1 - P) ** (group_size - k) for k in range(group_size + 1)]
    return sympy.Add(*[c * f(k) for k, c in enumerate(chance)])


def spread(normalizer: str, k: int | Expr, group_size: int | Expr) -> Expr:
    """The divisor of a group's advantages, where k of its rewards are 1 and the others 0, as in kernels/advantages.

    "std" divides by n - 1, like torch.std.  Raises ValueError for an unknown name.
    """
    check_one_of(NORMALIZERS, normalizer=normalizer)
    k, group_size = sympy.sympify(k), sympy.sympify(group_size)
    formulas = {
        "none": sympy.Integer(1),
        "std": sympy.sqrt(k * (group_size - k) / (group_size * (group_size - 1))),
        "mean": k / group_size,
    }
    return formulas[normalizer]


def group_weight(normalizer: str, group_size: int, eps: float | Expr = 0) -> Expr:
    """w_G(p): the expected update of one prompt's group is w_G(p) grad p, for any policy and a reward of 0 or 1.

    The baseline is the group mean and Z = G (handout, eq. 41-43, before the limit).  The expected score of a right
    response is grad p / p, that of a wrong one -grad p / (1 - p).  So a group with k right responses adds
    k (G - k) / G^2 / (s_k + eps) * grad p / (p (1 - p)), and k = 0 and k = G add nothing.
    Raises ValueError for a group smaller than 2.
    """
    check_one_of(NORMALIZERS, normalizer=normalizer)
    check_whole(2, group_size=group_size)
    added = eps if normalizer != "none" else 0  # without a normalizer nothing is divided, not even by 1 + eps
    terms = [
        sympy.binomial(group_size, k)
        * P ** (k - 1)
        * (1 - P) ** (group_size - k - 1)
        * sympy.Rational(k * (group_size - k), group_size**2)
        / (spread(normalizer, k, group_size) + added)
        for k in range(1, group_size)
    ]
    return sympy.Add(*terms)


def limit_weight(normalizer: str) -> Expr:
    """w(p) for G -> infinity and eps = 0, where the share of right responses is p itself (handout, 5.3)."""
    share = K * (G - K) / G**2 / spread(normalizer, K, G)
    return sympy.simplify(sympy.limit(share.subs(K, P * G) / (P * (1 - P)), G, sympy.oo))


class SoftmaxPolicy:
    """A softmax over a few responses, one logit each, written in u_i = exp(logit_i).

    All is then a rational function, and the derivative to logit_i is u_i d/du_i.
    """

    def __init__(self, responses: int):
        check_whole(2, responses=responses)
        self.responses = range(responses)
        self.weights = sympy.symbols(f"u1:{responses + 1}", positive=True)
        self.rewards = sympy.symbols(f"r1:{responses + 1}", real=True)
        self.probabilities = [u / sum(self.weights) for u in self.weights]

    def gradient(self, f: Expr) -> Matrix:
        """The derivatives of f to the logits, (responses, 1)."""
        return Matrix([u * sympy.diff(f, u) for u in self.weights])

    def score(self, response: int) -> Matrix:
        return self.gradient(sympy.log(self.probabilities[response]))

    def expectation(self, f: Callable[[int], Expr | Matrix]) -> Expr | Matrix:
        """E[f(y)], the sum over all responses."""
        return _total(self.probabilities[y] * f(y) for y in self.responses)

    def group_expectation(self, f: Callable[[tuple[int, ...]], Expr | Matrix], group_size: int) -> Expr | Matrix:
        """E[f(group)], the sum over all groups of independent responses."""
        return _total(
            sympy.Mul(*[self.probabilities[y] for y in group]) * f(group)
            for group in product(self.responses, repeat=group_size)
        )


@dataclass(frozen=True)
class TokenTree:
    """All responses of `length` binary tokens, with a symbol for each conditional probability and each reward.

    After the prefix 01 the new policy's chance of a 1 is p01, the old policy's q01.  The reward of 0110 is r0110.
    """

    length: int

    def __post_init__(self):
        check_whole(1, length=self.length)

    @property
    def responses(self) -> list[tuple[int, ...]]:
        return list(product((0, 1), repeat=self.length))

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        return [prefix for t in range(self.length) for prefix in product((0, 1), repeat=t)]

    def symbol(self, letter: str, tokens: tuple[int, ...]) -> Symbol:
        return Symbol(letter + "".join(map(str, tokens)), positive=True)

    def token(self, letter: str, response: tuple[int, ...], t: int) -> Expr:
        """pi(y_t | y_<t) of the new policy, "p", or of the old one, "q"."""
        one = self.symbol(letter, response[:t])
        return one if response[t] else 1 - one

    def block(self, letter: str, response: tuple[int, ...], positions: Sequence[int]) -> Expr:
        """The probability of the response's tokens at these positions."""
        return sympy.Mul(*[self.token(letter, response, t) for t in positions])

    def surrogate(self, blocks: Blocks) -> Expr:
        """sum over blocks of E[r(y)] (handout, eq. 50-51, where every block is one token).

        The tokens at the block's positions come from the new policy, all others from the old one.
        """
        total = 0
        for response, positions in product(self.responses, blocks):
            others = [t for t in range(self.length) if t not in positions]
            chance = self.block("p", response, positions) * self.block("q", response, others)
            total += chance * self.symbol("r", response)
        return total

    def expected_estimator(self, blocks: Blocks, parameter: Symbol) -> Expr:
        """E under the old policy of r(y) sum_blocks w_block d/dparameter log pi_new(block) (handout, eq. 54 and 55).

        w_block is the block's importance weight.
        """
        total = 0
        for response, positions in product(self.responses, blocks):
            new = self.block("p", response, positions)
            weight = new / self.block("q", response, positions)
            score = sympy.Add(*[sympy.diff(sympy.log(self.token("p", response, t)), parameter) for t in positions])
            chance = self.block("q", response, range(self.length))
            total += chance * weight * self.symbol("r", response) * score
        return total


def _total(terms):
    first, *rest = terms
    return sum(rest, first)
