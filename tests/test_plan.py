"""What a sweep will do: what its runs would train, and what of them is there already."""

import shutil
from pathlib import Path

import pytest
from small_notebooks import CELL, PARAMETERS, write

from rlhelpers import cli, paths
from rlhelpers.sweep import grid
from rlhelpers.sweep.grid import read_grid
from rlhelpers.sweep.plan import make_plan
from rlhelpers.sweep.run import Run
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords

GRPO = paths.ROOT / "notebooks/04_grpo.ipynb"
pytestmark = pytest.mark.usefixtures("no_quick")


def plan(notebook, resume=False, **given):
    runs, _ = make_plan([read_grid(notebook, given)], resume)
    return runs


def test_values_that_no_run_can_have_are_all_said(roots, capsys):
    given = ["-p", "estimator=grpo,grop", "-p", "learning_rate=1e-4,-1", "-p", "group_size=8,7", "--seeds", "0-1"]
    assert cli.main(["sweep", str(GRPO), *given]) == 2
    errors = capsys.readouterr().err
    for message in ("estimator: got 'grop'; accepted are", "learning_rate: got -1.0", "multiple of group_size=7"):
        assert message in errors
    assert "04_grpo estimator=grop,learning_rate=0.0001,group_size=8,seed=0" in errors and "more" in errors
    assert not roots[0].exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["notebooks/nothing.ipynb"], "there is no notebook"),
        (["README.md"], "accepted are a notebook"),
        ([str(GRPO), "-p", "seed"], "accepted is name=value"),
        ([str(GRPO), "--gpus-per-run", "2"], "gpus_per_run: only with --engine ray"),
        ([str(GRPO), "--gpus-per-run", "2", "--dry-run"], "gpus_per_run: only with --engine ray"),
        ([str(GRPO), "--seeds", "0-3", "-p", "seed=5"], "seed: given twice"),
        ([str(GRPO), "-p", "estimator=rft", "-p", "estimator=grpo"], "estimator: given twice"),
        ([str(GRPO), "--seeds", "0-999", "-p", "group_size=1-99"], "got 99000 combinations; accepted are at most"),
        ([str(GRPO), "-p", "betas=(0.9,2)"], "betas.1: got 2; input should be less than 1"),
        ([str(GRPO), "-p", f"experiment={'ü' * 150}"], "experiment: got 'ü"),
        ([str(GRPO), "-p", "variant=x", "-p", "estimator=grpo,rft"], "two runs would be written to 04_grpo/x/seed=0"),
    ],
)
def test_other_mistakes(roots, capsys, arguments, message):
    assert cli.main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not roots[0].exists()


@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1.5", "x"])
def test_a_number_of_gpus_that_ray_does_not_give(capsys, number):
    with pytest.raises(SystemExit):
        cli.main(["sweep", str(GRPO), "--engine", "ray", f"--gpus-per-run={number}", "--dry-run"])
    assert f"got '{number}'; accepted are numbers from 0" in capsys.readouterr().err


def test_a_notebook_without_parameters_and_one_that_exits(roots, tmp_path, capsys):
    file = tmp_path / "made_up.ipynb"
    assert cli.main(["sweep", str(write(file, "seed = = 0\n")), "-p", "seed=1"]) == 2
    assert "seed: made_up.ipynb has no such parameter; accepted are none: no cell" in capsys.readouterr().err
    assert cli.main(["sweep", str(write(file, PARAMETERS, "raise SystemExit(3)\nconfig = 1"))]) == 2
    assert "made_up.ipynb: SystemExit: 3" in capsys.readouterr().err


def test_a_tuple_is_one_for_the_configuration(roots):
    [run] = plan(GRPO, betas="(0.8,0.9)")
    assert run.fingerprint == make_config(betas=(0.8, 0.9)).fingerprint


@pytest.mark.parametrize("about", ["{", "[]", '{"status": "complete", "fingerprint": [1]}'])
def test_a_run_whose_record_is_damaged_is_another_one(roots, write_run, capsys, about):
    (write_run(roots[0]) / "run.json").write_text(about, encoding="utf-8")
    assert cli.main(["sweep", str(GRPO), "--dry-run"]) == 0
    assert "waiting" in capsys.readouterr().out


def test_a_value_too_long_for_a_file(roots, capsys):
    for parameter in ("model", "task"):
        assert cli.main(["sweep", str(GRPO), "-p", f"{parameter}={'x' * 5000}", "--dry-run"]) == 2
        assert f"{parameter}: got 'xxx" in capsys.readouterr().err


