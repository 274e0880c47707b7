"""Notebooks as software: their form, and what 04 does with good and bad parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from rlhelpers import paths
from rlhelpers.training.config import RunConfig

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
PAPERMILL = Path(sys.executable).with_name("papermill")
SMALL = ["-p", "quick", "True", "-p", "n_val_examples", "4", "-p", "max_tokens", "24", "-p", "device", "cpu"]


def execute(tmp_path, *arguments, notebook="04_grpo.ipynb", cwd=None):
    """Run papermill with runs and figures under tmp_path; returns the finished process and the executed notebook."""
    for name in ("tiny", "results", "gsm8k"):
        if (paths.DATA / name).exists() and not (tmp_path / "data" / name).exists():
            (tmp_path / "data").mkdir(exist_ok=True)
            (tmp_path / "data" / name).symlink_to(paths.DATA / name)
    output = tmp_path / "executed.ipynb"
    result = subprocess.run(
        [PAPERMILL, paths.ROOT / "notebooks" / notebook, output, *arguments],
        cwd=cwd or tmp_path,
        env=os.environ | {"RLHELPERS_ROOT": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result, output


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


def test_a_quick_run_from_another_directory(tmp_path):
    result, output = execute(tmp_path, *SMALL, "-p", "seed", "2", "-p", "experiment", "elsewhere")
    assert result.returncode == 0, result.stderr[-2000:]
    (folder,) = (tmp_path / "data/runs/elsewhere").glob("*/seed=2")
    for name in ("config.yaml", "metrics.jsonl", "run.json", "learning_curves.png", "diagnostics.png"):
        assert (folder / name).is_file()
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"] == "complete"
    assert list((tmp_path / "figures/elsewhere").rglob("*.png"))
    text = output.read_text(encoding="utf-8")
    assert "step 2/2" in text
    shown = [o for cell in nbformat.reads(text, as_version=4).cells for o in cell.get("outputs", []) if "data" in o]
    assert sum("image/png" in output.data for output in shown) == 6  # two of this run, four of the committed ones


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "sede", "2"], "sede: there is no such setting; did you mean seed"),
        (["-p", "learning_rate", "fast"], "learning_rate: got 'fast'"),
        (["-p", "estimator", "grop"], "estimator: got 'grop'"),
        (["-p", "num_rollout_steps", "nan"], "num_rollout_steps: got nan"),
    ],
)
def test_a_wrong_parameter_fails_in_the_first_cell(tmp_path, arguments, message):
    result, output = execute(tmp_path, *arguments)
    assert result.returncode != 0 and message in result.stderr
    ran = [
        cell for cell in nbformat.read(output, as_version=4).cells if cell.cell_type == "code" and cell.execution_count
    ]
    assert max(cell.execution_count for cell in ran) <= 3
    assert not (tmp_path / "data/runs").exists()


def test_reasoning_gym(tmp_path):
    result, _ = execute(tmp_path, *SMALL, "-p", "task", "gym/chain_sum", "-p", "num_rollout_steps", "1")
    assert result.returncode == 0, result.stderr[-2000:]


def test_gsm8k_runs_and_says_that_the_tiny_model_earns_nothing(tmp_path):
    """On the real files where they are at hand, else on rows of the same form."""
    real = paths.ROOT.parent / "shared/data/gsm8k"
    (tmp_path / "data").mkdir()
    if real.exists():
        (tmp_path / "data/gsm8k").symlink_to(real)
    else:
        (tmp_path / "data/gsm8k").mkdir()
        row = json.dumps({"question": "Janet’s ducks lay 16 eggs. How many is that in 97 days?", "answer": "#### 1552"})
        for split in ("train", "test"):
            (tmp_path / "data/gsm8k" / f"{split}.jsonl").write_text((row + "\n") * 64, encoding="utf-8")
    result, output = execute(tmp_path, *SMALL, "-p", "task", "gsm8k", "-p", "num_rollout_steps", "2")
    assert result.returncode == 0, result.stderr[-2000:]
    text = output.read_text(encoding="utf-8")
    assert "step 2/2" in text and "In no group did the rewards differ" in text


def test_the_readers_own_components_train(tmp_path):
    """03 saves its functions in the working directory; 04 started there trains with them, as with the package's."""
    result, _ = execute(tmp_path, notebook="03_grpo_components.ipynb")
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "my_components.py").is_file()
    rewards = {}
    for components in ("mine", "package"):
        result, _ = execute(tmp_path, *SMALL, "-p", "components", components, "-p", "variant", components)
        assert result.returncode == 0, result.stderr[-2000:]
        folder = tmp_path / f"data/runs/quick/{components}/seed=0"
        assert (folder / "my_components.py").exists() == (components == "mine")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        rewards[components] = [(row.get("reward"), row.get("val_reward"), row.get("grad_norm")) for row in rows]
    assert rewards["mine"][1] == pytest.approx(rewards["package"][1], rel=1e-4)
    assert rewards["mine"][1][2] > 0
