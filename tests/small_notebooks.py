"""Notebooks of two or three cells, which the tests execute or only look at."""

from pathlib import Path

import nbformat

PARAMETERS = """# Parameters: of a notebook that trains nothing
seed: int = 0  # names the run
seconds: float = 0.0  # to sleep
fail: bool = False  # in its second cell
"""
CELL = """import pathlib, time
pathlib.Path(f"began-{seed}").touch()
if fail:
    raise ValueError("it was told to fail")
time.sleep(seconds)
print("seed", seed, "is done")
"""
# A notebook that says it trained: the first cells of one that does, and RECORDS.
RECORDED = [
    "# Parameters: of a notebook that records a run\nseed: int = 0\nresume: bool = False\n",
    """import os, signal, time
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.workbook.parameters import read_parameters
config = make_config(quick=True, **read_parameters(globals()))
""",
]
RECORDS = """with RunRecords(config) as records:
    records.log({"step": 0, "val_reward": 0.5})
    time.sleep(3)
"""


def write(file: Path, *cells: str, tag: str = "parameters", **kernel: str) -> Path:
    """Write a notebook whose first cell has the tag; returns the file."""
    cells = [nbformat.v4.new_code_cell(source) for source in cells]
    cells[0].metadata["tags"] = [tag]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"} | kernel
    nbformat.write(notebook, file)
    return file
