"""Nothing heavy is imported before it is needed; how long that takes, `rlhelpers bench imports` says."""

import subprocess
import sys

import pytest

from rlhelpers import cli, paths
from rlhelpers.bench import imports
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report

HEAVY = {
    *("torch", "vllm", "ray", "transformers", "tokenizers", "datasets", "reasoning_gym", "sympy", "math_verify"),
    *("scipy", "pandas", "matplotlib", "IPython", "ipywidgets", "numpy", "pydantic", "httpx"),
}
TORCH = {"torch", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("rlhelpers", set()),
        ("rlhelpers.cli", set()),
        ("rlhelpers.tasks", set()),
        ("rlhelpers.evidence.figures", {"numpy", "pandas", "matplotlib"}),
        ("rlhelpers.kernels", TORCH),
        ("rlhelpers.rollouts", TORCH),
        ("rlhelpers.theory.enumeration", TORCH),
        ("rlhelpers.training.loop", TORCH | {"pydantic"}),
        ("rlhelpers.exercises", TORCH | {"pydantic", "tokenizers"}),
    ],
)
def test_what_comes_with_a_module(module, allowed):
    program = f"import sys, {module}\nprint(*{HEAVY!r} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) <= allowed


@pytest.mark.slow
def test_help_needs_nothing():
    start = imports.start(imports.PROGRAMS["rlhelpers --help"], 1)
    assert not start.has_torch and start.seconds >= 0


@pytest.mark.slow
def test_a_program_that_fails_is_not_quick():
    with pytest.raises(RuntimeError, match=r"imports: 'import nothing_of_this_name' failed: ModuleNotFoundError"):
        imports.start("import nothing_of_this_name", 1)


def test_the_report_from_numbers(monkeypatch):
    starts = {
        "python": [imports.Start(0.02, False), imports.Start(0.04, False)],
        "torch": [imports.Start(1.0, True), imports.Start(2.0, True)],
        "rlhelpers.tasks": [imports.Start(0.1, False), imports.Start(0.1, False)],
        "rlhelpers.kernels": [imports.Start(1.75, True), imports.Start(1.75, True)],
    }
    monkeypatch.setattr(imports, "PROGRAMS", {name: name for name in starts})
    monkeypatch.setattr(imports, "start", lambda name, number: starts[name][number - 1])
    report = imports.bench_imports(rounds=2)
    rows = {row["start"]: row for row in report.rows}
    assert report.settings == {"rounds": 2} and rows["torch"]["CPU_seconds"] == Spread(1.5, 1.0, 2.0)
    assert rows["rlhelpers.tasks"]["beyond"] == pytest.approx(0.07) and not rows["rlhelpers.tasks"]["torch"]
    assert rows["rlhelpers.kernels"]["beyond"] == pytest.approx(0.25)
    assert "1.50 (1.00 to 2.00)" in str(report)


def test_the_command_writes_a_report(monkeypatch, roots, capsys):
    monkeypatch.setattr(imports, "PROGRAMS", {"python": "import sys", "torch": "import sys"})
    monkeypatch.setattr(imports, "start", lambda program, number: imports.Start(float(number), program != "import sys"))
    assert cli.main(["bench", "imports"]) == 0
    assert str(paths.RUNS / "bench" / "imports.json") in capsys.readouterr().out
    assert Report.read(paths.RUNS / "bench" / "imports.json").rows[1]["CPU_seconds"] == Spread(3.0, 1.0, 5.0)
