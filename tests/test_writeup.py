"""The write-up: what it finds in the chapters, and notebook 09 as a page and as PDF."""

import os
import re
import shutil
import subprocess

import nbformat
import pytest

from rlhelpers import cli, paths
from rlhelpers.evidence.runs import list_runs
from rlhelpers.workbook import writeup


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The page, made once where no Chromium is."""
    folder = tmp_path_factory.mktemp("writeup") / "deeper"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writeup, "CHROMIUM", ("no-such-browser",))
        told = writeup.export(folder)
    return folder, told


@pytest.fixture
def one_page(monkeypatch):
    """A page without running the notebook."""
    monkeypatch.setattr(writeup, "_as_html", lambda folder: "<p>page</p>")


def test_the_handouts_problems_and_points():
    assert len(writeup.POINTS) == 28 and sum(writeup.POINTS.values()) == 90


def test_each_problem_stands_where_its_link_leads():
    places = writeup.places()
    assert list(places)[: len(writeup.POINTS)] == list(writeup.POINTS)
    for problem in writeup.POINTS:
        assert places[problem], problem
        for place in places[problem]:
            notebook = nbformat.read(paths.ROOT / "notebooks" / place.notebook, as_version=4)
            assert any(f"## {place.heading}" in cell.source for cell in notebook.cells)
    [place] = places["grpo_experiments_standard_on_policy"]
    assert place.link == "[04_grpo](<04_grpo.ipynb#grpo_experiments_standard_on_policy:-four-seeds>)"


def test_a_chapter_that_is_added_is_found(tmp_path, monkeypatch):
    """With its problems behind those of the handout's main part, its answers, and what its checks say."""
    cells = [
        nbformat.v4.new_markdown_cell("# 08 Supplement\n\n## `look_at_sft`: data\n\n## `look_at_sft` again\n\n## Else"),
        nbformat.v4.new_markdown_cell(
            "An answer.", metadata={"nbgrader": {"solution": True, "grade_id": "look_at_sft_a"}}
        ),
        nbformat.v4.new_code_cell("check.dpo_loss(dpo_loss)", metadata={"nbgrader": {"grade_id": "check_dpo_loss"}}),
    ]
    cells[1].metadata.nbgrader = {"solution": True, "grade_id": "look_at_sft_a"}
    cells[2].outputs = [nbformat.v4.new_output("stream", text="dpo_loss\n  holds  a\n  FAILS  b\n      it holds\n")]
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks/08_supplement.ipynb")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    places = writeup.places()
    assert list(places)[-1] == "look_at_sft" and len(places["look_at_sft"]) == 1
    assert places["try_your_own"] == []
    assert writeup.written_answers() == {"look_at_sft": ["An answer."]}
    assert writeup.properties("dpo_loss_per_instance") == (1, 2) and writeup.properties("look_at_sft") == (0, 0)


def test_properties_of_the_committed_chapters_hold():
    hold, tried = writeup.properties("compute_group_normalized_rewards_maxrl")
    assert hold == tried > 3


def test_a_table_in_markdown():
    table = writeup.markdown_table([{"a": 1, "b": "x | y"}, {"a": "", "b": 2.5}])
    assert table == "| a | b |\n| --- | --- |\n| 1 | x \\| y |\n|  | 2.5 |"


@pytest.mark.slow
def test_the_page_has_every_problem_and_figure_and_no_code(exported):
    folder, told = exported
    html = (folder / "writeup.html").read_text(encoding="utf-8")
    for problem in writeup.POINTS:
        assert f"<code>{problem}</code>" in html, problem
    source = (paths.ROOT / "notebooks" / writeup.NOTEBOOK).read_text(encoding="utf-8")
    figures = re.findall(r"\]\(\.\./figures/(\w+\.png)\)", source)
    assert len(figures) >= 8 and html.count('src="data:image/png;base64,') == len(figures)
    assert "import pandas" not in html and "read_parameters(globals" not in html
    assert told[0] == f"The write-up is in {folder / 'writeup.html'}" and "there is no Chromium here" in told[1]
    assert not (folder / "writeup.pdf").exists()


