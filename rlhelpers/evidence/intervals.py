"""A mean and how far off it may be: Student's interval for few values, the bootstrap for many, Wilson's for shares."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from rlhelpers.checks import check_whole

# Below this the resampled means are too few and too close together.  With four seeds there are 35 of them, none beyond
# the extreme seeds, and an interval that says 95 % holds the truth about 80 times in 100.
FEWEST_TO_RESAMPLE = 30
RESAMPLES = 9999
EXACT = 1e-12


@dataclass(frozen=True)
class Interval:
    """The mean of `n` values and the ends of its interval, NaN where so few values have none."""

    mean: float
    low: float
    high: float
    n: int
    of: str = "seed"

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def covers(self, truth: float) -> bool:
        """The last bits do not count: where nothing varies, the interval is a point."""
        slack = EXACT * max(1.0, abs(truth))
        return bool(self.low - slack <= truth <= self.high + slack)

    @property
    def ends(self) -> str:
        """ "0.830 to 0.867", or that there are none."""
        return f"{self.low:.3f} to {self.high:.3f}" if np.isfinite(self.low) else f"{counted(self.n, self.of)}: none"

    def __str__(self) -> str:
        ends = f" [{self.low:.3f}, {self.high:.3f}]" if np.isfinite(self.low) else ""
        return f"{self.mean:.3f}{ends}, {counted(self.n, self.of)}"


def counted(n: float, what: str = "seed") -> str:
    """ "1 seed", "4 seeds", "0.5 points"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def t_interval(values, confidence: float = 0.95, of: str = "seed") -> Interval:
    """Student's interval for the mean of independent values, (n,): mean +- t std / sqrt(n).

    Right for values that are near enough to normal, also for few.  One value has no spread and no interval.  Raises
    ValueError where there is no value, or one that is no finite number.
    """
    values = _some(values, confidence)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Interval(mean, np.nan, np.nan, n, of)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n, of)


def bootstrap_interval(values, confidence: float = 0.95, of: str = "problem", seed: int = 0) -> Interval:
    """The percentile bootstrap's interval for the mean of independent values, (n,), from FEWEST_TO_RESAMPLE on.

    It asks for no normal values, so it suits rewards of 0 and 1, one for each problem of a validation.  What it tells
    is how much the mean would vary with other problems; how much with another seed, one run cannot know.  Fewer values
    have no interval.  Raises ValueError as t_interval does.
    """
    values = _some(values, confidence)
    check_whole(0, seed=seed)
    mean, n = float(values.mean()), len(values)
    if n < FEWEST_TO_RESAMPLE:
        return Interval(mean, np.nan, np.nan, n, of)
    low, high = stats.bootstrap(
        (values,), np.mean, confidence_level=confidence, method="percentile", n_resamples=RESAMPLES, batch=500, rng=seed
    ).confidence_interval
    return Interval(mean, float(low), float(high), n, of)


def proportion_interval(values, confidence: float = 0.95, of: str = "problem") -> Interval:
    """Wilson's interval for the share of ones among independent values of 0 and 1, (n,).

    It also suits few values and shares near 0 and 1, where it is not symmetric and never leaves [0, 1].  Raises
    ValueError as t_interval does, and for any other value.
    """
    values = _some(values, confidence)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"values: got {values[~np.isin(values, (0, 1))][0]}; accepted are 0 and 1")
    count = stats.binomtest(int(values.sum()), len(values))
    low, high = count.proportion_ci(confidence, method="wilson")
    return Interval(count.statistic, float(low), float(high), len(values), of)


def _some(values, confidence: float) -> np.ndarray:
    if not (isinstance(confidence, float | int) and 0 < confidence < 1):
        raise ValueError(f"confidence: got {confidence!r}; accepted are numbers between 0 and 1, such as 0.95")
    try:
        values = np.asarray(values).astype(float, casting="same_kind")  # which does not lose an imaginary part
    except (TypeError, ValueError):
        raise ValueError(f"values: got {values!r}; accepted are numbers") from None
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values: got shape {values.shape}; accepted is (n,), at least one value")
    if not np.isfinite(values).all():
        raise ValueError(f"values: got {values[~np.isfinite(values)][0]}; accepted are finite numbers")
    return values
