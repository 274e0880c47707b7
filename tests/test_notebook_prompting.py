"""Notebook 01 as software: parameters good and bad, a file of responses, an exercise that is not written."""

import json
import re

import nbformat
import pytest

from rlhelpers import paths

NOTEBOOK = paths.ROOT / "notebooks/01_prompting_baselines.ipynb"


@pytest.fixture
def run(execute):
    """Executes the notebook; returns the finished process and all that its cells printed."""

    def execute_and_read(*arguments, notebook=NOTEBOOK):
        result, output = execute(notebook, "--no-progress-bar", "-p", "device", "cpu", *arguments)
        cells = nbformat.read(output, as_version=4).cells if output.exists() else []
        outputs = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs]
        return result, "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)

    return execute_and_read


def test_every_parameter_is_explained():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    source = next(cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    assert all("  # " in line and ": " in line for line in source.splitlines()[1:])


@pytest.mark.slow
def test_exercises_not_written_leave_the_rest_running(run, tmp_path):
    """As in the exercise edition; and the task is one whose verdict is its own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if "### BEGIN SOLUTION" in cell.source:
            cell.source = cell.source.partition("    ### BEGIN SOLUTION")[0] + "    raise NotImplementedError()"
    nbformat.write(notebook, tmp_path / "stripped.ipynb")
    small = ("-p", "quick", "True", "-p", "n_examples", "8", "-p", "max_tokens", "16", "-p", "task", "gym/chain_sum")
    result, printed = run(*small, notebook=tmp_path / "stripped.ipynb")
    assert result.returncode == 0, result.stderr[-2000:]
    assert printed.count("not written yet") == 3
    assert "the same seed gives the same responses: True" in printed
    assert (tmp_path / "data/runs/01_prompting_baselines/categories.png").is_file()


@pytest.mark.slow
def test_a_file_of_responses_with_verdicts(run, tmp_path):
    row = {"question": "2+3?", "ground_truth": "5", "run": "mine"}
    rows = [
        row
        | {"prompt": "r1_zero", "response": " </think> <answer> It is 5. </answer>", "human": {"verdict": "correct"}},
        row | {"prompt": "question_only", "response": "6", "human": {"verdict": "incorrect"}},
        row | {"prompt": "question_only", "response": ""},
        row | {"prompt": "question_only", "response": r"\boxed{6}, and then \boxed{5}"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "mine.jsonl").write_text(lines, encoding="utf-8")
    result, printed = run("-p", "responses", "mine.jsonl")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "the rule, on all responses with a verdict: 2 judged, 1 of them right" in printed
    assert "precision 1.00, recall 1.00" in printed
    assert re.search(r"boxes that are not the same +of these rewarded *\n.*\nmine +question_only +1 +1\n", printed)
    assert "the same seed" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "response", "x"], "response: there is no such setting; did you mean responses"),
        (["-p", "n_examples", "0"], "n_examples: got 0"),
        (["-p", "responses", "no.jsonl"], "responses: got 'no.jsonl'; there is no such file"),
    ],
)
def test_a_wrong_parameter_is_named(run, tmp_path, arguments, message):
    result, _ = run(*arguments)
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "data/runs").exists()
