"""What people met with parameters, notebooks and papermill, one test for each report, under the report's number.

Where a report leaves a choice, its test pins ours.  `lr`, `max_steps` and `run_name` of the reports are learning_rate,
num_rollout_steps and variant here.  What has no test stands in field_reports.md.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml
from click.testing import CliRunner
from nbconvert.preprocessors import ExecutePreprocessor
from papermill.cli import _resolve_type
from papermill.cli import papermill as papermill_command
from papermill.translators import PythonTranslator

from rlhelpers import paths
from rlhelpers.evidence.runs import list_runs, read_metrics
from rlhelpers.sweep import workers as execution
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import run_state
from rlhelpers.workbook.papermill import complete

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"
NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
PARAMETERS = '# Parameters: of a small notebook\nseed: int = 0\nlr = 1e-5\nname = "x"\nmax_grad_norm: float = 1.0\n'


def write(file, *cells, tag="parameters", **kernel):
    """A notebook whose first cell has the tag."""
    cells = [nbformat.v4.new_code_cell(source) for source in cells]
    cells[0].metadata["tags"] = [tag]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"} | kernel
    nbformat.write(notebook, file)
    return file


def config_of(parameters):
    """The configuration of a notebook into which papermill has written these parameters."""
    values = {}
    exec(PythonTranslator.codify(parameters), values)
    return make_config(**{name: values[name] for name in parameters})


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
def test_d01_what_is_typed_after_p(typed, read):
    """True and False are read in any case, a list as a list; None is the preset's value, and "none" a text."""
    name, text = typed
    given = {name: _resolve_type(text)}
    if isinstance(read, str):
        with pytest.raises(ValueError, match=re.escape(read)):
            config_of(given)
    else:
        assert getattr(config_of(given), {"quick": "num_rollout_steps"}.get(name, name)) == read


def test_d03_what_yaml_makes_of_words_and_numbers():
    given = yaml.load("{learning_rate: 1e-6, variant: 2024-01-05, resume: no}", papermill.iorw.NoDatesSafeLoader)
    assert given["learning_rate"] == "1e-6"
    config = config_of(given)
    assert (config.learning_rate, config.variant, config.resume) == (1e-6, "2024-01-05", False)
    with pytest.raises(ValueError, match="variant: got True; input should be a valid string"):
        config_of(yaml.safe_load("{variant: on}"))


@pytest.mark.parametrize("text", ["inf", "nan", "-Infinity", "1e999"])
def test_d04_a_number_that_json_has_not_becomes_text(tmp_path, text):
    """max_grad_norm may be inf: the text says so as well, and of what may not, the first cell says it."""
    notebook, output = write(tmp_path / "in.ipynb", PARAMETERS), tmp_path / "out.ipynb"
    prepare(str(notebook), str(output), "-p", "max_grad_norm", text, "-p", "seed", "3")
    assert injected(output) == {"max_grad_norm": text, "seed": 3}
    assert json.loads(execution.as_json({"max_grad_norm": float(text), "seed": 3})) == {
        "max_grad_norm": str(float(text)),
        "seed": 3,
    }
    if float(text) == float("inf"):
        assert config_of(injected(output)).max_grad_norm == float("inf")
    else:
        with pytest.raises(ValueError, match=f"max_grad_norm: got '{text}'; "):
            config_of(injected(output))
    for option, argument in {"-y": "{lr: [1, .nan]}", "-f": str(tmp_path / "p.yaml")}.items():
        (tmp_path / "p.yaml").write_text("lr: -.inf", encoding="utf-8")
        with pytest.raises(ValueError, match=f"{option}.*: lr: got .*, which JSON has not"):
            complete(papermill_command, [str(notebook), option, argument])


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_d06_parameters_are_tagged_once_and_never_assigned_again(file):
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert ["parameters" in cell.metadata.get("tags", []) for cell in cells] == [True] + [False] * (len(cells) - 1)
    names = {statement.target.id for statement in ast.parse(cells[0].source).body}
    for cell in cells[1:]:
        for statement in ast.parse(cell.source).body:  # at the top: what functions call so is their own
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            assigned = {
                node.id for target in filter(None, targets) for node in ast.walk(target) if type(node) is ast.Name
            }
            assert not assigned & names, cell.source


def test_d06_without_the_tag_nothing_is_run(tmp_path):
    notebook = write(tmp_path / "in.ipynb", "lr = 1e-5", tag="other")
    with pytest.raises(ValueError, match=r"no cell has the tag `parameters`; its own values would replace lr"):
        complete(papermill_command, [str(notebook), str(tmp_path / "out.ipynb"), "-p", "lr", "0.5"])
    assert complete(papermill_command, [str(notebook), str(tmp_path / "out.ipynb")])


