"""What a sweep asks for: values, their types, notebooks and files of experiments."""

import datetime

import pytest
from small_notebooks import CELL, PARAMETERS, write

from rlhelpers import cli, paths
from rlhelpers.sweep.grid import Grid, parse_values, read_experiments, read_grid

GRPO = paths.ROOT / "notebooks/04_grpo.ipynb"
pytestmark = pytest.mark.usefixtures("no_quick")


@pytest.fixture
def notebook(tmp_path):
    return write(tmp_path / "made_up.ipynb", PARAMETERS, CELL)


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("0-3", "int", [0, 1, 2, 3]),
        ("0-1,7", "int", [0, 1, 7]),
        ("-1", "int", [-1]),
        ("1e-4,3e-4", "float", [1e-4, 3e-4]),
        ("1,inf", "float", [1.0, float("inf")]),
        ("True,False", "bool", [True, False]),
        ("grpo, dr_grpo", "str", ["grpo", "dr_grpo"]),
        ("0-3", "str", ["0-3"]),
        ("'a,b',c", "str", ["a,b", "c"]),
        ("(0.9,0.95),[0.8, 0.9]", "tuple", [(0.9, 0.95), (0.8, 0.9)]),
        ("None,2", "int", [None, 2]),
        ("3,x,None", None, [3, "x", None]),
        (["1e-4", 3e-4, None], "float", [1e-4, 3e-4, None]),  # as YAML reads 1e-4
        (3, "int", [3]),
        ([[0.9, 0.95]], "tuple", [(0.9, 0.95)]),
        ([True], "bool", [True]),
    ],
)
def test_values(text, kind, values):
    assert parse_values(text, kind) == values


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", "int", "accepted are whole numbers"),
        ("3-0", "int", "counts upwards"),
        ("fast", "float", "accepted are numbers"),
        ("yes", "bool", "accepted are True and False"),
        ("0.9", "tuple", "accepted are tuples"),
        ("1,,2", "int", "a comma between each two"),
        ("", "str", "a comma between each two"),
        ("a,", "str", "a comma between each two"),
        ([1.5], "int", "got '1.5'"),
        ([], "int", "at least one value"),
        ("0-1000000000", "int", "a range of at most 10000 numbers"),
        ({"a": 1}, "float", "accepted are numbers, lists and texts"),
        (datetime.date(2020, 1, 1), "str", "a date in quotes"),
    ],
)
def test_wrong_values(text, kind, message):
    with pytest.raises(ValueError, match=message):
        parse_values(text, kind)


def test_the_product_takes_one_seed_after_the_other():
    values = {"estimator": ("grpo", "rft"), "seed": (0, 1)}
    assert [list(c.values()) for c in Grid(GRPO, values).combinations()] == [
        ["grpo", 0],
        ["rft", 0],
        ["grpo", 1],
        ["rft", 1],
    ]
    assert Grid(GRPO, {}).combinations() == [{}]


def test_values_have_the_types_of_the_notebook(tmp_path):
    cell = "# Parameters: some without a type\na = 3\nb = None\nc: 'float' = None\nd = 'x'\n"
    values = read_grid(write(tmp_path / "untyped.ipynb", cell), {"a": "0-1", "b": "4,y", "c": "1", "d": "1"}).values
    assert values == {"a": (0, 1), "b": (4, "y"), "c": (1.0,), "d": ("1",)}


def test_all_that_is_wrong_is_said_before_anything_runs(roots, capsys):
    given = ["-p", "learning_rat=1e-4", "-p", "learning_rate=fast", "-p", "quick=yes", "--seeds", "0-x"]
    assert cli.main(["sweep", str(GRPO), *given]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "learning_rat: 04_grpo.ipynb has no such parameter; did you mean learning_rate" in errors[0]
    assert "learning_rate: got 'fast'" in errors[1] and "quick: got 'yes'" in errors[2] and "seed: got" in errors[3]
    assert not roots[0].exists()


@pytest.mark.parametrize("content", ["", "not json", "{}", "[]", "null"])
def test_what_is_no_notebook(roots, tmp_path, capsys, content):
    file = tmp_path / "broken.ipynb"
    file.write_text(content, encoding="utf-8")
    assert cli.main(["sweep", str(file), "-p", "seed=1"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "broken.ipynb cannot be read as a notebook" in line and not roots[0].exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("experiments: [", "while parsing"),
        ("experiments:\n\t- a", "cannot start any token"),
        ("experiments: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("experiments: []", "a list `experiments`"),
        ("experiments: &a\n- *a", "experiment 1: it names no notebook"),
        ("experiments:\n- notebook: 3", "experiment 1: notebook: got 3; accepted is a path"),
        ("experiments:\n- notebook: README.md", "accepted is a notebook, .ipynb"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: [a]", "parameters: got ['a']; accepted are names"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {seed: []}", "seed: got []; accepted is at least one"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {3: 4}", "3: made_up.ipynb has no such parameter"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {seed: 1, seed: 2}", "seed: given twice, line 3"),
        ("seeds: 0\nexperiments:\n- notebook: NOTEBOOK\n  parameters: {seed: 7}", "seed: got 7 and, by seeds, 0"),
    ],
)
def test_broken_files_of_experiments(roots, tmp_path, notebook, capsys, content, message):
    file = tmp_path / "experiments.yaml"
    file.write_text(content.replace("NOTEBOOK", str(notebook)), encoding="utf-8")
    assert cli.main(["sweep", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line and "experiments.yaml" in line and not roots[0].exists()


def test_every_mistake_of_a_file_of_experiments_is_said(tmp_path, notebook):
    file = tmp_path / "experiments.yaml"
    file.write_text(
        f"experiments:\n- notebook: nothing.ipynb\n- notebook: {notebook}\n  parameters: {{sed: 1}}\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"(?s)experiment 1: there is no notebook .*experiment 2: sed: "):
        read_experiments(file, {})


def test_a_file_of_experiments(tmp_path, notebook):
    file = tmp_path / "experiments.yaml"
    file.write_text(
        f"seeds: 0-1\nexperiments:\n- notebook: {notebook}\n  parameters:\n    seconds: [1e-1, 2]\n"
        f"- notebook: {notebook}\n  seeds: 5\n",
        encoding="utf-8",
    )
    first, second = read_experiments(file, {"fail": "True"})
    assert first.values == {"seconds": (0.1, 2.0), "seed": (0, 1), "fail": (True,)}
    assert second.values == {"seed": (5,), "fail": (True,)}
    file.write_text(file.read_text(encoding="utf-8") + "  parameter: {}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="experiment 2: got parameter; accepted are notebook, parameters, seeds"):
        read_experiments(file, {})
