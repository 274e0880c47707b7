"""OpenMP's threads wait briefly wherever the project starts Python, unless the user has decided otherwise."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from rlhelpers import SHORT_WAITS, paths

NAMES = [*SHORT_WAITS, "OMP_WAIT_POLICY"]
SHOW = f"import os; print(*(os.environ.get(name) for name in {NAMES!r}))"
BARE = {name: value for name, value in os.environ.items() if name not in NAMES}
# Torch as it would be on a machine with some cores, and perhaps a GPU.
TORCH = """
import sys, types
cuda = types.SimpleNamespace(is_available=lambda: {gpu})
sys.modules["torch"] = types.SimpleNamespace(get_num_threads=lambda: {threads}, cuda=cuda)
"""
slow = pytest.mark.slow


def run(program: str, **variables: str):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=BARE | variables, capture_output=True, text=True, check=True, timeout=120)


@slow
def test_the_package_sets_what_is_not_set():
    assert run(f"import rlhelpers; {SHOW}").stdout == "1000 1 None\n"


@slow
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GOMP_SPINCOUNT": "5"}, "5 1 None\n"),
        ({"KMP_BLOCKTIME": "infinite"}, "1000 infinite None\n"),
        ({"OMP_WAIT_POLICY": "active"}, "None None active\n"),
    ],
)
def test_what_the_user_has_set_stays(variables, expected):
    assert run(f"import rlhelpers; {SHOW}", **variables).stdout == expected


@slow
def test_torch_that_came_first_is_said_once():
    program = f"{TORCH.format(threads=2, gpu=False)}\nimport rlhelpers, rlhelpers.paths\n{SHOW}"
    done = run(program)
    assert done.stderr.count("torch was imported before rlhelpers") == 1
    assert "<string>" in done.stderr  # it names the import
    assert done.stdout == "1000 1 None\n"  # for children


@slow
@pytest.mark.parametrize(
    ("threads", "gpu", "variables"),
    [
        (1, False, {}),
        (2, True, {}),
        *((2, False, {name: "1"}) for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")),
        (2, False, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_nothing_is_said_where_it_does_not_matter(threads, gpu, variables):
    assert run(f"{TORCH.format(threads=threads, gpu=gpu)}\nimport rlhelpers", **variables).stderr == ""


def test_these_tests_wait_briefly():
    assert any(name in os.environ for name in NAMES)


@slow
def test_torch_itself_is_not_imported():
    assert run("import sys, rlhelpers; print('torch' in sys.modules)").stdout == "False\n"


@pytest.mark.parametrize("path", sorted((paths.ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_notebook_imports_torch_before_the_package(path):
    """A kernel of JupyterLab inherits nothing from this package."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    trees = [ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in nodes]
    first = next(name for name in names if name.partition(".")[0] in ("torch", "transformers", "rlhelpers"))
    assert first.startswith("rlhelpers")


@slow
@pytest.mark.parametrize("module", ["workbook.papermill", "sweep.run"])
def test_a_kernel_of_ours_has_it(module, tmp_path):
    """Before the notebook imports anything."""
    notebook, output = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SHOW)]), notebook)
    if module == "workbook.papermill":
        command = [Path(sys.executable).with_name("papermill"), notebook, output, "--kernel", "python3"]
    else:
        command = [sys.executable, "-m", f"rlhelpers.{module}", notebook, output, "{}"]
    with subprocess.Popen(command, env=BARE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        process.stdout.read()
        assert process.wait(120) == 0
    [cell] = nbformat.read(output, 4).cells
    assert cell.outputs[0].text == "1000 1 None\n"
