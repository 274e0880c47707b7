"""What a sweep will do: every run of its grids once, and what of them is there already.

Nothing here trains or knows how: two functions are handed in that know it, PlanRun and Look.


What a notebook would train with some parameters, without training it, and what became of such a run: what a sweep
must know."""

import ast
import contextlib
import io
import json
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rlhelpers import paths
from rlhelpers.evidence.runs import BEFORE_A_CHOICE
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.sweep.board import Row
from rlhelpers.sweep.grid import Grid, describe, name_of
from rlhelpers.sweep.workers import BUSY, COMPLETE, RUNNING, WAITING, as_json
from rlhelpers.training.config import RunConfig
from rlhelpers.training.run_folder import RunRecords, run_state


@dataclass(frozen=True)
class Planned:
    """What a notebook would train: the folder of the run, the fingerprint of its configuration, its steps."""

    folder: Path
    fingerprint: str
    steps: int


# What a notebook would train with these parameters; None where it trains nothing.  Raises ValueError for what no run
# can have.
PlanRun = Callable[[Path, Mapping[str, Any]], Planned | None]
# The state of a run's folder (absent, running, complete, failed, killed), and the fingerprint, None where it cannot be
# told.
Look = Callable[[Path], tuple[str, str | None]]


@dataclass
class Entry:
    """A run of the sweep; `found` says what was there before."""

    notebook: Path
    parameters: dict[str, Any]
    planned: Planned | None
    can_resume: bool = False
    found: str = "new"
    state: str = WAITING
    detail: str = ""
    output: Path = field(init=False)

    def __post_init__(self):
        self.output = paths.RUNS / "notebooks" / f"{name_of(self.notebook, self.parameters)}.ipynb"

    @property
    def name(self) -> str:
        return f"{self.notebook.stem} {describe(self.parameters)}".strip()


def make_plan(grids: Sequence[Grid], plan_run: PlanRun, look: Look) -> tuple[list[Entry], list[str]]:
    """Every run once, and remarks on the combinations that come to the same run.

    Raises ValueError with all that is wrong, before anything has run.
    """
    entries, remarks, errors = [], [], {}
    by_fingerprint, by_folder, by_output = {}, {}, {}
    for grid in grids:
        for parameters in grid.combinations():
            try:
                planned = plan_run(grid.notebook, parameters)
            except ValueError as error:
                errors.setdefault(str(error), []).append(f"{grid.notebook.stem} {describe(parameters)}")
                continue
            entry = Entry(grid.notebook, parameters, planned, "resume" in grid.known)
            if planned:
                if same := by_fingerprint.get(planned.fingerprint):
                    remarks.append(f"{entry.name}: the same run as {same.name}")
                    continue
                if other := by_folder.get(planned.folder):
                    where = planned.folder.relative_to(paths.RUNS)
                    errors.setdefault(f"two runs would be written to {where}", [other.name]).append(entry.name)
                by_fingerprint[planned.fingerprint] = by_folder[planned.folder] = entry
            if (other := by_output.setdefault(entry.output, entry)) is not entry:
                if (other.notebook.resolve(), other.parameters) == (entry.notebook.resolve(), parameters):
                    remarks.append(f"{entry.name}: asked for twice")
                else:
                    error = (
                        f"notebook: got {other.notebook} and {entry.notebook}; accepted are those of different names"
                    )
                    errors.setdefault(error, []).append(entry.name)
                continue
            entries.append(entry)
    if errors:
        raise ValueError("\n".join(f"{error}\n  in {_few(names)}" for error, names in errors.items()))
    _find(entries, look)
    return entries, remarks


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _find(entries: Sequence[Entry], look: Look) -> None:
    """What is there already.  A run is complete wherever it lies: its fingerprint says which it is, not its name."""
    complete, untold = {}, set()
    for root in (paths.RESULTS, paths.RUNS):  # the second counts before the first
        for file in sorted(root.glob("*/*/seed=*/run.json")):
            state, fingerprint = look(file.parent)
            if state == COMPLETE and ".earlier-" not in file.parent.name:
                complete[fingerprint] = file.parent
                if fingerprint is None:
                    untold.add(file.parent.relative_to(root))
    for entry in entries:
        if entry.planned is None:
            continue
        if folder := complete.get(entry.planned.fingerprint):
            entry.found, entry.state = COMPLETE, COMPLETE
            entry.detail = f"before, {folder.relative_to(paths.DATA) if folder.is_relative_to(paths.DATA) else folder}"
            continue
        state, fingerprint = look(entry.planned.folder)
        if state == RUNNING:
            entry.found = BUSY
        elif state != "absent":
            entry.found = "unfinished" if fingerprint == entry.planned.fingerprint else "another"
        elif entry.planned.folder.relative_to(paths.RUNS) in untold:
            entry.found = "untold"


