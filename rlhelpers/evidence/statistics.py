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
        return f"{self.mean:.3f}{ends}, {seed_count(self.n)}"


def seed_count(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


def t_interval(values, confidence: float = 0.95) -> Interval:
    """Student's interval for the mean of one value per seed.  Right for values that are near enough to normal."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        raise ValueError("values: got none; accepted is one for each seed, at least one")
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Interval(mean, np.nan, np.nan, n)
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def final_score(curve: pd.Series) -> float:
    """The mean of the last FINAL validations of a run."""
    return curve.dropna().tail(FINAL).mean()


def final_scores(curves: pd.DataFrame) -> pd.DataFrame:
    """The final score of each run: a row for each seed, a column for each method.

    `curves`: as evidence.results.read_curves gives them.
    """
    methods = curves.columns.get_level_values(0).unique()
    return curves.apply(final_score).unstack(level=0)[methods]


def has_collapsed(curve: pd.Series) -> bool:
    """The final score is below half of the best validation, the one before training included."""
    return bool(final_score(curve) < curve.max() / 2)


def table_of_finals(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean, interval, lowest and highest seed of each method's final scores, rounded, best first; and of how many seeds
    how many collapsed."""
    rows = {}
    for method, scores in final_scores(curves).items():
        interval = t_interval(scores.dropna())
        rows[method] = {
            "mean": round(interval.mean, 3),
            "95 % interval": f"{interval.low:.3f} to {interval.high:.3f}" if interval.n > 1 else "one seed has none",
            "lowest": round(scores.min(), 3),
            "highest": round(scores.max(), 3),
            "seeds": interval.n,
            "collapsed": sum(has_collapsed(curve) for _, curve in curves[method].items()),
        }
    return pd.DataFrame(rows).T.rename_axis(curves.columns.names[0]).sort_values("mean", ascending=False)


def paired_difference(finals: pd.DataFrame, method: str, baseline: str) -> Interval:
    """method - baseline over the seeds that both have.  A seed gives both the same batches of problems, so that part
    of its luck which is the same for both cancels.  Raises ValueError where they have no seed in common."""
    differences = (finals[method] - finals[baseline]).dropna()
    if differences.empty:
        raise ValueError(f"{method} and {baseline} have no seed in common")
    return t_interval(differences)


def comparison(finals: pd.DataFrame, method: str, baseline: str) -> str:
    """Better, worse, or not told apart: whether the 95 % interval of the paired difference leaves 0 out."""
    difference = paired_difference(finals, method, baseline)
    if difference.low > 0:
        word = "better than"
    elif difference.high < 0:
        word = "worse than"
    else:
        word = "not told apart from"
    return f"{method} {word} {baseline}: {difference}"
