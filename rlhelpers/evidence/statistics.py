"""What seeds can say: intervals over seeds, paired differences, and one sentence that claims no more than they show."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

FINAL = 3  # validations that make a run's final score


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds with the ends of its t-interval; NaN ends for one seed, which has no spread."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        ends = f" [{self.low:.3f}, {self.high:.3f}]" if self.n > 1 else ""
        return f"{self.mean:.3f}{ends}, {self.n} seed{'s' if self.n > 1 else ''}"


def t_interval(values, confidence: float = 0.95) -> Interval:
    """Student's interval for the mean of one value per seed.  Right for values that are near enough to normal."""
    values = np.asarray(values, dtype=float)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Interval(mean, np.nan, np.nan, n)
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def final_scores(curves: pd.DataFrame) -> pd.DataFrame:
    """The mean of the last FINAL validations of each run: a row for each seed, a column for each method.

    `curves`: as evidence.results.read_curves gives them.
    """
    return curves.apply(lambda curve: curve.dropna().tail(FINAL).mean()).unstack(level=0)


def paired_difference(finals: pd.DataFrame, method: str, baseline: str) -> Interval:
    """method - baseline over the seeds that both have.  A seed gives both the same batches of problems, so that part
    of its luck which is the same for both cancels."""
    return t_interval((finals[method] - finals[baseline]).dropna())


def verdict(finals: pd.DataFrame, method: str, baseline: str) -> str:
    """Better, worse, or not told apart: whether the 95 % interval of the paired difference leaves 0 out."""
    difference = paired_difference(finals, method, baseline)
    if difference.low > 0:
        word = "better than"
    elif difference.high < 0:
        word = "worse than"
    else:
        word = "not told apart from"
    return f"{method} {word} {baseline}: {difference}"


def has_collapsed(curve: pd.Series) -> bool:
    """The final score is below half of the best validation, the one before training included."""
    curve = curve.dropna()
    return bool(curve.tail(FINAL).mean() < curve.max() / 2)