def test_d07_files_are_the_same_from_every_directory(tmp_path, monkeypatch):
    """papermill runs a notebook in the caller's directory, nbconvert and nbval in the notebook's own."""
    (tmp_path / "notebooks").mkdir()
    cell = "import os\nfrom rlhelpers import paths\nprint(os.getcwd(), paths.RUNS, paths.TINY.is_dir(), sep='\\n')"
    notebook = write(tmp_path / "notebooks/in.ipynb", cell)
    monkeypatch.chdir(tmp_path)
    by_papermill = papermill.execute_notebook(str(notebook), None, progress_bar=False)
    by_nbconvert, _ = ExecutePreprocessor().preprocess(
        nbformat.read(notebook, as_version=4), {"metadata": {"path": str(notebook.parent)}}
    )
    printed = [done.cells[-1].outputs[0].text.splitlines() for done in (by_papermill, by_nbconvert)]
    assert [Path(lines[0]) for lines in printed] == [tmp_path, tmp_path / "notebooks"]
    assert printed[0][1:] == printed[1][1:] == [str(paths.RUNS), "True"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in.ipynb", "notebooks"]


RECORDED = [
    "# Parameters: of a notebook that records a run\nseed: int = 0\nresume: bool = False\n",
    """import os, signal
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.workbook.parameters import read_parameters
config = make_config(quick=True, **read_parameters(globals()))
""",
    """with RunRecords(config) as records:
    for step in range(3):
        records.log({"step": step, "val_reward": float(seed), "seconds": 1.0})
        if seed == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print("seed", seed, "in", os.getpid())
""",
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of three seeds at once, of which one is killed in its second step: the folder, the result."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "data").mkdir()
    (folder / "data/tiny").symlink_to(paths.DATA / "tiny")
    notebook = write(folder / "in.ipynb", *RECORDED, name="py39_new")
    command = [sys.executable, "-m", "rlhelpers.cli", "sweep", str(notebook), "--seeds", "0-2", "--jobs", "3"]
    environment = os.environ | {"RLHELPERS_ROOT": str(folder)}
    environment.pop("RLHELPERS_QUICK", None)
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    return folder, result


def test_d08_runs_at_once_are_processes_with_records_of_their_own(swept):
    folder, _ = swept
    executed = [nbformat.read(folder / f"data/runs/notebooks/in,seed={s}.ipynb", as_version=4) for s in (0, 2)]
    printed = [notebook.cells[-1].outputs[0].text.split() for notebook in executed]
    assert [words[1] for words in printed] == ["0", "2"] and printed[0][3] != printed[1][3]
    for seed in (0, 2):
        metrics = read_metrics(folder / f"data/runs/quick/grpo/seed={seed}")
        assert metrics["val_reward"].tolist() == [seed] * 3


@pytest.mark.parametrize(("failures", "is_started"), [(0, True), (2, True), (3, False)])
def test_d09_a_kernel_that_does_not_start_is_tried_three_times(capsys, failures, is_started):
    """A run that fails after all is marked by the sweep, which goes on with the others and exits with 1."""
    calls = []

    def execute():
        calls.append(1)
        if len(calls) <= failures:
            raise RuntimeError("Kernel died before replying to kernel_info")

    if is_started:
        execution.until_it_starts(execute)
    else:
        with pytest.raises(RuntimeError, match="Kernel died before replying"):
            execution.until_it_starts(execute)
    assert len(calls) == min(failures + 1, 3)
    assert capsys.readouterr().out.count("of 3)") == failures


def test_d10_a_kernel_that_is_only_on_the_authors_machine(swept, tmp_path, capsys):
    """A sweep runs in its own environment; the papermill command does where the notebook's kernel is not here."""
    for file in NOTEBOOKS:
        assert nbformat.read(file, as_version=4).metadata.kernelspec.name == "python3"
    folder, _ = swept
    assert sys.executable in (folder / "data/runs/notebooks/in,seed=0.log").read_text(encoding="utf-8")
    output = str(tmp_path / "out.ipynb")
    ours, theirs = write(tmp_path / "ours.ipynb", "1"), write(tmp_path / "theirs.ipynb", "1", name="py39_new")
    assert "--kernel" not in complete(papermill_command, [str(ours), output])
    assert "python3" not in complete(papermill_command, [str(theirs), output, "-k", "another"])
    assert complete(papermill_command, [str(theirs), output])[2:4] == ["--kernel", "python3"]
    assert f"there is no kernel py39_new here; it runs with python3, {sys.executable}" in capsys.readouterr().err


def test_d11_a_killed_kernel_is_marked_and_left_out(swept, monkeypatch):
    folder, result = swept
    assert result.returncode == 1 and result.stdout.splitlines()[-1] == "2 complete, 1 killed", result.stdout
    assert "killed  in seed=1  its kernel died" in result.stdout
    runs = folder / "data/runs/quick/grpo"
    assert [run_state(runs / f"seed={seed}").status for seed in range(3)] == ["complete", "killed", "complete"]
    assert read_metrics(runs / "seed=1").index.tolist() == [0, 1]
    monkeypatch.setattr(paths, "RUNS", folder / "data/runs")
    assert list_runs("quick")["seed"].tolist() == [0, 2]


@pytest.mark.parametrize("name", ["out.ipynb", "new/folder/out.ipynb", "a b/#1 é 数.ipynb"])
def test_d20_the_output_goes_where_it_is_told(tmp_path, monkeypatch, name):
    notebook = write(tmp_path / "in.ipynb", PARAMETERS)
    monkeypatch.chdir(tmp_path)
    prepare("in.ipynb", name, "-p", "seed", "2")
    assert injected(tmp_path / name) == {"seed": 2}
    for source in ("in.ipynb", "./in.ipynb", str(notebook)):
        with pytest.raises(ValueError, match="is the notebook itself"):
            complete(papermill_command, ["in.ipynb", source])


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
def test_d21_files_of_parameters(tmp_path, capsys, content, message):
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


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
def test_every_report_on_notebooks_has_its_test():
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"].lower() for report in map(json.loads, lines) if report["group"] == "D"}
    tested = set(re.findall(r"def test_(d\d+)_", Path(__file__).read_text(encoding="utf-8")))
    sources = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")]
    marked = {name.lower() for text in sources for name in re.findall(r'field_report\("(D\d+)"\)', text)}
    assert tested | marked == reported
