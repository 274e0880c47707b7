"""What a notebook would train with some parameters, without training it, and what became of such a run: what a sweep
must know."""

import ast
import contextlib
import io
import json
import linecache
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rlhelpers.evidence.execution import as_json
from rlhelpers.evidence.plan import Planned
from rlhelpers.evidence.results import BEFORE_A_CHOICE
from rlhelpers.kernels.estimator import Estimator
from rlhelpers.training.config import RunConfig
from rlhelpers.training.records import RunRecords
from rlhelpers.training.run_state import run_state


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
