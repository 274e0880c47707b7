"""Reports: what is written, shown, and put into the README."""

import json
import math

import pytest

from rlhelpers import cli, paths
from rlhelpers.bench import commands, report
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report, conditions, show, with_tables

COMMITTED = sorted((paths.ROOT / "data" / "results" / "bench").glob("*.json"))
ROWS = [
    {"engine": "a", "seconds": Spread(1.5, 1.0, 2.0), "rounds_of": [1, 2], "bias": None},
    {"engine": "b", "seconds": Spread(30.0, 30.0, 30.0), "rounds_of": [3], "bias": -0.5},
    {"life": "a", "is_there": True},
]


@pytest.fixture
def made():
    return Report("made", conditions(), {"rounds": 3, "work": {"n": 8, "stop": None}}, ROWS, ["A sentence."])


def test_what_is_written_is_read(made, roots):
    file = made.write()
    assert file == paths.RUNS / "bench" / "made.json" and Report.read(file) == Report(**vars(made))
    assert json.loads(file.read_text(encoding="utf-8"))["rows"][0]["seconds"] == {
        "median": 1.5,
        "low": 1.0,
        "high": 2.0,
    }


def test_rows_with_the_same_columns_are_a_table(made):
    assert made.tables().splitlines() == [
        "| engine | seconds             | bias   |",
        "|--------|---------------------|--------|",
        "| a      | 1.50 (1.00 to 2.00) |        |",
        "| b      | 30.0                | -0.500 |",
        "",
        "| life | is there |",
        "|------|----------|",
        "| a    | yes      |",
    ]


def test_the_text_says_all_but_lists(made):
    text = str(made)
    assert "rounds: 3\nwork: n 8\n" in text and "seconds: median (lowest to highest)" in text and "A sentence." in text
    assert "bias: in standard errors" in text and made.conditions["cpu"] in text and "rounds of" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (1.0, "1.00"), (0.0999999, "0.100"), (12.34, "12.3"), (1234.5, "1,230"), (-0.0654, "-0.0654")),
        *(
            (1.2e-5, "1.2e-05"),
            (math.nan, "nan"),
            (25088, "25,088"),
            (False, "no"),
            (None, ""),
            ("x", "x"),
            ({}, "none"),
        ),
        *((Spread(2.0, 1.0, 3.0), "2.00 (1.00 to 3.00)"), ({"right": 2, "empty_box": 1}, "right 2, empty box 1")),
    ],
)
def test_show(value, text):
    assert show(value) == text


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_the_committed_reports_are_readable(file):
    found = Report.read(file)
    assert found.name == file.stem in commands.BENCHES and found.rows and found.conditions["date"]
    assert found.tables() in str(found)


def test_the_readme_has_the_committed_tables():
    """If it has not: `rlhelpers bench readme`."""
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert with_tables(readme) == readme
    shown = {name for _, name, _ in report.MARKED.findall(readme)}
    assert shown == {file.stem for file in COMMITTED} - {"ahead", "grader", "imports"}  # of these prose says enough


def test_bench_readme_fills_the_marks(made, roots, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", paths.RUNS)
    made.write()
    readme = tmp_path / "README.md"
    readme.write_text("Before\n<!-- bench: made -->\n| old |\n<!-- /bench -->\nafter\n", encoding="utf-8")
    assert cli.main(["bench", "readme"]) == 0 and str(readme) in capsys.readouterr().out
    text = readme.read_text(encoding="utf-8")
    assert text == f"Before\n<!-- bench: made -->\n{made.tables()}\n<!-- /bench -->\nafter\n"
    readme.write_text("<!-- bench: nothing -->\n<!-- /bench -->\n", encoding="utf-8")
    assert cli.main(["bench", "readme"]) == 2 and "nothing.json" in capsys.readouterr().err


def test_every_bench_is_there():
    """With the options that its command hands on."""
    for name, (where, _) in commands.BENCHES.items():
        module, _, function = where.partition(".")
        bench = getattr(commands.import_module(f"rlhelpers.bench.{module}"), function)
        for option in commands.OPTIONS.get(name, {}):
            assert option.lstrip("-") in bench.__code__.co_varnames[: bench.__code__.co_argcount]


def test_a_command_hands_on_its_options_and_keeps_the_report(made, roots, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr("rlhelpers.bench.runs.bench_long", lambda **options: given.update(options) or made)
    assert cli.main(["bench", "long", "--steps", "7"]) == 0 and given == {"steps": 7}
    file = paths.RUNS / "bench" / "made.json"
    assert capsys.readouterr().out == f"{made}\nThe numbers are in {file}\n" and file.exists()
