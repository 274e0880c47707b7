"""The exercise edition: solutions are gone, checks say so, and with the solutions put back all of them pass."""

import ast
import contextlib
import io

import nbformat
import pytest

from rlhelpers import cli, paths
from rlhelpers.workbook import writeup
from rlhelpers.workbook.edition import write_exercises

NOTEBOOKS = sorted(path.name for path in (paths.ROOT / "notebooks").glob("*.ipynb") if path.name != writeup.NOTEBOOK)
EMPTY = nbformat.writes(nbformat.v4.new_notebook())
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exercises")
    assert [file.name for file in write_exercises(folder)] == NOTEBOOKS
    return folder


def read(folder, name):
    return nbformat.read(folder / name, as_version=4)


def is_solution(cell):
    return cell.metadata.get("nbgrader", {}).get("solution", False)


def is_check(cell):
    return cell.metadata.get("nbgrader", {}).get("grade", False) and not is_solution(cell)


def reports(notebook) -> tuple[str, list[float]]:
    """What the check cells print and give.  Of the other cells only imports and functions are run."""
    namespace, shares, printed = {}, [], io.StringIO()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        body = ast.parse(cell.source).body
        if is_check(cell):
            with contextlib.redirect_stdout(printed):
                (statement,) = body
                shares.append(eval(ast.unparse(statement), namespace))
        else:
            kept = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
            for node in kept:
                # A function whose defaults are computed by other cells is none that a check needs.
                with contextlib.suppress(NameError):
                    exec(compile(ast.Module([node], []), "cell", "exec"), namespace)
    return printed.getvalue(), shares


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_each_notebook_has_exercises_and_one_silent_bug(name):
    cells = read(paths.ROOT / "notebooks", name).cells
    checks = [cell.source for cell in cells if is_check(cell)]
    solutions = [cell for cell in cells if is_solution(cell) and cell.cell_type == "code"]
    assert len(solutions) == len(checks) >= 1
    assert sum(".repairs(buggy_" in source for source in checks) == 1
    grade_ids = [cell.metadata.nbgrader.grade_id for cell in cells if "nbgrader" in cell.metadata]
    assert len(set(grade_ids)) == len(grade_ids)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_solution_and_no_output_is_left(name, edition):
    text = (edition / name).read_text(encoding="utf-8")
    assert "BEGIN SOLUTION" in (paths.ROOT / "notebooks" / name).read_text(encoding="utf-8")
    assert "SOLUTION" not in text
    for cell in read(edition, name).cells:
        assert not cell.get("outputs")
        if is_solution(cell):
            stub = "raise NotImplementedError()" if cell.cell_type == "code" else "YOUR ANSWER HERE"
            assert stub in cell.source and not cell.metadata.nbgrader.locked


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_checks_say_not_written_yet_and_pass_with_the_solutions(name, edition):
    notebook = read(edition, name)
    printed, shares = reports(notebook)
    assert shares and set(shares) == {0.0}
    assert printed.count("not written yet\n") == len(printed.splitlines()) == len(shares)
    solved = read(paths.ROOT / "notebooks", name)
    for cell, solution in zip(notebook.cells, solved.cells, strict=True):
        if is_solution(cell):
            cell.source = solution.source
    printed, shares = reports(notebook)
    assert set(shares) == {1.0} and "FAILS" not in printed


def test_somebodys_work_is_not_overwritten(tmp_path, capsys):
    (tmp_path / NOTEBOOKS[-1]).write_text("my work", encoding="utf-8")
    assert cli.main(["exercises", str(tmp_path)]) == 2
    assert f"{NOTEBOOKS[-1]} exists already" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [NOTEBOOKS[-1]]


def test_a_refused_notebook_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no notebook"):
        write_exercises(tmp_path / "new")
    for name in ("01_good", "02_bad"):
        (tmp_path / f"notebooks/{name}.ipynb").write_text("no JSON" if "bad" in name else EMPTY, encoding="utf-8")
    with pytest.raises(ValueError, match=r"02_bad\.ipynb: "):
        write_exercises(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command(tmp_path, capsys):
    assert cli.main(["exercises", str(tmp_path / "new")]) == 0
    assert f"{len(NOTEBOOKS)} notebooks without solutions" in capsys.readouterr().out
