"""Files: whole or not there, JSON that every parser reads, YAML without names given twice, UTF-8 everywhere."""

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from rlhelpers import files, paths
from rlhelpers.files import load_yaml, remove_leftovers, strict_json, whole_folder, write_atomically


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    write_atomically(file, "old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_is_there_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(files, "to_disk", lambda path: order.append((path.name, (tmp_path / "new").exists())))
    with whole_folder(tmp_path / "new") as folder:
        (folder / "a").write_text("a", encoding="utf-8")
        assert not (tmp_path / "new").exists()
    assert order == [("a", False), (folder.name, False), (tmp_path.name, True)]
    with pytest.raises(OSError, match="disk full"), whole_folder(tmp_path / "new") as folder:
        raise OSError("disk full")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "a"]
    with whole_folder(tmp_path / "new") as folder:
        (folder / "b").write_text("b", encoding="utf-8")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "b"]


def test_json_is_strict():
    """NaN and infinities are null; tensors, arrays and numpy's scalars are numbers; keys are texts."""
    row = {
        "kl": math.nan,
        "max": [math.inf, -math.inf],
        "loss": torch.tensor(1.5),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "some": (torch.tensor([1.0, math.nan]), np.array([[1.0, math.inf]])),
        "n": np.int64(3),
        "float32": np.float32(0.5),
        "float64": np.float64(math.nan),
        "true": np.bool_(True),
        "text": "é数\u2028\0",
        "x": None,
        7: 10**30,
    }
    line = strict_json(row)
    assert json.loads(line, parse_constant=pytest.fail) == {
        "kl": None,
        "max": [None, None],
        "loss": 1.5,
        "half": 0.5,
        "some": [[1.0, None], [[1.0, None]]],
        "n": 3,
        "float32": 0.5,
        "float64": None,
        "true": True,
        "text": "é数\u2028\0",
        "x": None,
        "7": 10**30,
    }
    assert "é数" in line and "\n" not in line and "\n" in strict_json(row, indent=2)
    with pytest.raises(ValueError, match="a object is not JSON"):
        strict_json({"what": object()})


def test_numbers_of_json_come_back_bit_for_bit():
    numbers = [0.1, 1e-5, 1e16, 5e-324, -0.0, 1 / 3, 2**53 + 1, float(np.float32(0.1))]
    assert [value.hex() for value in map(float, json.loads(strict_json(numbers)))] == [float(n).hex() for n in numbers]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "file.yaml: c: given twice, line 3 and after"),
        ("- {a: 1, a: 2}", "file.yaml: a: given twice, line 1 and after"),
        ("a: [", "file.yaml: while parsing a flow node expected the node content"),
        ("a: !!python/name:os.system", "file.yaml: could not determine a constructor"),
    ],
)
def test_what_is_wrong_with_yaml_is_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        load_yaml(text, "file.yaml")
    assert "\n" not in str(error.value)


def test_yaml_may_repeat_by_reference():
    assert load_yaml("a: &x {k: 1, j: 2}\nb: &y {<<: *x, k: 3}\nc: {<<: *y}\nd: *y", "")["d"] == {"k": 3, "j": 2}
    assert load_yaml("a: &x [*x]", "")["a"][0][0] and load_yaml("", "") is None


READS = """
import json, sys, warnings
from pathlib import Path
warnings.filterwarnings("error", category=EncodingWarning, module="rlhelpers")
assert not sys.flags.utf8_mode and sys.getfilesystemencoding() is not None
from rlhelpers import paths
from rlhelpers.sweep.grid import read
from rlhelpers.evidence.runs import read_metrics, read_rollouts
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.run_folder import run_state
from rlhelpers.sweep import plan as configurations
paths.RUNS = Path("runs")
[problem] = load_task("task", 1, 1).train
assert problem.question == "Janet’s café: 数?", ascii(problem.question)
assert problem.question in get_prompt("r1_zero_three_shot")(problem.question)
with RunRecords(make_config(variant="e")) as records:
    records.log({"step": 0, "note": None})
    records.write_rollouts(0, "train", [{"response": "’é数"}])
assert run_state(records.folder).status == "complete" and len(read_metrics(records.folder)) == 1
assert read_rollouts(records.folder, 0, "train").response.tolist() == ["’é数"]
assert configurations.fingerprint_of_settings(records.folder)
[grid] = read(Path("04.ipynb"), {"seed": "1"})
assert configurations.configuration(grid.notebook, {"seed": 1, "variant": "é"}).variant == "é"
print("all read")
"""


@pytest.mark.slow
@pytest.mark.field_report("D17")
def test_the_platforms_encoding_is_never_used(tmp_path):
    """ruff looks for open() and its like; the run finds text=True of subprocess too."""
    row = json.dumps({"question": "Janet’s café: 数?", "answer": "#### 3"}, ensure_ascii=False) + "\n"
    (tmp_path / "task").mkdir()
    for name in ("train", "validation"):
        (tmp_path / f"task/{name}.jsonl").write_text(row, encoding="utf-8")
    notebook = nbformat.read(paths.ROOT / "notebooks/04_grpo.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("’é数"))
    nbformat.write(notebook, tmp_path / "04.ipynb")
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    (tmp_path / "reads.py").write_text(READS, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "reads.py"], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert result.stdout == "all read\n", result.stderr[-2000:]
    settings = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "PLW1514" in settings["tool"]["ruff"]["lint"]["select"]
