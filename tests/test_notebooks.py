"""Notebooks as software: their form, and what 04 does with good and bad parameters."""

import json

import nbformat
import pytest

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


def test_reasoning_gym(execute, tmp_path):
    result, _ = execute("04_grpo.ipynb", *SMALL, "-p", "task", "gym/chain_sum", "-p", "num_rollout_steps", "1")
    assert result.returncode == 0, result.stderr[-2000:]


def test_gsm8k_runs_and_says_that_the_tiny_model_earns_nothing(execute, tmp_path):
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
