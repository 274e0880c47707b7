"""Estimates from samples, each with its interval; and one line that compares derivation, enumeration and sampling."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from rlhelpers.checks import check_kind, check_whole, is_number, refused
from rlhelpers.theory.enumeration import check_probabilities

# At 95 % one interval in twenty misses by chance.  A notebook compares dozens at once, so it takes a level at which all
# of them nearly always hold.
LEVEL = 0.9999
EXACT = 1e-12


class DisagreementError(AssertionError):
    """Closed form, enumeration and Monte Carlo do not agree."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and half of the width of its interval."""

    mean: float
    half_width: float

    def covers(self, truth: float) -> bool:
        """Whether the interval holds `truth`, up to rounding: where nothing varies, the interval is a point."""
        return bool(abs(truth - self.mean) <= self.half_width + EXACT * max(1.0, abs(truth)))


def draw(probabilities: Tensor, shape: int | tuple[int, ...], seed: int) -> Tensor:
    """Independent draws of 0 to N - 1 with these probabilities, (N,), as int64 of the given shape."""
    check_probabilities(probabilities)
    check_whole(0, seed=seed)
    for size in shape if isinstance(shape, tuple) else (shape,):
        check_whole(0, shape=size)
    chances = probabilities.detach().numpy()
    drawn = np.random.default_rng(seed).choice(len(chances), size=shape, p=chances / chances.sum())
    return torch.from_numpy(drawn)


def mean_interval(samples: Tensor | np.ndarray, level: float = LEVEL) -> Estimate:
    """Mean of independent samples, (n,), with Student's t interval: mean +- t std / sqrt(n).

    Samples that share something, such as responses of one group, are not independent: average them first.  A heavy
    tail that no sample reached makes the interval too narrow, and nothing shows it.  Raises ValueError with fewer than
    2 samples or a level outside (0, 1).
    """
    samples = _as_samples(samples)
    if samples.ndim != 1:
        raise ValueError(f"samples: got shape {samples.shape}; accepted is (n,) with n at least 2")
    if not (is_number(level) and 0 < level < 1):
        raise refused("level", level, "a number between 0 and 1")
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    return Estimate(float(samples.mean()), float(stats.t.ppf((1 + level) / 2, len(samples) - 1) * error))


def variance_interval(samples: Tensor | np.ndarray, level: float = LEVEL) -> Estimate:
    """Variance of independent samples, (n,), or the sum of their components' variances, (n, D), with its interval.

    The variance is the mean of the squared deviations, and so is the interval; right for large n.
    """
    samples = _as_samples(samples)
    n = len(samples)
    deviations = np.square(samples - samples.mean(axis=0)).reshape(n, -1).sum(axis=1)
    return mean_interval(deviations * n / (n - 1), level)


def _as_samples(samples: Tensor | np.ndarray) -> np.ndarray:
    try:
        numbers = np.asarray(samples, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise refused("samples", samples, "numbers") from error
    if numbers.ndim < 1 or len(numbers) < 2:
        raise ValueError(f"samples: got shape {numbers.shape}; accepted is (n,) with n at least 2")
    if not np.isfinite(numbers).all():
        raise ValueError(f"samples: got {numbers[~np.isfinite(numbers)][0]}; accepted are finite numbers")
    return numbers


def three_ways(name: str, closed: float, enumerated: float, sampled: Estimate) -> None:
    """Print one line: closed form, enumeration, Monte Carlo with its interval.

    Raises DisagreementError, with the same line, when the first two differ by more than 1e-12 (relative to the larger
    of them and 1) or the interval does not cover the closed form.
    """
    check_kind(Estimate, "what mean_interval or variance_interval returns", sampled=sampled)
    closed, enumerated = _as_float("closed", closed), _as_float("enumerated", enumerated)
    same = math.isclose(closed, enumerated, rel_tol=EXACT, abs_tol=EXACT)
    inside = sampled.covers(closed)
    line = (
        f"{name}: closed {_short(closed)}  "
        f"enumerated {_short(enumerated)} ({'exact to 1e-12' if same else 'DIFFERS'})  "
        f"Monte Carlo {_short(sampled.mean)} +- {_short(sampled.half_width, 1)} ({'inside' if inside else 'OUTSIDE'})"
    )
    if not (same and inside):
        raise DisagreementError(line)
    print(line)


def _as_float(name: str, value: object) -> float:
    """Take any number, sympy's too."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise refused(name, value, "a number") from error


def _short(number: float, digits: int = 4) -> str:
    # Without the bits in which two machines may differ: they could decide how 0.0091125 is rounded.
    return f"{round(number, 12) + 0.0:.{digits}g}"
