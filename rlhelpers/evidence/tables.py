"""Many runs as tables: final scores, comparisons, failures, and the table that is committed in data/results."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from rlhelpers import paths
from rlhelpers.checks import check_list, refused
from rlhelpers.evidence.runs import complete_runs, list_runs, read_curves
from rlhelpers.evidence.statistics import (
    ERROR,
    FAILURES,
    Signs,
    final_scores,
    holm,
    paired_difference,
    paired_p,
    read_all_signs,
    read_signs,
    t_interval,
    verdict,
)

KEPT = ("config.yaml", "metrics.jsonl", "run.json")  # of a committed run: no responses and no weights
TABLE = "runs.csv"


def table_of_finals(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """A row for each value of `by`, best first: mean of the final scores, interval, extremes, seeds, failures.

    runs: as list_runs gives them.
    """
    signs = _signs_of_some(runs, by)
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
    """A row for each pair (method, baseline): the paired difference of final scores, its interval, and two verdicts.

    Judged alone, one of twenty comparisons without a difference is told apart by chance.  So the second verdict is for
    all of them together, by Holm's adjusted p-value; its column says how many they are.
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
    """A row for each run that collapsed or diverged, with its signs, rounded; no row where none did."""
    rows = [
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
        for (value, seed), signs in _signs_of_some(runs, by).items()
    ]
    table = pd.DataFrame(rows).set_index([by, "seed"])
    return table[table["what"] != ""]


def _signs_of_some(runs: pd.DataFrame, by: str) -> dict[tuple, Signs]:
    signs = read_all_signs(runs, by)
    if not signs:
        raise ValueError("runs: got none; accepted is at least one, as list_runs gives them")
    return signs


# ---- What is committed.


def collect(*experiments: str) -> tuple[list[Path], list[Path]]:
    """Copy the complete runs of experiments from data/runs to data/results, and write the experiments' tables.

    Without a name: the experiments that data/results has already.  Returns the new folders, and those that were there
    and stay as they are: to replace a committed run, delete it first.  A run that cannot be read is left out with a
    warning.  Raises FileNotFoundError, before anything is copied, for an experiment without a complete run, and
    ValueError for what is no name of one.
    """
    experiments = experiments or tuple(sorted({file.parents[2].name for file in paths.RESULTS.glob("*/*/*/run.json")}))
    if wrong := [name for name in experiments if name in ("", "..") or Path(name).name != name]:
        raise ValueError(f"experiments: got {', '.join(map(repr, wrong))}; accepted are names of folders in data/runs")
    made, left = [], []
    found = {name: [run["folder"] for run in complete_runs(paths.RUNS / name)] for name in experiments}
    for experiment in [experiment for experiment, folders in found.items() if not folders]:
        list_runs(experiment, committed_only=True)  # raises where there is none either
    for experiment, folders in found.items():
        for source in folders:
            folder = paths.RESULTS / source.relative_to(paths.RUNS)
            if folder.exists():
                left.append(folder)
                continue
            _copy(source, folder)
            made.append(folder)
        table_of_runs(experiment).to_csv(paths.RESULTS / experiment / TABLE, lineterminator="\n")
    return made, left


def _copy(source: Path, folder: Path) -> None:
    """Copy all of KEPT, or nothing."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in KEPT:
        shutil.copy(source / name, temporary)
    temporary.rename(folder)


def table_of_runs(experiment: str) -> pd.DataFrame:
    """A row for each committed run: its results, minutes, settings, and how it was made."""
    rows = {}
    for run in list_runs(experiment, committed_only=True).to_dict("records"):
        folder, signs = run["folder"], read_signs(run["metrics"])
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        reward = run["metrics"]["val_reward"].dropna()
        results = {
            "reward_before": round(reward.iloc[0], 4),
            "reward_best": round(signs.best, 4),
            "reward_final": round(signs.reward, 4),
            "format_reward_final": round(signs.format_reward, 4),
            "response_length_final": round(signs.response_length, 2),
            "failures": ", ".join(signs.failures),
            "minutes": round(run["minutes"], 2),
        }
        rows[folder.parent.name, f"{run['seed']}"] = results | _settings(run) | _made(about)
    index = pd.MultiIndex.from_tuples(list(rows), names=["variant", "seed"])
    return pd.DataFrame(list(rows.values()), index=index)


def _settings(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of config.yaml, and a column for each cell of the estimator's row."""
    given = {"experiment", "variant", "seed", "row", "metrics", "folder", "minutes"}
    cells = {f"estimator.{name}": cell for name, cell in run["row"].items() if name != "name"}
    return {name: value for name, value in run.items() if name not in given} | cells


def _made(about: dict[str, Any]) -> dict[str, Any]:
    versions = {f"version.{name}": version for name, version in sorted(about.get("versions", {}).items())}
    return {name: about.get(name) for name in ("started", "finished", "commit", "machine", "python")} | versions