@pytest.mark.slow
def test_formulas_are_set_without_the_network(exported):
    html = (exported[0] / "writeup.html").read_text(encoding="utf-8")
    answer = html[html.index('id="think_about_importance_reweighting"') :]
    assert "<mi>&#x003C0;</mi>" in answer or "<mi>π</mi>" in answer  # pi_theta, MathML
    assert r"\pi" not in answer and r"\operatorname" not in answer
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?!data:|#)[^"]*//', html)


@pytest.mark.slow
def test_the_links_of_the_page_lead_to_the_chapters(exported):
    folder, _ = exported
    html = (folder / "writeup.html").read_text(encoding="utf-8")
    links = set(re.findall(r'href="([^"#]*\.ipynb)#', html))
    assert {(folder / link).resolve() for link in links} >= {
        file for file in (paths.ROOT / "notebooks").glob("0[1-7]_*.ipynb")
    }
    ids = set(re.findall(r'id="([^"]+)"', html))
    below = re.findall(r'href="#([^"]+)">below', html)
    assert below and set(below) <= ids


@pytest.mark.slow
def test_its_numbers_are_those_of_the_committed_runs(exported):
    """The scores of GRPO's seeds, computed once more from the files; and the number of them."""
    from rlhelpers.evidence.runs import comparable
    from rlhelpers.training.config import make_config

    runs = comparable(list_runs("04_grpo", committed_only=True), make_config().comparable_settings(), [])
    scores = [run.metrics["val_reward"].dropna().tail(3).mean() for run in runs.itertuples()]
    html = (exported[0] / "writeup.html").read_text(encoding="utf-8")
    assert f"final score {sum(scores) / len(scores):.3f} [" in html and f"{len(scores)} seeds" in html


@pytest.mark.slow
def test_a_notebook_that_fails_says_so(tmp_path, monkeypatch, capsys):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise KeyError('a metric')")])
    (tmp_path / "notebooks").mkdir()
    nbformat.write(broken, tmp_path / "notebooks" / writeup.NOTEBOOK)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    assert cli.main(["writeup"]) == 1
    assert "09_writeup.ipynb: KeyError: 'a metric'" in capsys.readouterr().err


def browser(folder, name, script):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="the stub is a shell script")
def test_a_chromium_is_found_and_told_what_to_print(one_page, tmp_path, monkeypatch, capsys):
    """A program in Chromium's place, which writes its arguments where the PDF should go."""
    stub = 'for a in "$@"; do case "$a" in --print-to-pdf=*) echo "$@" > "${a#--print-to-pdf=}";; esac; done'
    browser(tmp_path, "google-chrome", stub)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(writeup, "CHROMIUM", ("no-such-browser", "google-chrome"))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "a b")
    assert cli.main(["writeup"]) == 0
    folder = tmp_path / "a b/writeup"
    arguments = (folder / "writeup.pdf").read_text(encoding="utf-8").split()
    assert "--headless" in arguments and arguments[-1] == (folder / "writeup.html").as_uri()
    assert str(folder / "writeup.pdf") in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="the stub is a shell script")
@pytest.mark.parametrize("script", ["echo no display >&2; exit 1", "echo no display >&2"])
def test_a_chromium_that_prints_nothing_is_an_error(one_page, tmp_path, monkeypatch, script):
    browser(tmp_path, "chromium", script)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "writeup.pdf").write_text("of an earlier write-up", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"chromium printed no PDF: no display"):
        writeup.export(tmp_path)
    assert not (tmp_path / "writeup.pdf").exists()


def test_a_chromium_that_hangs_is_an_error_of_one_line(tmp_path, monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"chromium printed no PDF in 300 s; the page is in .*writeup\.html$"):
        writeup._print("chromium", tmp_path / "writeup.html", tmp_path / "writeup.pdf")


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, writeup.CHROMIUM)), reason="no Chromium is installed")
def test_a_real_chromium_prints_it(one_page, tmp_path):
    writeup.export(tmp_path)
    assert (tmp_path / "writeup.pdf").read_bytes().startswith(b"%PDF")
