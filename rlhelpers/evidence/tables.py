"""Many runs as tables to be read: final scores, comparisons of methods, and the runs that went wrong."""

from collections.abc import Sequence

import pandas as pd

from rlhelpers.checks import check_list, refused
from rlhelpers.evidence.failures import FAILURES, read_all_signs
from rlhelpers.evidence.runs import read_curves
from rlhelpers.evidence.statistics import ERROR, final_scores, holm, paired_difference, paired_p, t_interval, verdict


def table_of_finals(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """For each value of `by` the mean of its seeds' final scores with its interval, lowest and highest seed, rounded,
    best first; and of how many seeds how many collapsed and how many diverged.

    runs: as evidence.results.list_runs gives them.
    """
    signs = read_all_signs(runs, by)
    if not signs:
        raise ValueError("runs: got none; accepted is at least one, as list_runs gives them")
    rows = {}
    for method, scores in final_scores(read_curves(runs, "val_reward", by)).items():
        interval = t_interval(scores.dropna())
        rows[method] = {
            "mean": round(interval.mean, 3),
            "95 % interval": interval.ends,
            "lowest": round(scores.min(), 3),
            "highest": round(scores.max(), 3),
            "seeds": interval.n,
        } | {name: sum(name in s.failures for (m, _), s in signs.items() if m == method) for name in FAILURES}
    return pd.DataFrame(rows).T.rename_axis(by).sort_values("mean", ascending=False)


def table_of_comparisons(finals: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """A row for each pair (method, baseline): the paired difference of final scores with its interval, the verdict of
    this comparison alone, and that of all of them together, by Holm's adjusted p-value.

    Of twenty comparisons without a difference one comes out by chance where each is judged alone; the last two columns
    are for all together, and say of how many.
    """
    check_list(pairs=pairs)
    if wrong := [pair for pair in pairs if not isinstance(pair, tuple | list) or len(pair) != 2]:
        raise refused("pairs", wrong[0], "a list of pairs (method, baseline)")
    if not len(pairs):
        raise ValueError("pairs: got none; accepted is at least one (method, baseline)")
    adjusted = holm([paired_p(finals, *pair) for pair in pairs])
    together = f"{len(pairs)} at once"
    rows = []
    for (method, baseline), p in zip(pairs, adjusted, strict=True):
        difference = paired_difference(finals, method, baseline)
        rows.append(
            {
                "method": method,
                "verdict alone": verdict(difference),
                f"verdict, {together}": verdict(difference) if p < ERROR else "not told apart from",
                "baseline": baseline,
                "seeds": difference.n,
                "difference": round(difference.mean, 3),
                "95 % interval": difference.ends,
                f"Holm's p, {together}": round(float(p), 3),
            }
        )
    return pd.DataFrame(rows).set_index(["method", "baseline"])


def table_of_failures(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """Each run that collapsed or diverged, with the signs of it, rounded; no row where none did."""
    rows = []
    for (value, seed), signs in read_all_signs(runs, by).items():
        rows.append(
            {
                by: value,
                "seed": seed,
                "what": ", ".join(signs.failures),
                "reward, best": round(signs.best, 3),
                "reward, final": round(signs.reward, 3),
                "format, final": round(signs.format_reward, 3),
                "tokens, before": round(signs.length_before, 1),
                "tokens, final": round(signs.response_length, 1),
                "well-formed, short, wrong": signs.well_formed_short_wrong,
                "steps not finite": signs.not_finite,
            }
        )
    if not rows:
        raise ValueError("runs: got none; accepted is at least one, as list_runs gives them")
    table = pd.DataFrame(rows).set_index([by, "seed"])
    return table[table["what"] != ""]
