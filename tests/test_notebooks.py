"""Notebooks as software: their form, and what 04 does with good and bad parameters."""

import ast
import json
from pathlib import Path

import nbformat
import papermill
import pytest
from nbconvert.preprocessors import ExecutePreprocessor
from small_notebooks import write

from rlhelpers import paths
from rlhelpers.training.config import RunConfig

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
SMALL = ["-p", "quick", "True", "-p", "n_val_examples", "4", "-p", "max_tokens", "24", "-p", "device", "cpu"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_form(file):
    text = file.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < 1_000_000
    assert notebook.metadata.kernelspec.name == "python3"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == cells[:1] and tagged[0].source.startswith("# Parameters:")
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not any(path in text for path in ("/home/", "/root/", "/Users/", "/tmp/", str(paths.ROOT)))


@pytest.mark.parametrize("name", ["04_grpo", "05_variants", "06_off_policy", "07_your_own_estimator"])
def test_every_parameter_is_a_setting_and_is_explained(name):
    notebook = nbformat.read(paths.ROOT / f"notebooks/{name}.ipynb", as_version=4)
    source = next(cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    lines = source.splitlines()[1:]
    assert {line.split(":")[0] for line in lines} == set(RunConfig.model_fields) | {"preset", "quick"}
    assert all("  # " in line for line in lines)


@pytest.mark.field_report("D06")
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_parameters_are_tagged_once_and_never_assigned_again(file):
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


@pytest.mark.slow
@pytest.mark.field_report("D07")
def test_files_are_the_same_from_every_directory(tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_a_quick_run_from_another_directory(execute, tmp_path):
    result, output = execute("04_grpo.ipynb", *SMALL, "-p", "seed", "2", "-p", "experiment", "elsewhere")
    assert result.returncode == 0, result.stderr[-2000:]
    (folder,) = (tmp_path / "data/runs/elsewhere").glob("*/seed=2")
    for name in ("config.yaml", "metrics.jsonl", "run.json", "learning_curves.png", "outcomes.png", "diagnostics.png"):
        assert (folder / name).is_file()
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "complete"
    assert list((tmp_path / "figures/elsewhere").rglob("*.png"))
    text = output.read_text(encoding="utf-8")
    assert "step 2/2" in text
    shown = [o for cell in nbformat.reads(text, as_version=4).cells for o in cell.get("outputs", []) if "data" in o]
    assert sum("image/png" in output.data for output in shown) == 7  # three of this run, four of the committed ones
    assert "each response of a training batch has one reason: True" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "sede", "2"], "sede: there is no such setting; did you mean seed"),
        (["-p", "learning_rate", "fast"], "learning_rate: got 'fast'"),
        (["-p", "estimator", "grop"], "estimator: got 'grop'"),
        (["-p", "num_rollout_steps", "nan"], "num_rollout_steps: got 'nan'"),
    ],
)
def test_a_wrong_parameter_fails_in_the_first_cell(execute, tmp_path, arguments, message):
    result, output = execute("04_grpo.ipynb", *arguments)
    assert result.returncode != 0 and message in result.stderr
    ran = [
        cell for cell in nbformat.read(output, as_version=4).cells if cell.cell_type == "code" and cell.execution_count
    ]
    assert max(cell.execution_count for cell in ran) <= 3
    assert not (tmp_path / "data/runs").exists()


@pytest.mark.slow
def test_reasoning_gym(execute, tmp_path):
    result, _ = execute("04_grpo.ipynb", *SMALL, "-p", "task", "gym/chain_sum", "-p", "num_rollout_steps", "1")
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
def test_gsm8k_runs_and_the_tiny_model_earns_nothing(execute, tmp_path):
    """On the real files where they are at hand, else on rows of the same form."""
    real = paths.ROOT.parent / "shared/data/gsm8k"
    if (tmp_path / "data/gsm8k").exists():
        pass
    elif real.exists():
        (tmp_path / "data/gsm8k").symlink_to(real)
    else:
        (tmp_path / "data/gsm8k").mkdir()
        row = json.dumps({"question": "Janet’s ducks lay 16 eggs. How many is that in 97 days?", "answer": "#### 1552"})
        for split in ("train", "test"):
            (tmp_path / "data/gsm8k" / f"{split}.jsonl").write_text((row + "\n") * 64, encoding="utf-8")
    result, output = execute("04_grpo.ipynb", *SMALL, "-p", "task", "gsm8k", "-p", "num_rollout_steps", "2")
    assert result.returncode == 0, result.stderr[-2000:]
    text = output.read_text(encoding="utf-8")
    assert "step 2/2" in text and "In no group did the rewards differ" in text


@pytest.mark.slow
def test_the_readers_own_components_train(execute, tmp_path):
    """03 saves its functions in the working directory; 04 started there trains with them, as with the package's."""
    result, _ = execute("03_grpo_components.ipynb")
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "my_components.py").is_file()
    rewards = {}
    for components in ("mine", "package"):
        # Not SMALL: with 24 tokens no response is long enough to be right, and nothing would be learned.
        quick = ["-p", "quick", "True", "-p", "n_val_examples", "4", "-p", "device", "cpu"]
        result, _ = execute("04_grpo.ipynb", *quick, "-p", "components", components, "-p", "variant", components)
        assert result.returncode == 0, result.stderr[-2000:]
        folder = tmp_path / f"data/runs/quick/{components}/seed=0"
        assert (folder / "my_components.py").exists() == (components == "mine")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        rewards[components] = [(row.get("reward"), row.get("val_reward"), row.get("grad_norm")) for row in rows]
    assert rewards["mine"][1] == pytest.approx(rewards["package"][1], rel=1e-4)
    assert rewards["mine"][1][2] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notebook", "arguments"),
    [
        ("05_variants.ipynb", ["-p", "estimator", "grpo"]),  # the row that is committed under another experiment
        ("06_off_policy.ipynb", ["-p", "estimator", "gspo", "-p", "gradient_accumulation_steps", "2"]),
        ("07_your_own_estimator.ipynb", ["-p", "estimator", "grpo"]),
    ],
)
def test_a_quick_run_of_another_row(execute, tmp_path, notebook, arguments):
    result, output = execute(notebook, *SMALL, *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "step 2/2" in output.read_text(encoding="utf-8")
    assert len(list((tmp_path / "data/runs/quick").glob("*/seed=0/metrics.jsonl"))) == 1
