"""nbval with our conftest.py: what is compared of a notebook's saved output, and what is not."""

import json
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from rlhelpers import paths

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
MARK = "# NBVAL_IGNORE_OUTPUT"


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """What nbval, with our conftest.py, says of a few cells that were saved with other output on standard error."""
    folder = tmp_path_factory.mktemp("nbval")
    shutil.copy(paths.ROOT / "notebooks/conftest.py", folder)
    sources = {
        "bar": "from tqdm import tqdm\nfor i in tqdm(range(3)):\n    pass\nprint('after a bar')",
        "warning": "import warnings\nwarnings.warn('this is new')\nprint('after a warning')",
        "time": "import time\nprint(time.perf_counter())",
        "error": "1 / 0",
    }
    saved = ["after a bar\n", "after a warning\n", "17.5\n", ""]
    cells = [
        nbformat.v4.new_code_cell(
            source, execution_count=n, outputs=[nbformat.v4.new_output("stream", text=text)] if text else []
        )
        for n, (source, text) in enumerate(zip(sources.values(), saved, strict=True), start=1)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "cells.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-rA", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=300)
    found = re.findall(r"^(PASSED|FAILED) \S*::Cell (\d)", result.stdout, re.MULTILINE)
    return {list(sources)[int(number)]: verdict for verdict, number in found}


@pytest.mark.slow
@pytest.mark.field_report("D12")
def test_a_bar_is_not_compared_and_a_time_fails(validated):
    assert (validated["bar"], validated["time"]) == ("PASSED", "FAILED")
    for file in NOTEBOOKS:  # in ours, where each printed line is compared
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code" and re.search(r"tqdm|perf_counter|monotonic|time\(\)|\.now\(", cell.source):
                assert MARK in cell.source, f"{file.name}: {cell.source}"


@pytest.mark.field_report("D13")
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_no_picture_and_no_address_is_compared(file):
    for cell in nbformat.read(file, as_version=4).cells:
        shown = json.dumps(cell.get("outputs", []))
        if re.search(r"image/|<Figure size|<Axes|at 0x[0-9a-f]+|widget-view", shown):
            assert MARK in cell.source, cell.source


@pytest.mark.slow
@pytest.mark.field_report("D14")
def test_a_warning_is_not_compared_and_an_error_fails(validated):
    assert (validated["warning"], validated["error"]) == ("PASSED", "FAILED")
    assert not any("stderr" in json.dumps(cell.get("outputs", [])) for cell in nbformat.read(NOTEBOOKS[0], 4).cells)
