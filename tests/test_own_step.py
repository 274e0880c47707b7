"""The reader's own functions: saved from a notebook's namespace, loaded, and trained with."""

import inspect
import linecache
import re

import pytest
import torch
from bad_input import NOT_A_LIST, Row, check_refusal, name_of

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels import grpo_train_step
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
from rlhelpers.training.own_step import FILE, NEEDED, as_metrics, load_train_step, save_components

CELL = """
import math
from statistics import fmean

import torch

import rlhelpers.kernels as k
from rlhelpers.kernels import grpo_train_step as package_step

SHARE = 0.5
NOTHING = None
table = {"a": [1, None]}
infinite = float("inf")

def double(x):
    mean = 1  # a local name that is also one of the notebook
    return 2 * x * mean

mean = [1, 2]

def grpo_train_step(*arguments, **settings):
    values = [math.sqrt(v) for v in (1, 4)]
    return double(SHARE) * fmean(values) * k.estimators.MAX_LOG_RATIO

def even(n):
    return table["a"][0] == 1 if n == 0 else odd(n - 1)

def odd(n):
    return NOTHING if n == 0 else even(n - 1)

twin = even

def with_infinite():
    return infinite

def with_twin():
    return twin(2)

def with_undefined():
    return undefined

@torch.no_grad()
def decorated():
    return double(torch.ones(1))

def stub():
    raise NotImplementedError()

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


def test_constants_and_functions_that_call_each_other(notebook, tmp_path):
    save_components([notebook["even"]])
    module = {}
    exec((tmp_path / FILE).read_text(encoding="utf-8"), module)
    assert module["even"](2) is True and module["even"](1) is None


def test_a_decorated_function_brings_along_what_it_uses(notebook, tmp_path):
    save_components([notebook["decorated"]])
    module = {}
    exec((tmp_path / FILE).read_text(encoding="utf-8"), module)
    assert module["decorated"]().item() == 2


def test_stubs_replace_nothing(notebook, tmp_path):
    save_components([notebook["even"]])
    kept = (tmp_path / FILE).read_text(encoding="utf-8")
    assert save_components([notebook["even"], notebook["stub"]]) == ["stub"]
    assert (tmp_path / FILE).read_text(encoding="utf-8") == kept


@pytest.mark.parametrize("name", ["infinite", "twin", "undefined"])
def test_what_cannot_be_saved_is_named(name, notebook, tmp_path):
    with pytest.raises(ValueError, match=f"with_{name}: it uses {name}, which (cannot be saved|is not defined)"):
        save_components([notebook[f"with_{name}"]])
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rewards": None}, "rewards"),
        ({"grad_norm": "large"}, "grad_norm is 'large'"),
        ({"extra": torch.zeros(3)}, "extra is tensor"),
        ({"format_rewards": torch.zeros(3)}, "format_rewards has shape"),
    ],
)
def test_what_a_step_must_return(metadata, message):
    good = {"rewards": [1.0, 0.0], "format_rewards": torch.ones(2), "mean_reward": 0.5, "mean_format_reward": 1.0}
    good |= {"grad_norm": torch.tensor(2.0), "token_entropy": None}
    metrics = as_metrics((torch.tensor(0.5), good), 2)
    assert metrics["loss"] == 0.5 and metrics["grad_norm"] == 2.0 and metrics["token_entropy"] is None
    assert metrics["rewards"].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=f"grpo_train_step: {message}"):
        as_metrics((0.5, good | metadata), 2)
    for name in NEEDED:
        with pytest.raises(ValueError, match=f"grpo_train_step: its metadata lacks {name}"):
            as_metrics((0.5, {key: value for key, value in good.items() if key != name}), 2)
    for nothing in (None, 0.5, (0.5,), (0.5, None)):
        with pytest.raises(ValueError, match=r"grpo_train_step: it returned .* accepted is \(loss, metadata\)"):
            as_metrics(nothing, 2)


def test_own_components_and_own_cells_do_not_mix():
    """The functions of notebook 03 know the cells by their names; another function would be taken for no choice."""
    row = Estimator("own", advantage_normalizer=lambda rewards: rewards.std(dim=1, keepdim=True))
    with pytest.raises(ValueError, match='components: got mine; it must be "package" for an estimator whose cells'):
        make_config(estimator=row, components="mine")


def test_the_package_is_the_default():
    assert load_train_step("package") is None
    assert make_config().components == "package"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no my_components.py here; notebook 03 saves it"),
        ("def other(): pass", "holds no function grpo_train_step"),
        ("import no_such_module", "cannot be run, ModuleNotFoundError"),
        ("def grpo_train_step(model): pass", "does not take what the loop gives: got an unexpected keyword"),
    ],
)
def test_bad_modules_are_named(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"components: .*{re.escape(message)}"):
        load_train_step("mine")


def test_a_step_need_not_know_token_weights(tmp_path, monkeypatch):
    known = [name for name in inspect.signature(grpo_train_step).parameters if name != "token_weights"]
    monkeypatch.chdir(tmp_path)
    text = f"def grpo_train_step({', '.join(known)}): pass"
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    assert callable(load_train_step("mine"))
    with pytest.raises(ValueError, match=r"does not take what the loop gives: .*token_weights"):
        load_train_step("mine", with_token_weights=True)
    (tmp_path / FILE).write_text(text.replace("): pass", ", token_weights=None): pass"), encoding="utf-8")
    assert callable(load_train_step("mine", with_token_weights=True))


@pytest.mark.slow
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


GOOD = {
    "save_components": (save_components, {"functions": [train]}),
}
ROWS = [
    Row("save_components", "functions", NOT_A_LIST),
    Row("save_components", "functions", [[None], ["train"], [3], [len]], "functions: number 0 is "),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(tmp_path, monkeypatch, row):
    """And no file is written."""
    monkeypatch.chdir(tmp_path)
    check_refusal(GOOD, row)
    assert list(tmp_path.rglob("*")) == []
