"""The `papermill` command of this environment: papermill's own, with an output path that may be left out.

Papermill refuses a call without an output path in a terminal and prints the whole notebook into a pipe.  Here the
executed notebook then goes to `data/runs/notebooks/`, under a name of its own.  And what the notebook prints is shown
while it runs, so that a person can watch a training run; `--no-log-output` brings back papermill's bar of cells.
"""

import os
import sys
from datetime import datetime
from pathlib import Path

from rlhelpers import paths


def main() -> None:
    from papermill.cli import papermill

    papermill(complete(papermill, sys.argv[1:]), prog_name="papermill")


def complete(command, arguments: list[str]) -> list[str]:
    """The arguments with an output path and --log-output where they have none; unchanged where nothing will be run.

    Exits with a message for a `-p` name that no parameter can have, and for an output that would replace the notebook.
    """
    parsed = command.make_context("papermill", list(arguments), resilient_parsing=True).params
    notebook, output = parsed["notebook_path"], parsed["output_path"]
    for name, _ in [*(parsed["parameters"] or ()), *(parsed["parameters_raw"] or ())]:
        if not name.isidentifier():
            sys.exit(f"papermill: -p {name}: no parameter has such a name; did you mean {name.replace('-', '_')}?")
    if not notebook or parsed["help_notebook"]:
        return arguments
    if output and Path(output).resolve() == Path(notebook).resolve():
        sys.exit(f"papermill: the output {output} is the notebook itself; give it another name")
    if not output:
        output = (
            paths.RUNS / "notebooks" / f"{Path(notebook).stem}_{datetime.now():%Y-%m-%d_%H-%M-%S}_{os.getpid()}.ipynb"
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        arguments = [*arguments, str(output)]
    shown = output == "-" or {"--log-output", "--no-log-output"} & set(arguments)
    return arguments if shown else [*arguments, "--log-output"]
