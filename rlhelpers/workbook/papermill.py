"""The `papermill` command of this environment: papermill's own, with an output path that may be left out.

Papermill refuses a call without an output path in a terminal and prints the whole notebook into a pipe.  Here the
executed notebook then goes to `data/runs/notebooks/`, under a name of its own.
"""

import os
import sys
from datetime import datetime
from pathlib import Path

from rlhelpers import paths


def main() -> None:
    from papermill.cli import papermill

    papermill(with_output_path(papermill, sys.argv[1:]), prog_name="papermill")


def with_output_path(command, arguments: list[str]) -> list[str]:
    """The arguments as papermill wants them; unchanged where they name an output or no notebook."""
    parsed = command.make_context("papermill", list(arguments), resilient_parsing=True).params
    notebook = parsed["notebook_path"]
    if not notebook or parsed["output_path"] or parsed["help_notebook"]:
        return arguments
    folder = paths.RUNS / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{Path(notebook).stem}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}.ipynb"
    print(f"Output Notebook: {output}", file=sys.stderr)
    return [*arguments, str(output)]
