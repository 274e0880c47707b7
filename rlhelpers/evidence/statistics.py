"""What seeds can say: final scores, paired differences, and one sentence that claims no more than they show."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from rlhelpers.checks import check_kind, refused
from rlhelpers.evidence.checks import check_column, check_table
from rlhelpers.evidence.intervals import Interval, t_interval

FINAL = 3  # validations that make a run's final score
ERROR = 0.05  # a verdict may be wrong so often where there is no difference: one in twenty


def final_score(curve: pd.Series) -> float:
    """The mean of the last FINAL validations of a run."""
    check_kind(pd.Series, "a column of read_curves", curve=curve)
    return curve.dropna().tail(FINAL).mean()


def final_scores(curves: pd.DataFrame) -> pd.DataFrame:
    """The final score of each run: a row for each seed, a column for each method.

    `curves`: as evidence.results.read_curves gives them.
    """
    check_table(curves=curves)
    if curves.columns.nlevels != 2:
        raise refused("curves", curves, "a table as read_curves gives it, with columns (method, seed)")
    methods = curves.columns.get_level_values(0).unique()
    return curves.apply(final_score).unstack(level=0)[methods]


def paired_differences(finals: pd.DataFrame, method: str, baseline: str) -> pd.Series:
    """method - baseline of each seed that both have.  A seed gives both the same batches of problems, so that part of
    its luck which is the same for both cancels.  Raises ValueError where they have no seed in common, or one of them
    has no column."""
    check_table(finals=finals)
    check_column(finals, method=method, baseline=baseline)
    differences = (finals[method] - finals[baseline]).dropna()
    if differences.empty:
        raise ValueError(f"{method} and {baseline} have no seed in common")
    return differences


def paired_difference(finals: pd.DataFrame, method: str, baseline: str) -> Interval:
    """The mean of paired_differences with its t-interval."""
    return t_interval(paired_differences(finals, method, baseline), 1 - ERROR)


def verdict(difference: Interval) -> str:
    """Better, worse, or not told apart: whether the interval of a paired difference leaves 0 out.  One seed has no
    interval and tells nothing apart."""
    if difference.low > 0:
        return "better than"
    return "worse than" if difference.high < 0 else "not told apart from"


def comparison(finals: pd.DataFrame, method: str, baseline: str) -> str:
    """The verdict on two methods as a sentence, with the difference and its 95 % interval."""
    difference = paired_difference(finals, method, baseline)
    value, _, seeds = str(difference).rpartition(", ")
    return f"{method} {verdict(difference)} {baseline} with {seeds}: {value}"


def paired_p(finals: pd.DataFrame, method: str, baseline: str) -> float:
    """The two-sided p-value of the paired t-test, below ERROR where the verdict tells the two apart; 1 for one seed."""
    differences = paired_differences(finals, method, baseline)
    mean, n = differences.mean(), len(differences)
    if n < 2 or mean == 0:
        return 1.0
    error = differences.std() / np.sqrt(n)
    return float(2 * stats.t.sf(abs(mean) / error, n - 1)) if error > 0 else 0.0


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjustment (1979): comparisons whose adjusted p-value is below ERROR are told apart with that error for
    all of them together, whatever they have in common, as two comparisons with one baseline do."""
    try:
        p_values = np.asarray(p_values, dtype=float)
    except (TypeError, ValueError) as error:
        raise refused("p_values", p_values, "(n,), numbers from 0 to 1") from error
    if p_values.ndim != 1 or not ((p_values >= 0) & (p_values <= 1)).all():
        raise ValueError(f"p_values: got {p_values.tolist()}; accepted is (n,), numbers from 0 to 1")
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)  # the smallest p is one of all, the next one of the rest
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * p_values[order]), 1)
    return adjusted
