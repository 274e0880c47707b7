"""Runs that went wrong, by signs that can be read off their metrics: the policy collapsed, or the numbers diverged."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from rlhelpers.evidence.runs import check_runs
from rlhelpers.evidence.statistics import final_score

LOW = 0.5  # of the best validation of the run: a final reward below it is lost
HIGH = 0.9  # of all responses: so many are well-formed
SHORT = 0.75  # of the length before training
WRONG = 0.1  # of the well-formed responses: no more are right
FAILURES = ("collapsed", "diverged")


@dataclass(frozen=True)
class Signs:
    """What a run's metrics say about its end.  `reward`, `format_reward` and `response_length` are final scores, means
    of the last validations; NaN where the run did not log them."""

    best: float
    reward: float
    format_reward: float
    response_length: float
    length_before: float
    not_finite: int

    @property
    def well_formed_short_wrong(self) -> bool:
        """Answers in the right form, without the reasoning, and wrong: what published runs of this method end as.  No
        reward need have been there to be lost."""
        short = self.response_length < SHORT * self.length_before
        return bool(self.format_reward > HIGH and short and self.reward < WRONG * self.format_reward)

    @property
    def collapsed(self) -> bool:
        """The reward is below half of the best that it was, before training included, or all signs are there."""
        return bool(self.reward < LOW * self.best) or self.well_formed_short_wrong

    @property
    def diverged(self) -> bool:
        """A loss or gradient was infinite or no number; the step function skips such an update, others may not."""
        return self.not_finite > 0

    @property
    def failures(self) -> list[str]:
        """Those of FAILURES that hold; [] for a sound run."""
        return [name for name in FAILURES if getattr(self, name)]


def read_signs(metrics: pd.DataFrame) -> Signs:
    """metrics: as evidence.runs.read_metrics gives them."""
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
    """Training steps with a skipped update, or whose loss or gradient norm the log has as null, which is how it keeps
    what is not finite."""
    trained = metrics[metrics["reward"].notna()] if "reward" in metrics else metrics.iloc[:0]
    skipped = trained.get("skipped_update", pd.Series(0.0, trained.index)) > 0
    logged = [name for name in ("loss", "grad_norm") if name in trained and trained[name].notna().any()]
    return int((skipped | trained[logged].isna().any(axis=1)).sum())


def read_all_signs(runs: pd.DataFrame, by: str) -> dict[tuple, Signs]:
    """The signs of each run by (value of `by`, seed).  runs: as evidence.results.list_runs gives them."""
    check_runs(runs, by)
    return {(getattr(run, by), run.seed): read_signs(run.metrics) for run in runs.itertuples()}