def test_notebooks_of_one_name_are_not_executed_to_one_file(roots, tmp_path):
    first = write(tmp_path / "made_up.ipynb", PARAMETERS, CELL)
    (tmp_path / "other").mkdir()
    second = Path(shutil.copy(first, tmp_path / "other"))
    grids = [read_grid(notebook, {"seed": "0"}) for notebook in (first, first, second)]
    runs, remarks = make_plan(grids[:2])
    assert len(runs) == 1 and remarks == ["made_up seed=0: asked for twice"]
    with pytest.raises(ValueError, match=r"other/made_up\.ipynb; accepted are those of different names"):
        make_plan(grids)


@pytest.mark.slow
def test_the_workbooks_experiments_are_the_committed_runs(monkeypatch, tmp_path):
    """All of them are there, and all that is there is one of them: but for what other notebooks, engines and clocks
    left."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    grids = grid.read(paths.DATA / "experiments.yaml", {})
    runs, remarks = make_plan(grids)
    assert len(runs) == 4 * (1 + 3 + 2 + 4 + 5 + 1)
    assert len(remarks) == 8  # the default learning rate and prompt
    found = {run.detail.removeprefix("before, results/") for run in runs}
    committed = {f.parent.relative_to(paths.RESULTS) for f in paths.RESULTS.glob("*/*/seed=*/run.json")}
    others = ("06_wall_clock", "08_supplement")
    assert found == {str(f) for f in committed if "engine=vllm" not in str(f) and f.parts[0] not in others}


def test_the_fingerprint_decides_what_is_complete(roots, write_run):
    own, committed = roots
    write_run(committed, seed=0, variant="of_another_name")
    write_run(own, seed=1, status="failed")
    write_run(own, seed=2, learning_rate=1e-3, variant="grpo")  # complete, but not what its name says
    write_run(own, seed=3, status="running")  # killed: nobody holds its lock
    runs = plan(GRPO, seed="0-4")
    assert [run.state for run in runs] == ["complete", *["waiting"] * 4]
    details = [run.detail for run in runs]
    assert "of_another_name" in details[0] and "moved aside" in details[2] and details[4] == "new"
    assert all(detail.startswith("begins again; --resume") for detail in (details[1], details[3]))
    assert [run.detail for run in plan(GRPO, resume=True, seed="0-4")][1:4:2] == ["goes on", "goes on"]


def test_a_committed_run_that_does_not_tell_all_is_new(roots, write_run):
    """As one with an estimator of the reader's own, of whose functions config.yaml has only the names."""
    write_run(roots[1], without=["estimator"])
    assert plan(GRPO)[0].detail.startswith("new; the complete run of that name in data/results does not tell its whole")


def test_a_run_that_somebody_has_open_is_busy_elsewhere(roots):
    with RunRecords(make_config(seed=1)):
        assert plan(GRPO, seed="1")[0].detail == "busy elsewhere"


def test_another_function_makes_another_run(roots, tmp_path):
    """Notebook 07 makes its row in its cells; they are run, without the training."""
    own = paths.ROOT / "notebooks/07_your_own_estimator.ipynb"
    [run] = plan(own)
    assert run.folder == roots[0] / "07_your_own_estimator/tempered_std/seed=0"
    changed = tmp_path / own.name
    text = own.read_text(encoding="utf-8").replace("keepdim=True).sqrt()", "keepdim=True).pow(0.25)")
    changed.write_text(text, encoding="utf-8")
    assert plan(changed)[0].fingerprint != run.fingerprint
    assert plan(own)[0].fingerprint == run.fingerprint


def test_a_run_is_asked_for_once(roots):
    runs, remarks = make_plan([read_grid(GRPO, {"learning_rate": "3e-4,None"})])
    assert len(runs) == 1
    assert remarks == ["04_grpo learning_rate=None: the same run as 04_grpo learning_rate=0.0003"]


def test_a_dry_run_writes_nothing(roots, capsys):
    assert cli.main(["sweep", str(GRPO), "--seeds", "0-1", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 waiting"
    assert not roots[0].exists()


def test_names_of_files_are_short_enough(tmp_path):
    def output(**parameters):
        return Run(Path("04_grpo.ipynb"), parameters).output.name

    long = output(model="/very/long" * 40, seed=1)
    assert len(long) <= 205 and long != output(model="/very/long" * 40, seed=2)
    (tmp_path / long).touch()
    (tmp_path / output(model="ü" * 150)).touch()  # file systems count bytes
