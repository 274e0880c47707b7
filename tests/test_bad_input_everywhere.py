"""No public function is forgotten: each has a row in a table of bad input, or stands here with the reason."""

import ast
import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest

from rlhelpers import paths

TESTS = Path(__file__).parent.glob("test_*.py")
TABLES = [import_module(file.stem) for file in TESTS if "\n    Row(" in file.read_text(encoding="utf-8")]
WITHOUT_A_ROW = {
    "Completion": "a record that engines write, and nobody else",
    "Rollout": "a record that engines write, and nobody else",
    "Grade": "a record that the grader writes, and nobody else",
    "EngineDeadError": "an error, with a text",
    "DisagreementError": "an error, with a text",
    "Estimate": "a record that the intervals write, and nobody else",
    "Moments": "a record that moments writes, and nobody else",
    "RolloutEngine": "a protocol: nothing to call",
    "house_style": "takes nothing",
    "counted": "writes whatever number it is given",
    "between": "a kind of settings; test_settings feeds them",
    **dict.fromkeys(["make_sft_config", "make_dpo_config", "hold_out", "losses_of"], "see test_offline and test_dpo"),
    **dict.fromkeys(["PackedSFTDataset", "iterate_batches"], "see test_sft"),
    **dict.fromkeys(["load_pairs", "pair_solutions", "write_pairs"], "see test_preference_pairs"),
    "alpaca_prompt": "see test_offline",
    **dict.fromkeys(["read_texts", "write_texts"], "see test_data_files"),
    **dict.fromkeys(["get_benchmark", "answer", "save"], "see test_benchmarks and test_zero_shot"),
    "read_report": "see test_benchmark_report",
    "compute_dpo_losses": "see test_preferences",
    **dict.fromkeys(["flatten", "rows_to_read"], "called with what an engine has given"),
    "check_inputs": "test_settings feeds it",
    "check_model": "test_settings feeds it",
    "check_task": "test_settings feeds it",
    "policy_gradient_step": "what it needs is named in test_new_algorithms; its arguments are checked records",
    "check_probabilities": "the check that the others of enumeration call",
    "group_mean": "a cell of the table of estimators, called with what _grouped has checked",
}


def used_by_notebooks() -> dict[str, object]:
    """Functions and classes that the code cells import from the package, by name, and those of its modules that they
    reach through a module's name.  The workbook's own machinery has its own tests."""
    found, modules = {}, {}
    for path in sorted((paths.ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        trees = [ast.parse("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rlhelpers"):
                for alias in node.names:
                    value = getattr(import_module(node.module), alias.name, None)
                    target = modules if value is None or inspect.ismodule(value) else found
                    target[alias.name] = value or import_module(f"{node.module}.{alias.name}")
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found[node.attr] = getattr(modules[node.value.id], node.attr)
    return found


def public() -> set[str]:
    """Names of functions and classes that a user of the package calls."""
    found = used_by_notebooks()
    for package in ("kernels", "tasks", "rollouts"):
        module = import_module(f"rlhelpers.{package}")
        found |= {name: getattr(module, name) for name in module.__all__}
    for name in ("enumeration", "montecarlo", "symbolic"):
        module = import_module(f"rlhelpers.theory.{name}")
        members = inspect.getmembers(module, lambda member: inspect.isfunction(member) or inspect.isclass(member))
        found |= {n: m for n, m in members if m.__module__ == module.__name__ and not n.startswith("_")}
    return {
        name
        for name, value in found.items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__.startswith("rlhelpers.")
        and not value.__module__.startswith("rlhelpers.workbook")
    }


def test_every_public_function_has_a_row_or_a_reason():
    rows = {row.function.partition(".")[0] for table in TABLES for row in table.ROWS}
    names = public()
    assert {"grpo_train_step", "three_ways", "make_config", "load_task", "TorchEngine", "list_runs"} <= names
    assert names - rows - set(WITHOUT_A_ROW) == set()
    assert set(WITHOUT_A_ROW) - names == set() and set(WITHOUT_A_ROW) & rows == set()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_no_row_is_there_twice(table):
    rows = [(row.function, row.argument, row.message, repr(row.values)) for row in table.ROWS]
    assert len(rows) == len(set(rows))
