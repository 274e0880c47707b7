"""Run folders as tables: one run's metrics and responses, and many runs: which there are, and which are comparable."""

import json
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rlhelpers import paths
from rlhelpers.checks import check_kind, check_one_of, check_text, check_texts, check_whole, shown

# What runs did before there was a choice.
BEFORE_A_CHOICE = {"components": "package", "engine": "torch", "rollouts_ahead": False}


def read_metrics(folder: Path) -> pd.DataFrame:
    """metrics.jsonl of a run: a row for each step, indexed by `step`; NaN where a step lacks a value.

    Raises FileNotFoundError when the folder holds no run; ValueError for a line that is not JSON, a step that does not
    come after the one before, or a file without steps.
    """
    check_kind((str, Path), "a run's folder", folder=folder)
    file = Path(folder) / "metrics.jsonl"
    metrics = pd.DataFrame(read_jsonl(file))
    if "step" not in metrics:
        raise ValueError(f"{file}: it has no step")
    metrics = metrics.set_index("step").astype(float)
    late = metrics.index[1:][~(metrics.index[1:] > metrics.index[:-1])]
    if len(late):
        raise ValueError(f"{file}: step {late[0]} stands after a step that is not before it")
    return metrics


def seconds_by_part(metrics: pd.DataFrame) -> pd.Series:
    """Seconds of wall clock of a run: `sampling`, `training` (with grading), `syncing`, `validation`, and the `rest`.

    metrics: as read_metrics gives them.  Loading, before step 0, is not counted.  Validation has no clock: it is what
    its steps take beyond the median rest of the other steps, so there must be one without it.
    """
    clocks = ["seconds_sampling", "seconds_training", "seconds_syncing"]
    timed = metrics.reindex(columns=clocks).fillna(0.0)
    other = metrics["seconds"] - timed.sum(axis=1)
    validated = metrics["val_reward"].notna()
    usual = other[~validated].median()
    parts = timed.sum().rename(lambda name: name.removeprefix("seconds_"))
    validation = (other[validated] - usual).sum()
    return pd.concat([parts, pd.Series({"validation": validation, "rest": other.sum() - validation})])


def table_of_times(runs: Mapping[str, Sequence[Path]]) -> pd.DataFrame:
    """A column for each name: medians over its runs' folders, in seconds.

    Rows: the parts of seconds_by_part, the `whole run`, and `one step`, the median step without validation.
    """
    check_kind(Mapping, "folders by name", runs=runs)
    columns = {name: [read_metrics(folder) for folder in folders] for name, folders in runs.items()}
    return pd.DataFrame({name: pd.DataFrame(map(_times, found)).median() for name, found in columns.items()})


def _times(metrics: pd.DataFrame) -> pd.Series:
    step = metrics.loc[metrics["val_reward"].isna(), "seconds"].median()
    return pd.concat([seconds_by_part(metrics), pd.Series({"whole run": metrics["seconds"].sum(), "one step": step})])


def read_rollouts(folder: Path, step: int, split: str) -> pd.DataFrame:
    """The responses of one step that a run kept; `split` is "train" or "validation"."""
    check_kind((str, Path), "a run's folder", folder=folder)
    check_whole(0, step=step)
    check_one_of(("train", "validation"), split=split)
    return pd.DataFrame(read_jsonl(Path(folder) / "rollouts" / f"step_{step:05d}_{split}.jsonl"))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """A row for each line.

    A last line that was cut off, by a kill or while it is written, is left out with a warning.  Raises ValueError
    naming any other line that is not JSON.
    """
    rows = []
    with open(path, "rb") as lines:  # decoded one by one: it may be cut off within a letter
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if not line.endswith(b"\n"):
                    warnings.warn(f"{path}, line {number}: it was cut off, and is left out", stacklevel=2)
                    break
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def list_runs(*experiments: str, committed_only: bool = False) -> pd.DataFrame:
    """A row for each complete run of these experiments.

    Columns: the settings of config.yaml, with `estimator` as its name and `row` as its cells; `minutes` of wall clock;
    `folder`; `metrics` as read_metrics gives them.  Read from data/results, which is committed, and from data/runs; of
    two runs with the same experiment, variant and seed the one in data/runs counts.  A folder that cannot be read is
    left out with a warning.  Raises FileNotFoundError where there is none.
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
    """The rows of list_runs in one experiment's folder.

    What cannot be read, and a run that stopped because it diverged, is left out with a warning.
    """
    for file in sorted(experiment.glob("*/seed=*/run.json")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(about.get("versions", {}), dict):
                raise ValueError("run.json: versions is no mapping")
            if str(about.get("error")).startswith("DivergedError"):  # it has no final score, and silence would hide it
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
    """Return the runs that agree with `settings`, but for those named in `except_for`.

    settings: what must agree, as RunConfig.comparable_settings() gives it.  Runs of one seed that agree in all of it
    are one run done again: the last one listed counts, which is one of data/runs where there is one.
    """
    check_table(runs=runs)
    check_kind(Mapping, "settings by name, as RunConfig.comparable_settings gives them", settings=settings)
    check_kind((list, tuple, set, frozenset), "a list of settings", except_for=except_for)
    check_texts(except_for=list(except_for))
    if unknown := set(except_for) - set(settings):
        raise ValueError(f"except_for: there is no setting {', '.join(sorted(unknown))}")
    if "seed" in settings:  # of model_dump: no two seeds would agree
        raise ValueError("settings: got a seed; accepted are those of RunConfig.comparable_settings()")
    wanted = {"row" if name == "estimator" else name: value for name, value in settings.items()}
    free = {"row" if name == "estimator" else name for name in except_for}
    if unknown := set(wanted) - free - set(runs):
        raise ValueError(f"settings: no run has {', '.join(sorted(unknown))}; accepted are {', '.join(map(str, runs))}")
    found = {}
    for run in runs.to_dict("records"):
        if all(run[name] == wanted[name] for name in wanted if name not in free):
            found[repr([run["seed"], *(run[name] for name in wanted)])] = run
    return pd.DataFrame(found.values(), columns=runs.columns)


def read_curves(runs: pd.DataFrame, metric: str, by: str) -> pd.DataFrame:
    """One metric of all runs: a row for each step that has it, a column (value of `by`, seed) for each run.

    Raises ValueError when two runs would share a column: they differ in something else than `by`.
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


# ---- Arguments that are tables.


def check_table(*columns: str, **tables: pd.DataFrame) -> None:
    """Raise ValueError unless each is a table with these columns."""
    check_kind(pd.DataFrame, "a table (pandas DataFrame)", **tables)
    for name, table in tables.items():
        if missing := [column for column in columns if column not in table]:
            raise ValueError(f"{name}: got a table without {', '.join(missing)}; it has {_names(table)}")


def check_column(table: pd.DataFrame, **columns: Hashable) -> None:
    """Raise ValueError unless each names a column of the table."""
    for name, column in columns.items():
        if not isinstance(column, Hashable) or column not in table:
            raise ValueError(f"{name}: got {shown(column)}; accepted are {_names(table) or 'none'}")


def check_runs(runs: pd.DataFrame, by: str) -> None:
    """Raise ValueError unless it is a table of runs, as list_runs gives it, with a column `by`."""
    check_table(runs=runs)
    check_column(runs, by=by)
    check_table("seed", "metrics", runs=runs)


def _names(table: pd.DataFrame) -> str:
    return ", ".join(map(str, table))
