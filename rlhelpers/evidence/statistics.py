"""What seeds can show: means with intervals, final scores, paired differences, and signs that a run went wrong.

Intervals: Student's for few values, the bootstrap for many, Wilson's for shares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from rlhelpers.checks import check_kind, check_whole, refused
from rlhelpers.evidence.runs import check_column, check_runs, check_table

# With fewer values the resampled means are too few and too close together.  Four seeds have 35 of them, none beyond the
# extreme seeds, and an interval that says 95 % holds the truth about 80 times in 100.
FEWEST_TO_RESAMPLE = 30
RESAMPLES = 9999
FINAL = 3  # validations that make a run's final score
ERROR = 0.05  # a verdict may be wrong so often where there is no difference: one in twenty


@dataclass(frozen=True)
class Interval:
    """The mean of `n` values and the ends of its interval; NaN where so few values have none."""

    mean: float
    low: float
    high: float
    n: int
    of: str = "seed"

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def ends(self) -> str:
        """ "0.830 to 0.867", or "1 seed: none"."""
        return f"{self.low:.3f} to {self.high:.3f}" if np.isfinite(self.low) else f"{counted(self.n, self.of)}: none"

    def __str__(self) -> str:
        ends = f" [{self.low:.3f}, {self.high:.3f}]" if np.isfinite(self.low) else ""
        return f"{self.mean:.3f}{ends}, {counted(self.n, self.of)}"


def counted(n: float, what: str = "seed") -> str:
    """ "1 seed", "4 seeds", "0.5 points"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def t_interval(values, confidence: float = 0.95, of: str = "seed") -> Interval:
    """Student's interval for the mean of independent values, (n,): mean +- t std / sqrt(n).

    It suits values that are nearly normal, also few.  One value has no spread and no interval.  Raises ValueError where
    there is no value, or one that is no finite number.
    """
    values = _some(values, confidence)
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return Interval(mean, np.nan, np.nan, n, of)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n, of)


def bootstrap_interval(values, confidence: float = 0.95, of: str = "problem", seed: int = 0) -> Interval:
    """The percentile bootstrap's interval for the mean of independent values, (n,).

    It suits rewards of 0 and 1, one for each problem of a validation.  It shows how much the mean would vary with other
    problems; one run cannot show how much it varies with the seed.  Fewer than FEWEST_TO_RESAMPLE values have no
    interval.  Raises ValueError as t_interval does.
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

    It suits few values too, and shares near 0 and 1: it never leaves [0, 1].  Raises ValueError as t_interval does, and
    for any other value.
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
        values = np.asarray(values).astype(float, casting="same_kind")  # refuses complex numbers
    except (TypeError, ValueError):
        raise ValueError(f"values: got {values!r}; accepted are numbers") from None
    if values.ndim != 1 or not len(values):
        raise ValueError(f"values: got shape {values.shape}; accepted is (n,), at least one value")
    if not np.isfinite(values).all():
        raise ValueError(f"values: got {values[~np.isfinite(values)][0]}; accepted are finite numbers")
    return values


def final_score(curve: pd.Series) -> float:
    """The mean of the last FINAL validations of a run."""
    check_kind(pd.Series, "a column of read_curves", curve=curve)
    return curve.dropna().tail(FINAL).mean()


def final_scores(curves: pd.DataFrame) -> pd.DataFrame:
    """A row for each seed, a column for each method.  curves: as read_curves gives them."""
    check_table(curves=curves)
    if curves.columns.nlevels != 2:
        raise refused("curves", curves, "a table as read_curves gives it, with columns (method, seed)")
    methods = curves.columns.get_level_values(0).unique()
    return curves.apply(final_score).unstack(level=0)[methods]


def paired_differences(finals: pd.DataFrame, method: str, baseline: str) -> pd.Series:
    """method - baseline for each seed that both have.

    A seed gives both methods the same batches of problems, so its luck cancels in part.  Raises ValueError where they
    have no seed in common, or one of them has no column.
    """
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
    """Better or worse where the interval of a paired difference leaves 0 out, else not told apart, as for one seed."""
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
    """Holm's adjustment (1979): with adjusted p-values below ERROR, all verdicts together have that error.

    It holds for any dependence, such as that of several comparisons with one baseline.
    """
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


# ---- Runs that went wrong.

LOW = 0.5  # a final reward below this share of the run's best validation is a collapse
HIGH = 0.9  # the share of responses that are well-formed
SHORT = 0.75  # of the length before training
WRONG = 0.1  # of the well-formed responses, fewer are right
FAILURES = ("collapsed", "diverged")


@dataclass(frozen=True)
class Signs:
    """What a run's metrics say about its end.

    `reward`, `format_reward` and `response_length` are final scores; NaN where the run did not log them.
    """

    best: float
    reward: float
    format_reward: float
    response_length: float
    length_before: float
    not_finite: int

    @property
    def well_formed_short_wrong(self) -> bool:
        """Whether answers have the right form, no reasoning, and are wrong: published runs of this method end so."""
        short = self.response_length < SHORT * self.length_before
        return bool(self.format_reward > HIGH and short and self.reward < WRONG * self.format_reward)

    @property
    def collapsed(self) -> bool:
        """Whether the reward is below half of its best, before training included, or all signs are there."""
        return bool(self.reward < LOW * self.best) or self.well_formed_short_wrong

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient was not finite.  The package's step skips such an update, others may not."""
        return self.not_finite > 0

    @property
    def failures(self) -> list[str]:
        """Those of FAILURES that hold; [] for a sound run."""
        return [name for name in FAILURES if getattr(self, name)]


def read_signs(metrics: pd.DataFrame) -> Signs:
    """The signs of one run.  metrics: as read_metrics gives them."""
    reward, form, length = (
        metrics.get(f"val_{name}", pd.Series(np.nan, metrics.index)).dropna()
        for name in ("reward", "format_reward", "response_length")
    )
    return Signs(
        best=reward.max(),
        reward=final_score(reward),
        format_reward=final_score(form),
        response_length=final_score(length),
        length_before=length.iloc[0] if len(length) else np.nan,
        not_finite=_steps_not_finite(metrics),
    )


def _steps_not_finite(metrics: pd.DataFrame) -> int:
    """Count training steps with a skipped update, or with a loss or gradient norm of null: it was not finite."""
    trained = metrics[metrics["reward"].notna()] if "reward" in metrics else metrics.iloc[:0]
    skipped = trained.get("skipped_update", pd.Series(0.0, trained.index)) > 0
    logged = [name for name in ("loss", "grad_norm") if name in trained and trained[name].notna().any()]
    return int((skipped | trained[logged].isna().any(axis=1)).sum())


def read_all_signs(runs: pd.DataFrame, by: str) -> dict[tuple, Signs]:
    """The signs of each run by (value of `by`, seed).  runs: as list_runs gives them."""
    check_runs(runs, by)
    return {(getattr(run, by), run.seed): read_signs(run.metrics) for run in runs.itertuples()}
