"""What a sweep will do: every run of its grids once, and what of them is there already.

A notebook's cells say what it would train: they are run here up to its configuration, and nothing is trained.
"""

import ast
import contextlib
import io
import itertools
import json
import linecache
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rlhelpers import paths
from rlhelpers.evidence.runs import BEFORE_A_CHOICE
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.sweep.grid import Grid
from rlhelpers.sweep.run import BUSY, COMPLETE, RUNNING, Run, as_json
from rlhelpers.training.config import RunConfig
from rlhelpers.training.run_folder import RunRecords, run_state


def make_plan(grids: Sequence[Grid], resume: bool = False) -> tuple[list[Run], list[str]]:
    """Return every run once, and remarks on the combinations that come to the same run.

    A run's detail says what will be done about it, with `resume` or without.  Raises ValueError with all that is wrong,
    before anything has run.
    """
    runs, remarks, errors = [], [], defaultdict(list)
    known: dict[str | Path, Run] = {}  # by fingerprint, by folder, by executed notebook
    for run, error in itertools.chain.from_iterable(map(_runs_of, grids)):
        other = known.get(run.output)
        if error:
            errors[error].append(run.name)
        elif run.folder and run.fingerprint in known:
            remarks.append(f"{run.name}: the same run as {known[run.fingerprint].name}")
        elif run.folder and run.folder in known:
            where = run.folder.relative_to(paths.RUNS)
            errors[f"two runs would be written to {where}"] += [known[run.folder].name, run.name]
        elif other and (other.notebook.resolve(), other.parameters) == (run.notebook.resolve(), run.parameters):
            remarks.append(f"{run.name}: asked for twice")
        elif other:
            names = f"got {other.notebook} and {run.notebook}; accepted are those of different names"
            errors[f"notebook: {names}"].append(run.name)
        else:
            known |= {run.output: run} | ({run.folder: run, run.fingerprint: run} if run.folder else {})
            runs.append(run)
    if errors:
        raise ValueError("\n".join(f"{error}\n  in {_few(names)}" for error, names in errors.items()))
    _look_for(runs, resume)
    return runs, remarks


def _runs_of(grid: Grid) -> Iterator[tuple[Run, str]]:
    """The runs of a grid, each with what is wrong with it, mostly nothing."""
    for parameters in grid.combinations():
        run, error = Run(grid.notebook, parameters, can_resume="resume" in grid.known), ""
        try:
            if config := configuration(grid.notebook, parameters):
                records = RunRecords(config)
                run.folder, run.fingerprint, run.steps = records.folder, records.fingerprint, config.num_rollout_steps
        except ValueError as refused:
            error = str(refused)
        yield run, error


def _few(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _look_for(runs: Sequence[Run], resume: bool) -> None:
    """Say of each run whether it is there.  It is complete wherever it lies: its fingerprint counts, not its name."""
    complete = {}
    for root in (paths.RESULTS, paths.RUNS):  # the second counts before the first
        for file in sorted(root.glob("*/*/seed=*/run.json")):
            state, fingerprint = _look(file.parent)
            if state == COMPLETE and ".earlier-" not in file.parent.name:
                complete[fingerprint or file.parent.relative_to(root)] = file.parent
    for run in runs:
        if run.folder is None:
            continue
        state, fingerprint = _look(run.folder)
        if folder := complete.get(run.fingerprint):
            where = folder.relative_to(paths.DATA) if folder.is_relative_to(paths.DATA) else folder
            run.state, run.detail = COMPLETE, f"before, {where}"
        elif state == RUNNING:
            run.detail = BUSY
        elif state == "absent":
            untold = run.folder.relative_to(paths.RUNS) in complete
            what = "; the complete run of that name in data/results does not tell its whole configuration"
            run.detail = f"new{what if untold else ''}"
        elif fingerprint != run.fingerprint:
            run.detail = "new; what lies in its folder is another run and is moved aside"
        else:
            run.detail = "goes on" if resume else "begins again; --resume goes on with what is unfinished"


def _look(folder: Path) -> tuple[str, str | None]:
    """The state of a run, and the fingerprint of its configuration, which runs from before there were any lack."""
    state = run_state(folder)
    return state.status, state.fingerprint or fingerprint_of_settings(folder)


def fingerprint_of_settings(folder: Path) -> str | None:
    """Return the fingerprint of config.yaml, with model and task as they are now; None where it does not tell all.

    Of an own estimator it knows no more than the names of its functions.
    """
    try:
        settings = BEFORE_A_CHOICE | yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return RunConfig(**settings | {"estimator": Estimator(**settings["estimator"])}).fingerprint
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


def configuration(notebook: Path, parameters: Mapping[str, Any]) -> RunConfig | None:
    """Return the notebook's `config` with these parameters; None where it makes none.

    Its cells run here up to the one that assigns `config`, with the parameters where papermill would put them.  So a
    row of the reader's own and a notebook's own settings count.  Raises ValueError as make_config does, and for a cell
    that fails.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "In": [""]}  # In: what IPython keeps, for read_parameters
    for number, source in enumerate(_cells_up_to_config(notebook, parameters)):
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
    """Return [] where no cell makes a configuration, or where one before it is not plain Python."""
    content = load_notebook_node(str(notebook))
    if parameters:
        content = parameterize_notebook(content, json.loads(as_json(parameters)))  # as the run gets them
    sources = []
    for source in (cell.source for cell in content.cells if cell.cell_type == "code"):
        sources.append(source)
        try:
            statements = ast.parse(source).body
        except SyntaxError:
            return []
        targets = [target for s in statements if isinstance(s, ast.Assign) for target in s.targets]
        if any(isinstance(target, ast.Name) and target.id == "config" for target in targets):
            return sources
    return []
