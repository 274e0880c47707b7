"""Many finished runs as tables: which there are, those that may be compared, and one metric of all of them."""

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rlhelpers import paths
from rlhelpers.checks import check_kind, check_text, check_texts
from rlhelpers.evidence.checks import check_runs, check_table
from rlhelpers.evidence.runs import read_metrics

# Settings that say where a run lies, how it was computed and what it left, and nothing about what was computed.
BOOKKEEPING = {"experiment", "variant", "seed", "device", "gradient_accumulation_steps", "rollouts_every", "tracker"}
BOOKKEEPING |= {"engine_gpu", "kv_cache_gib", "sleep_level", "gradient_checkpointing", "checkpoint_every", "resume"}
# What runs did before there was a choice.
BEFORE_A_CHOICE = {"components": "package", "engine": "torch", "rollouts_ahead": False}


def list_runs(*experiments: str, committed_only: bool = False) -> pd.DataFrame:
    """The complete runs of some experiments, one row each: the settings of config.yaml, `estimator` as its name and
    `row` as the whole of it, `minutes` of wall clock, `folder`, and `metrics` as read_metrics gives them.

    Read from data/results, which is committed, and from data/runs; of two runs with the same experiment, variant and
    seed the one in data/runs counts.  A folder that cannot be read is left out with a warning.  Raises
    FileNotFoundError where there is none.
    """
    check_texts(experiments=experiments)
    found = {}
    for root in (paths.RESULTS,) if committed_only else (paths.RESULTS, paths.RUNS):
        for experiment in experiments:
            found |= {run["folder"].relative_to(root): run for run in complete_runs(root / experiment)}
    if not found:
        names = ", ".join(experiments)
        raise FileNotFoundError(f"no complete run of {names} in data/results or data/runs; the notebooks make them")
    return pd.DataFrame(found.values())


def complete_runs(experiment: Path) -> Iterator[dict[str, Any]]:
    """The rows of list_runs that lie in one folder of an experiment.  What cannot be read, and a run that stopped
    because it diverged, is left out with a warning."""
    for file in sorted(experiment.glob("*/seed=*/run.json")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(about.get("versions", {}), dict):
                raise ValueError("run.json: versions is no mapping")
            if str(about.get("error")).startswith("DivergedError"):  # no final score, and not to be passed over
                raise ValueError(about["error"])
            if about["status"] == "complete" and ".earlier-" not in file.parent.name:
                yield _describe(file.parent)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(f"{file.parent} is left out: {why}", stacklevel=3)


def _describe(folder: Path) -> dict[str, Any]:
    settings = BEFORE_A_CHOICE | yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    # A run that learns from a file has a method and no estimator.
    row = {"engine_ratio_cap": None} | settings.pop("estimator", {"name": settings.get("method")})
    if not (folder / "metrics.jsonl").read_bytes().endswith(b"\n"):
        raise ValueError("metrics.jsonl: its last line is cut off, which no run that is complete leaves")
    metrics = read_metrics(folder)
    minutes = metrics["seconds"].sum() / 60
    texts = settings["experiment"], settings["variant"], row["name"]
    if type(settings["seed"]) is not int or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "config.yaml: accepted are a whole number as seed, and texts as experiment, variant and estimator.name"
        )
    if "val_reward" not in metrics or metrics["val_reward"].isna().all():
        raise ValueError("metrics.jsonl: it has no val_reward")
    return settings | {"estimator": row["name"], "row": row, "minutes": minutes, "folder": folder, "metrics": metrics}


def comparable(runs: pd.DataFrame, settings: Mapping[str, Any], except_for: Collection[str]) -> pd.DataFrame:
    """The runs that agree with `settings` in all that matters, but for the settings named in `except_for`.

    `settings`: RunConfig.model_dump(mode="json").  Runs that differ only in bookkeeping are one run done again; the
    last one listed counts, which is one of data/runs where there is one.
    """
    check_table(runs=runs)
    check_kind(Mapping, "settings by name, as RunConfig.model_dump gives them", settings=settings)
    check_kind((list, tuple, set, frozenset), "a list of settings", except_for=except_for)
    check_texts(except_for=list(except_for))
    if unknown := set(except_for) - set(settings):
        raise ValueError(f"except_for: there is no setting {', '.join(sorted(unknown))}")
    wanted = {"row" if name == "estimator" else name: value for name, value in settings.items()}
    matters = [name for name in wanted if name not in BOOKKEEPING]
    free = {"row" if name == "estimator" else name for name in except_for}
    if unknown := set(matters) - free - set(runs):
        raise ValueError(f"settings: no run has {', '.join(sorted(unknown))}; accepted are {', '.join(map(str, runs))}")
    found = {}
    for run in runs.to_dict("records"):
        if all(run[name] == wanted[name] for name in matters if name not in free):
            found[repr([run["seed"], *(run[name] for name in matters)])] = run
    return pd.DataFrame(found.values(), columns=runs.columns)


def read_curves(runs: pd.DataFrame, metric: str, by: str) -> pd.DataFrame:
    """One metric of all runs: a row for each step that has it, a column (value of `by`, seed) for each run.

    Raises ValueError when two runs would share a column: they differ in something that `by` does not tell.
    """
    check_runs(runs, by)
    check_text(metric=metric)
    columns = {}
    for run in runs.itertuples():
        column = getattr(run, by), run.seed
        if column in columns:
            raise ValueError(f"by: two runs have {by}={column[0]!r} and seed {column[1]}; {run.folder} is one of them")
        columns[column] = run.metrics.get(metric, pd.Series(dtype=float))
    table = pd.DataFrame(columns)
    table.columns = pd.MultiIndex.from_tuples(columns, names=[by, "seed"])
    return table.dropna(how="all").sort_index()
