"""A notebook's parameters: which names count, and what papermill may add."""

import pytest

from rlhelpers.workbook.parameters import read_parameters

OWN = "# Parameters: change them here\nseed: int = 0  # a comment\nquick: bool = False\nmodel: str = None\n"


@pytest.fixture(autouse=True)
def no_quick(monkeypatch):
    monkeypatch.delenv("RLHELPERS_QUICK", raising=False)


def namespace(*cells):
    names = {"In": ["", *cells], "unrelated": 1}
    for cell in cells:
        exec(cell, names)
    return names


def test_the_parameters_cell_names_them_all():
    assert read_parameters(namespace(OWN, "other = 3")) == {"seed": 0, "quick": False, "model": None}


def test_what_papermill_adds_overrides():
    assert read_parameters(namespace(OWN, '# Parameters\nseed = 2\nmodel = "tiny"\n')) == {
        "seed": 2,
        "quick": False,
        "model": "tiny",
    }


def test_a_misspelt_name_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match="sede: there is no such setting; did you mean seed"):
        read_parameters(namespace(OWN, "# Parameters\nsede = 2\n"))
    with pytest.raises(ValueError, match="zzz: there is no such setting; accepted are model, quick, seed"):
        read_parameters(namespace(OWN, "# Parameters\nzzz = 2\n"))


def test_a_cell_that_was_changed_and_run_again_counts():
    assert read_parameters(namespace(OWN, "x = 1", OWN.replace("= 0", "= 7")))["seed"] == 7


def test_a_kernel_without_a_history():
    """As nbval runs a notebook."""
    names = namespace(OWN)
    assert read_parameters(names | {"In": [""]}) == {"seed": 0, "quick": False, "model": None}


def test_without_the_cell():
    with pytest.raises(RuntimeError, match="run the parameters cell"):
        read_parameters(namespace("x = 1"))


@pytest.mark.parametrize(("value", "quick"), [("1", True), ("0", False), ("", False)])
def test_quick_from_the_environment(monkeypatch, value, quick):
    monkeypatch.setenv("RLHELPERS_QUICK", value)
    assert read_parameters(namespace(OWN))["quick"] is quick
