"""The reader's own functions: saved from a notebook's namespace, loaded, and trained with."""

import linecache
import math
import re

import pytest

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels import grpo_train_step
from rlhelpers.training.components import FILE, load_train_step, save_components
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train

CELL = """
import math
from statistics import fmean

import rlhelpers.kernels as k
from rlhelpers.kernels import grpo_train_step as package_step

SHARE = 0.5
table = {"a": 1}

def double(x):
    mean = 1  # a local name that is also one of the notebook
    return 2 * x * mean

mean = [1, 2]

def grpo_train_step(*arguments, **settings):
    values = [math.sqrt(v) for v in (1, 4)]
    return double(SHARE) * fmean(values) * k.losses.MAX_LOG_RATIO

def with_table():
    return table["a"]

def trains(*arguments, **settings):
    return package_step(*arguments, **settings)
"""


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Functions as a notebook's kernel defines them: their source is known by a file name that does not exist."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    exec(compile(CELL, "<cell>", "exec"), namespace)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell>"))
    return namespace


def test_saved_functions_bring_along_what_they_use(notebook, tmp_path):
    save_components([notebook["grpo_train_step"]])
    text = (tmp_path / FILE).read_text(encoding="utf-8")
    assert "table" not in text and "[1, 2]" not in text
    assert load_train_step("mine")() == notebook["grpo_train_step"]() == pytest.approx(30.0)
    assert math.isclose(load_train_step("mine")(), 30.0)


def test_what_cannot_be_saved_is_named(notebook, tmp_path):
    with pytest.raises(ValueError, match="with_table: it uses table"):
        save_components([notebook["with_table"]])
    assert not (tmp_path / FILE).exists()


def test_the_package_is_the_default():
    assert load_train_step("package") is grpo_train_step
    assert make_config().components == "package"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no my_components.py here; notebook 03 saves it"),
        ("def other(): pass", "holds no function grpo_train_step"),
        ("import no_such_module", "cannot be run, ModuleNotFoundError"),
    ],
)
def test_bad_modules_are_named(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"components: .*{re.escape(message)}"):
        load_train_step("mine")


@pytest.mark.usefixtures("one_thread")
def test_a_run_with_own_components_uses_and_keeps_them(notebook, tmp_path, monkeypatch):
    """The own step is the package's behind another name, so the run must be the same."""
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    notebook["grpo_train_step"] = notebook["trains"]
    save_components([notebook["trains"]])
    file = tmp_path / FILE
    file.write_text(file.read_text(encoding="utf-8").replace("def trains", "def grpo_train_step"), encoding="utf-8")
    settings = {"quick": True, "device": "cpu", "n_val_examples": 4, "max_tokens": 24}
    theirs = read_metrics(train(make_config(**settings)))
    folder = train(make_config(**settings, components="mine"))
    assert "components=mine" in folder.parent.name and (folder / FILE).is_file()
    mine = read_metrics(folder)
    names = [name for name in theirs if "seconds" not in name]
    assert mine[names].equals(theirs[names])
