"""A notebook's parameters: which names count, what papermill may add, and what its texts become.

Notebooks 04 to 07 have the settings of a run as parameters, and make_config checks them.  The others give
read_parameters the kinds of theirs.  No kernel is started here.
"""

import ast
import re

import nbformat
import papermill
import pytest
import yaml
from papermill.cli import _resolve_type
from papermill.translators import PythonTranslator
from test_settings import refused

from rlhelpers import paths
from rlhelpers.training.config import make_config
from rlhelpers.workbook.parameters import read_parameters

OWN = "# Parameters: change them here\nseed: int = 0  # a comment\nquick: bool = False\nmodel: str = None\n"


pytestmark = pytest.mark.usefixtures("no_quick")


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


# What papermill makes of what is typed.


def config_of(parameters):
    """The configuration of a notebook into which papermill has written these parameters."""
    values = {}
    exec(PythonTranslator.codify(parameters), values)
    return make_config(**{name: values[name] for name in parameters})


@pytest.mark.field_report("D01")
@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (("resume", "false"), False),
        (("quick", "TRUE"), 2),  # its two steps
        (("betas", "[0.8, 0.9]"), (0.8, 0.9)),
        (("seed", "[1, 2]"), "seed: got '[1, 2]'; input should be a valid integer"),
        (("num_rollout_steps", "none"), "num_rollout_steps: got 'none'; input should be a valid integer"),
        (("num_rollout_steps", "None"), 50),
        (("resume", "no"), "resume: got 'no'; accepted are True and False"),
        (("resume", "1"), "resume: got 1; accepted are True and False"),
    ],
)
def test_what_is_typed_after_p(typed, read):
    """True and False are read in any case, a list as a list; None is the preset's value, and "none" a text."""
    name, text = typed
    given = {name: _resolve_type(text)}
    if isinstance(read, str):
        with pytest.raises(ValueError, match=re.escape(read)):
            config_of(given)
    else:
        assert getattr(config_of(given), {"quick": "num_rollout_steps"}.get(name, name)) == read


@pytest.mark.field_report("D03")
def test_what_yaml_makes_of_words_and_numbers():
    given = yaml.load("{learning_rate: 1e-6, variant: 2024-01-05, resume: no}", papermill.iorw.NoDatesSafeLoader)
    assert given["learning_rate"] == "1e-6"
    config = config_of(given)
    assert (config.learning_rate, config.variant, config.resume) == (1e-6, "2024-01-05", False)
    with pytest.raises(ValueError, match="variant: got True; input should be a valid string"):
        config_of(yaml.safe_load("{variant: on}"))


# The notebooks that make no configuration.

CELLS = {}
for file in ("01_prompting_baselines", "02_variance_derivations", "03_grpo_components", "09_writeup"):
    code = [c.source for c in nbformat.read(paths.ROOT / f"notebooks/{file}.ipynb", 4).cells if c.cell_type == "code"]
    CELLS[file] = code[:2]
OTHERS = [
    (file, statement.target.id, ast.literal_eval(statement.value))
    for file, (own, _) in CELLS.items()
    for statement in ast.parse(own).body
]


def check_of(file, **parameters):
    """The variables of the notebook after its check, with parameters as papermill gives them."""
    own, checking = CELLS[file]
    injected = PythonTranslator.codify(parameters)
    names = {"In": ["", own, injected]}
    exec(own, names)
    exec(injected, names)
    needed = "read_parameters(", "kinds", "rlhelpers.workbook.parameters", "rlhelpers.training.settings"
    for statement in ast.parse(checking).body:
        source = ast.unparse(statement)
        if any(word in source for word in needed):
            exec(source, names)
    return names


@pytest.mark.parametrize(("file", "name", "default"), OTHERS, ids=lambda value: f"{value}")
def test_what_no_parameter_of_the_other_notebooks_takes(file, name, default):
    is_text, is_switch = isinstance(default, str) or default is None, isinstance(default, bool)
    bad = [float("nan"), float("inf"), "", " ", [1], -1, 10**400]
    bad += [] if name == "cliprange" else [1e308]
    bad += [True, 3, 0.5] if is_text else [0, 1, "yes", None] if is_switch else [True, False, None, "fast", "nan"]
    if name not in ("seed", "temperature") and not is_text:
        bad.append(0)
    for value in bad:
        refused(lambda value=value: check_of(file, **{name: value}), name, value)
    with pytest.raises(ValueError, match=f"{name}x: there is no such setting; did you mean .*{name}"):
        check_of(file, **{f"{name}x": default})
    assert check_of(file)[name] == default and check_of(file, **{name: default})[name] == default


def test_what_the_other_notebooks_read_from_text():
    assert check_of("02_variance_derivations", samples="5000", group_size=" 4 ", seed="7")["samples"] == 5000
    assert check_of("03_grpo_components", cliprange="1e-4 ")["cliprange"] == 1e-4
    assert check_of("09_writeup", committed_only="false")["committed_only"] is False
    read = check_of("01_prompting_baselines", temperature="0", n_examples="5", responses=None, quick="True")
    assert (read["temperature"], read["n_examples"], read["responses"], read["quick"]) == (0, 5, None, True)
    for temperature in (0.001, 101):
        refused(
            lambda value=temperature: check_of("01_prompting_baselines", temperature=value), "temperature", temperature
        )
