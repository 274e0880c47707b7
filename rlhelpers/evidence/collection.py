"""What is committed of finished runs: a small folder for each in data/results, and one table for each experiment."""

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from rlhelpers import paths
from rlhelpers.evidence.failures import read_signs
from rlhelpers.evidence.runs import complete_runs, list_runs

KEPT = ("config.yaml", "metrics.jsonl", "run.json")  # no responses and no weights
TABLE = "runs.csv"


def collect(*experiments: str) -> tuple[list[Path], list[Path]]:
    """Copy the complete runs of some experiments from data/runs to data/results, and write the experiments' tables.

    Without a name: the experiments that data/results has already.  Returns the folders that were made, and those that
    were there already and are left as they are: a committed run is replaced by who deletes it first.  A run that
    cannot be read is left out with a warning.  Raises FileNotFoundError, before anything is copied, for an experiment
    of which no run is complete, and ValueError for what is no name of one.
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
    """The folder is there with all of KEPT, or not at all."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in KEPT:
        shutil.copy(source / name, temporary)
    temporary.rename(folder)


def table_of_runs(experiment: str) -> pd.DataFrame:
    """A row for each committed run: every setting, what it came to, how long it took, and how it was made."""
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
    """Those of config.yaml, the estimator's cells apart."""
    given = {"experiment", "variant", "seed", "row", "metrics", "folder", "minutes"}
    cells = {f"estimator.{name}": cell for name, cell in run["row"].items() if name != "name"}
    return {name: value for name, value in run.items() if name not in given} | cells


def _made(about: dict[str, Any]) -> dict[str, Any]:
    versions = {f"version.{name}": version for name, version in sorted(about.get("versions", {}).items())}
    return {name: about.get(name) for name in ("started", "finished", "commit", "machine", "python")} | versions
