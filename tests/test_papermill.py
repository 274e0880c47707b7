"""The papermill command with and without an output path."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from papermill.cli import papermill as papermill_command

from rlhelpers import paths
from rlhelpers.workbook.papermill import complete

COMMAND = Path(sys.executable).with_name("papermill")


def test_a_missing_output_path_is_filled_in(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    arguments = ["notebooks/04_grpo.ipynb", "-p", "seed", "2"]
    *kept, output, shown = complete(papermill_command, arguments)
    assert kept == arguments and shown == "--log-output"
    assert Path(output).parent == tmp_path / "notebooks" and Path(output).name.startswith("04_grpo_")


def test_what_is_printed_is_shown_unless_told_otherwise():
    assert complete(papermill_command, ["in.ipynb", "out.ipynb"]) == ["in.ipynb", "out.ipynb", "--log-output"]


@pytest.mark.parametrize(
    "arguments",
    [["in.ipynb", "out.ipynb", "--no-log-output"], ["-p", "a", "1", "in.ipynb", "-"], ["in.ipynb", "--help-notebook"]],
)
def test_other_calls_are_left_as_they_are(arguments):
    assert complete(papermill_command, arguments) == arguments


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_the_command_as_typed(tmp_path, in_a_terminal):
    """Plain papermill refuses the first and fills the second's output with the notebook."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1 + 1)")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "small.ipynb")
    environment = os.environ | {"RLHELPERS_ROOT": str(tmp_path)}
    terminal, side = pty.openpty() if in_a_terminal else (None, subprocess.PIPE)
    result = subprocess.run(
        [COMMAND, "small.ipynb"], cwd=tmp_path, env=environment, stdin=side, stdout=side, stderr=side, timeout=120
    )
    if in_a_terminal:
        os.close(side), os.close(terminal)
    assert result.returncode == 0
    (output,) = (tmp_path / "data/runs/notebooks").iterdir()
    assert nbformat.read(output, as_version=4).cells[0].outputs[0].text == "2\n"


def test_mistakes_that_papermill_would_not_catch(tmp_path):
    with pytest.raises(ValueError, match="-p learning-rate: no parameter has such a name; did you mean learning_rate"):
        complete(papermill_command, ["in.ipynb", "-p", "learning-rate", "1e-4"])
    with pytest.raises(ValueError, match="is the notebook itself"):
        complete(papermill_command, ["in.ipynb", "./in.ipynb"])