def rows_of_plan(entries: Sequence[Entry], resume: bool) -> list[Row]:
    """What will be done with each."""
    words = {
        "new": "new",
        "unfinished": "goes on" if resume else "begins again; --resume goes on with what is unfinished",
        "untold": "new; the complete run of that name in data/results does not tell its whole configuration",
        BUSY: BUSY,
        "another": "new; what lies in its folder is another run and is moved aside",
    }
    return [Row(e.name, e.state, e.detail or words.get(e.found, "")) for e in entries]


def plan(notebook: Path, parameters: Mapping[str, Any]) -> Planned | None:
    """The run that the notebook would train; None where it trains none.  Raises ValueError, see configuration."""
    config = configuration(notebook, parameters)
    if config is None:
        return None
    records = RunRecords(config)
    return Planned(records.folder, records.fingerprint, config.num_rollout_steps)


def look(folder: Path) -> tuple[str, str | None]:
    """The state of a run's folder, and the fingerprint of its configuration.

    Runs from before there were fingerprints have that of their settings, as far as these are known.
    """
    state = run_state(folder)
    return state.status, state.fingerprint or fingerprint_of_settings(folder)


def fingerprint_of_settings(folder: Path) -> str | None:
    """Of config.yaml, with model and task as they are now; None where it does not tell everything: of an own estimator
    it knows no more than the names of its functions."""
    try:
        settings = BEFORE_A_CHOICE | yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return RunConfig(**settings | {"estimator": Estimator(**settings["estimator"])}).fingerprint
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


def configuration(notebook: Path, parameters: Mapping[str, Any]) -> RunConfig | None:
    """The notebook's `config` with these parameters; None where it makes none.

    Its cells are run here up to the one that assigns `config`, with the parameters where papermill would put them, so
    that a row of the reader's own and a notebook's own settings count.  Raises ValueError as make_config does, and for
    a cell that fails.
    """
    cells = _cells_up_to_config(notebook, parameters)
    namespace: dict[str, Any] = {"__name__": "__main__", "In": [""]}  # In: what IPython keeps, for read_parameters
    for number, source in enumerate(cells):
        namespace["In"].append(source)
        name = f"<{notebook.stem}, cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # functions have a source
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(source, name, "exec"), namespace)
        except ValueError:
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"{notebook.name}: {type(error).__name__}: {error}\n  in {source[:80]!r}") from error
    config = namespace.get("config")
    return config if isinstance(config, RunConfig) else None


def _cells_up_to_config(notebook: Path, parameters: Mapping[str, Any]) -> list[str]:
    """None of them where no cell makes a configuration, or where one before it is not plain Python."""
    content = load_notebook_node(str(notebook))
    if parameters:
        content = parameterize_notebook(content, json.loads(as_json(parameters)))  # as the run gets them
    sources = []
    for cell in content.cells:
        if cell.cell_type == "code":
            sources.append(cell.source)
            try:
                names = _assigned(cell.source)
            except SyntaxError:
                return []
            if "config" in names:
                return sources
    return []


def _assigned(source: str) -> set[str]:
    targets = [t for s in ast.parse(source).body if isinstance(s, ast.Assign) for t in s.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}
