"""The papermill command with and without an output path."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from papermill.cli import papermill as papermill_command
from small_notebooks import write

from rlhelpers import paths
from rlhelpers.sweep.run import as_json
from rlhelpers.training.config import make_config
from rlhelpers.workbook.papermill import complete

COMMAND = Path(sys.executable).with_name("papermill")
PARAMETERS = '# Parameters: of a small notebook\nseed: int = 0\nlr = 1e-5\nname = "x"\nmax_grad_norm: float = 1.0\n'


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


@pytest.mark.slow
@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_the_command_as_typed(tmp_path, in_a_terminal):
    """Plain papermill refuses the first and fills the second's output with the notebook."""
    spins = "import os, rlhelpers; print(os.environ.get('GOMP_SPINCOUNT'))"
    write(tmp_path / "small.ipynb", spins.replace(", rlhelpers", ""))
    environment = os.environ | {"RLHELPERS_ROOT": str(tmp_path)}
    environment.pop("GOMP_SPINCOUNT", None)
    terminal, side = pty.openpty() if in_a_terminal else (None, subprocess.PIPE)
    result = subprocess.run(
        [COMMAND, "small.ipynb"], cwd=tmp_path, env=environment, stdin=side, stdout=side, stderr=side, timeout=120
    )
    if in_a_terminal:
        os.close(side), os.close(terminal)
    assert result.returncode == 0
    (output,) = (tmp_path / "data/runs/notebooks").iterdir()
    # The kernel waits at OpenMP's barriers as whatever imports the package does.
    expected = subprocess.run([sys.executable, "-c", spins], env=environment, capture_output=True, encoding="utf-8")
    assert nbformat.read(output, as_version=4).cells[0].outputs[0].text == expected.stdout


def test_a_name_that_no_parameter_can_have():
    with pytest.raises(ValueError, match="-p learning-rate: no parameter has such a name; did you mean learning_rate"):
        complete(papermill_command, ["in.ipynb", "-p", "learning-rate", "1e-4"])


def prepare(*arguments):
    """The papermill command as typed, but that no cell is run; returns what it said."""
    result = CliRunner().invoke(papermill_command, [*complete(papermill_command, list(arguments)), "--prepare-only"])
    assert result.exit_code == 0, result.output
    return result.output


def injected(file):
    """The parameters that papermill wrote into a notebook; JSON of the standard only."""

    def fail(constant):
        raise ValueError(constant)

    content = json.loads(file.read_text(encoding="utf-8"), parse_constant=fail)
    return content["metadata"]["papermill"]["parameters"]


@pytest.mark.field_report("D04")
@pytest.mark.parametrize("text", ["inf", "nan", "-Infinity", "1e999"])
def test_a_number_that_json_has_not_becomes_text(tmp_path, text):
    """max_grad_norm may be inf: the text says so as well, and of what may not, the first cell says it."""
    notebook, output = write(tmp_path / "in.ipynb", PARAMETERS), tmp_path / "out.ipynb"
    prepare(str(notebook), str(output), "-p", "max_grad_norm", text, "-p", "seed", "3")
    assert injected(output) == {"max_grad_norm": text, "seed": 3}
    assert json.loads(as_json({"max_grad_norm": float(text), "seed": 3})) == {
        "max_grad_norm": str(float(text)),
        "seed": 3,
    }
    if float(text) == float("inf"):
        assert make_config(**injected(output)).max_grad_norm == float("inf")
    else:
        with pytest.raises(ValueError, match=f"max_grad_norm: got '{text}'; "):
            make_config(**injected(output))
    for option, argument in {"-y": "{lr: [1, .nan]}", "-f": str(tmp_path / "p.yaml")}.items():
        (tmp_path / "p.yaml").write_text("lr: -.inf", encoding="utf-8")
        with pytest.raises(ValueError, match=f"{option}.*: lr: got .*, which JSON has not"):
            complete(papermill_command, [str(notebook), option, argument])


@pytest.mark.field_report("D06")
def test_without_the_tag_nothing_is_run(tmp_path):
    notebook = write(tmp_path / "in.ipynb", "lr = 1e-5", tag="other")
    with pytest.raises(ValueError, match=r"no cell has the tag `parameters`; its own values would replace lr"):
        complete(papermill_command, [str(notebook), str(tmp_path / "out.ipynb"), "-p", "lr", "0.5"])
    assert complete(papermill_command, [str(notebook), str(tmp_path / "out.ipynb")])


@pytest.mark.field_report("D10")
def test_a_kernel_that_is_only_on_the_authors_machine(tmp_path, capsys):
    """The notebook then runs in this environment, as in a sweep."""
    output = str(tmp_path / "out.ipynb")
    ours, theirs = write(tmp_path / "ours.ipynb", "1"), write(tmp_path / "theirs.ipynb", "1", name="py39_new")
    assert "--kernel" not in complete(papermill_command, [str(ours), output])
    assert "python3" not in complete(papermill_command, [str(theirs), output, "-k", "another"])
    assert complete(papermill_command, [str(theirs), output])[2:4] == ["--kernel", "python3"]
    assert f"there is no kernel py39_new here; it runs with python3, {sys.executable}" in capsys.readouterr().err


@pytest.mark.field_report("D20")
@pytest.mark.parametrize("name", ["out.ipynb", "new/folder/out.ipynb", "a b/#1 é 数.ipynb"])
def test_the_output_goes_where_it_is_told(tmp_path, monkeypatch, name):
    notebook = write(tmp_path / "in.ipynb", PARAMETERS)
    monkeypatch.chdir(tmp_path)
    prepare("in.ipynb", name, "-p", "seed", "2")
    assert injected(tmp_path / name) == {"seed": 2}
    for source in ("in.ipynb", "./in.ipynb", str(notebook)):
        with pytest.raises(ValueError, match="is the notebook itself"):
            complete(papermill_command, ["in.ipynb", source])


@pytest.mark.field_report("D21")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", None),
        ("# seed: 3\n", None),
        ("seed: 1\nseed: 2\n", "seed: given twice, line 1 and after"),
        ("- seed\n", "got list; accepted are lines such as learning_rate: 3e-4"),
        ("learning-rate: 1\n", "learning-rate: no parameter has such a name"),
        ("lambda: 1\n", "lambda: no parameter has such a name"),
        ("seed: [\n", "while parsing"),
    ],
)
def test_files_of_parameters(tmp_path, capsys, content, message):
    """An empty one is said, and no error.  -f counts before -y, and that before -p."""
    notebook, file, output = write(tmp_path / "in.ipynb", PARAMETERS), tmp_path / "p.yaml", tmp_path / "out.ipynb"
    file.write_text(content, encoding="utf-8")
    given = [str(notebook), str(output), "-f", str(file)]
    if message:
        with pytest.raises(ValueError, match=re.escape(f"-f {file}: ") + ".*" + re.escape(message)):
            complete(papermill_command, given)
        return
    prepare(*given)
    assert f"-f {file} holds no parameters" in capsys.readouterr().err and injected(output) == {}
    file.write_text("{seed: 1, lr: 1, name: f}", encoding="utf-8")
    prepare("-p", "seed", "3", "-y", "{seed: 2, lr: 2}", *given)
    assert injected(output) == {"seed": 3, "lr": 2, "name": "f"}
    with pytest.raises(ValueError, match="there is no such file"):
        complete(papermill_command, [str(notebook), "-f", str(tmp_path / "no.yaml")])
