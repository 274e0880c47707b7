"""Sweeps: what they ask for, what is there already, and that they go on through failures, kills and Ctrl-C."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml
from processes import is_alive, wait_until

from rlhelpers import cli, paths
from rlhelpers.evidence.comparisons import compare_finals
from rlhelpers.evidence.figures import save_for_writeup
from rlhelpers.evidence.runs import list_runs, read_curves
from rlhelpers.evidence.statistics import final_scores
from rlhelpers.evidence.tables import table_of_comparisons, table_of_finals
from rlhelpers.sweep import grid
from rlhelpers.sweep import plan as configurations
from rlhelpers.sweep.grid import Grid, parse_values, read_experiments, read_grid
from rlhelpers.sweep.parallel import on_this_machine
from rlhelpers.sweep.plan import make_plan, rows_of_plan
from rlhelpers.sweep.run import INTERRUPTED, sweep
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords

GRPO = paths.ROOT / "notebooks/04_grpo.ipynb"
PARAMETERS = """# Parameters: of a notebook that trains nothing
seed: int = 0  # names the run
seconds: float = 0.0  # to sleep
fail: bool = False  # in its second cell
"""
CELL = """import pathlib, time
pathlib.Path(f"began-{seed}").touch()
if fail:
    raise ValueError("it was told to fail")
time.sleep(seconds)
print("seed", seed, "is done")
"""


@pytest.fixture(autouse=True)
def no_quick(monkeypatch):
    monkeypatch.delenv("RLHELPERS_QUICK", raising=False)


@pytest.fixture
def write_notebook(tmp_path):
    def write(parameters=PARAMETERS, *cells, name="made_up"):
        cells = [nbformat.v4.new_code_cell(source) for source in (parameters, *(cells or (CELL,)))]
        cells[0].metadata["tags"] = ["parameters"]
        notebook = nbformat.v4.new_notebook(cells=cells)
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
        return tmp_path / f"{name}.ipynb"

    return write


def plan(notebook, **given):
    entries, _ = make_plan([read_grid(notebook, given)], configurations.plan, configurations.look)
    return entries


def states(entries):
    return {entry.parameters["seed"]: entry.state for entry in entries}


# What is asked for.


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("0-3", "int", [0, 1, 2, 3]),
        ("0-1,7", "int", [0, 1, 7]),
        ("-1", "int", [-1]),
        ("1e-4,3e-4", "float", [1e-4, 3e-4]),
        ("1,inf", "float", [1.0, float("inf")]),
        ("True,False", "bool", [True, False]),
        ("grpo, dr_grpo", "str", ["grpo", "dr_grpo"]),
        ("0-3", "str", ["0-3"]),
        ("'a,b',c", "str", ["a,b", "c"]),
        ("(0.9,0.95),[0.8, 0.9]", "tuple", [(0.9, 0.95), (0.8, 0.9)]),
        ("None,2", "int", [None, 2]),
        ("3,x,None", None, [3, "x", None]),
        (["1e-4", 3e-4, None], "float", [1e-4, 3e-4, None]),  # as YAML reads 1e-4
        (3, "int", [3]),
        ([[0.9, 0.95]], "tuple", [(0.9, 0.95)]),
        ([True], "bool", [True]),
    ],
)
def test_values(text, kind, values):
    assert parse_values(text, kind) == values


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", "int", "accepted are whole numbers"),
        ("3-0", "int", "counts upwards"),
        ("fast", "float", "accepted are numbers"),
        ("yes", "bool", "accepted are True and False"),
        ("0.9", "tuple", "accepted are tuples"),
        ("1,,2", "int", "a comma between each two"),
        ("", "str", "a comma between each two"),
        ("a,", "str", "a comma between each two"),
        ([1.5], "int", "got '1.5'"),
        ([], "int", "at least one value"),
        ("0-1000000000", "int", "a range of at most 10000 numbers"),
        ({"a": 1}, "float", "accepted are numbers, lists and texts"),
        (datetime.date(2020, 1, 1), "str", "a date in quotes"),
    ],
)
def test_wrong_values(text, kind, message):
    with pytest.raises(ValueError, match=message):
        parse_values(text, kind)


def test_the_product_takes_one_seed_after_the_other():
    values = {"estimator": ("grpo", "rft"), "seed": (0, 1)}
    assert [list(c.values()) for c in Grid(GRPO, values).combinations()] == [
        ["grpo", 0],
        ["rft", 0],
        ["grpo", 1],
        ["rft", 1],
    ]
    assert Grid(GRPO, {}).combinations() == [{}]


def test_values_have_the_types_of_the_notebook(write_notebook):
    notebook = write_notebook("# Parameters: some without a type\na = 3\nb = None\nc: 'float' = None\nd = 'x'\n")
    values = read_grid(notebook, {"a": "0-1", "b": "4,y", "c": "1", "d": "1"}).values
    assert values == {"a": (0, 1), "b": (4, "y"), "c": (1.0,), "d": ("1",)}


def test_all_that_is_wrong_is_said_before_anything_runs(roots, capsys):
    given = ["-p", "learning_rat=1e-4", "-p", "learning_rate=fast", "-p", "quick=yes", "--seeds", "0-x"]
    assert cli.main(["sweep", str(GRPO), *given]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert "learning_rat: 04_grpo.ipynb has no such parameter; did you mean learning_rate" in errors[0]
    assert "learning_rate: got 'fast'" in errors[1] and "quick: got 'yes'" in errors[2] and "seed: got" in errors[3]
    assert not roots[0].exists()


def test_values_that_no_run_can_have_are_all_said_before_anything_runs(roots, capsys):
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


@pytest.mark.parametrize("content", ["", "not json", "{}", "[]", "null"])
def test_what_is_no_notebook(roots, tmp_path, capsys, content):
    file = tmp_path / "broken.ipynb"
    file.write_text(content, encoding="utf-8")
    assert cli.main(["sweep", str(file), "-p", "seed=1"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "broken.ipynb cannot be read as a notebook" in line and not roots[0].exists()


def test_a_notebook_without_parameters_and_one_that_exits(roots, write_notebook, capsys):
    assert cli.main(["sweep", str(write_notebook("seed = = 0\n")), "-p", "seed=1"]) == 2
    assert "seed: made_up.ipynb has no such parameter; accepted are none: no cell" in capsys.readouterr().err
    assert cli.main(["sweep", str(write_notebook(PARAMETERS, "raise SystemExit(3)\nconfig = 1"))]) == 2
    assert "made_up.ipynb: SystemExit: 3" in capsys.readouterr().err


def test_a_tuple_is_one_for_the_configuration(roots):
    [entry] = plan(GRPO, betas="(0.8,0.9)")
    assert entry.planned.fingerprint == make_config(betas=(0.8, 0.9)).fingerprint


@pytest.mark.parametrize("about", ["{", "[]", '{"status": "complete", "fingerprint": [1]}'])
def test_a_run_whose_record_is_damaged_is_another_one(roots, write_run, capsys, about):
    (write_run(roots[0]) / "run.json").write_text(about, encoding="utf-8")
    assert cli.main(["sweep", str(GRPO), "--dry-run"]) == 0
    assert "waiting" in capsys.readouterr().out


def test_a_value_too_long_for_a_file(roots, capsys):
    for parameter in ("model", "task"):
        assert cli.main(["sweep", str(GRPO), "-p", f"{parameter}={'x' * 5000}", "--dry-run"]) == 2
        assert f"{parameter}: got 'xxx" in capsys.readouterr().err


def test_notebooks_of_one_name_are_not_executed_to_one_file(roots, tmp_path, write_notebook, capsys):
    first = write_notebook()
    (tmp_path / "other").mkdir()
    second = Path(shutil.copy(first, tmp_path / "other"))
    grids = [read_grid(notebook, {"seed": "0"}) for notebook in (first, first, second)]
    entries, remarks = make_plan(grids[:2], configurations.plan, configurations.look)
    assert len(entries) == 1 and remarks == ["made_up seed=0: asked for twice"]
    with pytest.raises(ValueError, match=r"other/made_up\.ipynb; accepted are those of different names"):
        make_plan(grids, configurations.plan, configurations.look)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("experiments: [", "while parsing"),
        ("experiments:\n\t- a", "cannot start any token"),
        ("experiments: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("experiments: []", "a list `experiments`"),
        ("experiments: &a\n- *a", "experiment 1: it names no notebook"),
        ("experiments:\n- notebook: 3", "experiment 1: notebook: got 3; accepted is a path"),
        ("experiments:\n- notebook: README.md", "accepted is a notebook, .ipynb"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: [a]", "parameters: got ['a']; accepted are names"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {seed: []}", "seed: got []; accepted is at least one"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {3: 4}", "3: made_up.ipynb has no such parameter"),
        ("experiments:\n- notebook: NOTEBOOK\n  parameters: {seed: 1, seed: 2}", "seed: given twice, line 3"),
        ("seeds: 0\nexperiments:\n- notebook: NOTEBOOK\n  parameters: {seed: 7}", "seed: got 7 and, by seeds, 0"),
    ],
)
def test_broken_files_of_experiments(roots, tmp_path, write_notebook, capsys, content, message):
    file = tmp_path / "experiments.yaml"
    file.write_text(content.replace("NOTEBOOK", str(write_notebook())), encoding="utf-8")
    assert cli.main(["sweep", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line and "experiments.yaml" in line and not roots[0].exists()


def test_every_mistake_of_a_file_of_experiments_is_said(tmp_path, write_notebook):
    file = tmp_path / "experiments.yaml"
    file.write_text(
        f"experiments:\n- notebook: nothing.ipynb\n- notebook: {write_notebook()}\n  parameters: {{sed: 1}}\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"(?s)experiment 1: there is no notebook .*experiment 2: sed: "):
        read_experiments(file, {})


def test_a_file_of_experiments(tmp_path, write_notebook):
    notebook = str(write_notebook())
    file = tmp_path / "experiments.yaml"
    file.write_text(
        f"seeds: 0-1\nexperiments:\n- notebook: {notebook}\n  parameters:\n    seconds: [1e-1, 2]\n"
        f"- notebook: {notebook}\n  seeds: 5\n",
        encoding="utf-8",
    )
    first, second = read_experiments(file, {"fail": "True"})
    assert first.values == {"seconds": (0.1, 2.0), "seed": (0, 1), "fail": (True,)}
    assert second.values == {"seed": (5,), "fail": (True,)}
    file.write_text(file.read_text(encoding="utf-8") + "  parameter: {}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="experiment 2: got parameter; accepted are notebook, parameters, seeds"):
        read_experiments(file, {})


def test_the_experiments_of_the_workbook_are_the_committed_runs(monkeypatch, tmp_path):
    """All of them are there, and all that is there is one of them: but for what other notebooks, engines and clocks
    left."""
    monkeypatch.setattr(paths, "RUNS", tmp_path)
    grids = grid.read(paths.DATA / "experiments.yaml", {})
    entries, remarks = make_plan(grids, configurations.plan, configurations.look)
    assert len(entries) == 4 * (1 + 3 + 2 + 4 + 5 + 1)
    assert len(remarks) == 8  # the default learning rate and prompt
    details = [row.detail for row in rows_of_plan(entries, False)]
    found = {text.removeprefix("before, results/") for text in details}
    committed = {f.parent.relative_to(paths.RESULTS) for f in paths.RESULTS.glob("*/*/seed=*/run.json")}
    others = ("06_wall_clock", "08_supplement")
    assert found == {str(f) for f in committed if "engine=vllm" not in str(f) and f.parts[0] not in others}


# What is there already.


def test_the_fingerprint_decides_what_is_complete(roots, write_run):
    own, committed = roots
    write_run(committed, seed=0, variant="of_another_name")
    write_run(own, seed=1, status="failed")
    write_run(own, seed=2, learning_rate=1e-3, variant="grpo")  # complete, but not what its name says
    write_run(own, seed=3, status="running")  # killed: nobody holds its lock
    entries = plan(GRPO, seed="0-4")
    assert [entry.found for entry in entries] == ["complete", "unfinished", "another", "unfinished", "new"]
    details = [row.detail for row in rows_of_plan(entries, resume=False)]
    assert "of_another_name" in details[0] and "begins again" in details[1] and "moved aside" in details[2]
    assert rows_of_plan(entries, resume=True)[1].detail == "goes on"


def test_an_own_estimator_is_another_run_when_its_function_is_another(roots, tmp_path):
    """Notebook 07 makes its row in its cells; they are run, without the training."""
    own = paths.ROOT / "notebooks/07_your_own_estimator.ipynb"
    [entry] = plan(own)
    assert entry.planned.folder == roots[0] / "07_your_own_estimator/tempered_std/seed=0"
    changed = tmp_path / own.name
    text = own.read_text(encoding="utf-8").replace("keepdim=True).sqrt()", "keepdim=True).pow(0.25)")
    changed.write_text(text, encoding="utf-8")
    assert plan(changed)[0].planned.fingerprint != entry.planned.fingerprint
    assert plan(own)[0].planned.fingerprint == entry.planned.fingerprint


def test_a_run_is_asked_for_once(roots):
    entries, remarks = make_plan(
        [read_grid(GRPO, {"learning_rate": "3e-4,None"})], configurations.plan, configurations.look
    )
    assert len(entries) == 1
    assert remarks == ["04_grpo learning_rate=None: the same run as 04_grpo learning_rate=0.0003"]


def test_a_dry_run_writes_nothing(roots, capsys):
    assert cli.main(["sweep", str(GRPO), "--seeds", "0-1", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 waiting"
    assert not roots[0].exists()


# Runs.


def run_command(tmp_path, *arguments, ignore_interrupts=False, **environment):
    """The command `rlhelpers sweep` at work, with runs below tmp_path."""

    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-m", "rlhelpers.cli", "sweep", *map(str, arguments)],
        cwd=tmp_path,
        env=os.environ | {"RLHELPERS_ROOT": str(tmp_path)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=ignore if ignore_interrupts else None,
    )


def finish(process, seconds=300):
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


@pytest.fixture
def with_data(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("tiny", "results"):
        (tmp_path / "data" / name).symlink_to(paths.DATA / name)


def kernels(of: int | None = None):
    """The kernels that work for a process and its children."""
    found = psutil.Process(of).children(recursive=True)
    return [p for p in found if p.is_running() and "ipykernel_launcher" in " ".join(_command(p))]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def grpo(tmp_path):
    """Of notebook 04 the cells that train; its pictures are tested elsewhere."""
    notebook = nbformat.read(GRPO, as_version=4)
    needed = ("# Parameters", "config = make_config(", "= train(config)")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [cell for cell in code if any(text in cell.source for text in needed)]
    assert len(notebook.cells) == 3
    nbformat.write(notebook, tmp_path / GRPO.name)
    return tmp_path / GRPO.name


def test_a_small_sweep_one_run_killed_and_resumed(tmp_path, with_data, grpo, monkeypatch):
    """Two seeds of two rows, trained in seconds, to the statistics, the picture and the write-up's cells."""
    small = ["-p", "quick=True", "-p", "num_rollout_steps=5", "-p", "n_val_examples=4", "-p", "max_tokens=24"]
    command = [grpo, "--seeds", "0-1", "-p", "estimator=grpo,dr_grpo", *small, "-p", "device=cpu"]
    process = run_command(tmp_path, *command)
    runs = tmp_path / "data/runs/quick"
    wait_until(lambda: list(runs.glob("dr_grpo*/seed=0/checkpoints/step_00001")))
    [killed] = [k for k in kernels(process.pid) if "estimator=dr_grpo" in " ".join(k.parent().cmdline())]
    killed.kill()
    status, output = finish(process)
    assert (status, output.splitlines()[-1]) == (1, "3 complete, 1 killed"), output
    executed = sorted(file.name for file in (tmp_path / "data/runs/notebooks").glob("*.ipynb"))
    assert len(executed) == 4 and executed[0].startswith("04_grpo,estimator=dr_grpo,quick=True,")

    status, output = finish(run_command(tmp_path, *command, "--resume"))
    assert (status, output.splitlines()[-1]) == (0, "4 complete"), output
    assert output.count("running") == 1  # the others are left alone
    log = (tmp_path / "data/runs/notebooks" / executed[0]).with_suffix(".log").read_text(encoding="utf-8")
    assert "DeadKernelError" in log and "Goes on after step" in log
    abouts = [json.loads(file.read_text(encoding="utf-8")) for file in runs.glob("*/seed=*/run.json")]
    assert [about["status"] for about in abouts] == ["complete"] * 4
    assert sum("resumed" in about for about in abouts) == 1
    settings = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in runs.glob("*/seed=*/config.yaml")]
    assert sorted((s["estimator"]["name"], s["seed"]) for s in settings) == [
        (name, seed) for name in ("dr_grpo", "grpo") for seed in (0, 1)
    ]

    for name in ("RUNS", "RESULTS", "FIGURES"):
        monkeypatch.setattr(paths, name, tmp_path / "data" / name.lower())
    found = list_runs("quick")
    finals = final_scores(read_curves(found, "val_reward", "estimator"))
    assert finals.shape == (2, 2) and finals.notna().all(axis=None)
    picture = save_for_writeup(compare_finals(found, "estimator", "A small sweep"), "small_sweep")
    assert picture.read_bytes().startswith(b"\x89PNG")
    [table], [comparisons] = map(writeup_cells, ("table_of_finals(variants", "table_of_comparisons(methods"))
    chapter = {"variants": found, "methods": finals, "ON_POLICY": ["grpo", "dr_grpo"]}
    chapter |= {"table_of_finals": table_of_finals, "table_of_comparisons": table_of_comparisons}
    assert eval(table, chapter)["seeds"].tolist() == [2, 2]
    assert eval(comparisons, chapter).loc[("dr_grpo", "grpo"), "seeds"] == 2


def writeup_cells(begins):
    notebook = nbformat.read(paths.ROOT / "notebooks/09_writeup.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.source.startswith(begins)]


@pytest.fixture
def work_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def test_a_failing_run_is_marked_and_the_others_go_on(tmp_path, work_in, write_notebook, capsys):
    entries = plan(write_notebook(), seed="0-1", fail="True,False")
    assert sweep(entries, on_this_machine(2)) == 1
    outcome = {(e.parameters["seed"], e.parameters["fail"]): e.state for e in entries}
    assert outcome == {(s, fail): "failed" if fail else "complete" for s in (0, 1) for fail in (True, False)}
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "2 failed, 2 complete"
    assert output.count("ValueError: it was told to fail") >= 2
    log = (tmp_path / "runs/notebooks/made_up,seed=0,fail=True.log").read_text(encoding="utf-8")
    assert "it was told to fail" in log and "Traceback" in log
    executed = nbformat.read(tmp_path / "runs/notebooks/made_up,seed=0,fail=False.ipynb", as_version=4)
    assert "seed 0 is done" in executed.cells[-1].outputs[0].text


@contextmanager
def meanwhile(action):
    """In a thread, since a sweep wants the main one for its signals."""
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join()


def test_a_killed_kernel_is_marked_and_the_others_go_on(tmp_path, work_in, write_notebook, capsys):
    def kill():
        wait_until(lambda: (tmp_path / "began-0").exists())
        kernels()[0].kill()

    entries = plan(write_notebook(), seed="0-1", seconds="1.5")
    with meanwhile(kill):
        assert sweep(entries, on_this_machine(1)) == 1
    assert states(entries) == {0: "killed", 1: "complete"}
    assert "killed  made_up seed=0,seconds=1.5  its kernel died" in capsys.readouterr().out


def test_a_killed_worker_takes_running_runs_along_and_no_others(tmp_path, work_in, write_notebook):
    """joblib ends all its workers with it; other workers go on with what had not begun."""

    def kill():
        wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
        kernels()[0].parent().parent().kill()

    entries = plan(write_notebook(), seed="0-2", seconds="1.5")
    with meanwhile(kill):
        assert sweep(entries, on_this_machine(2)) == 1
    assert states(entries) == {0: "killed", 1: "killed", 2: "complete"}


def test_interrupted_it_stops_cleanly_and_says_what_is_left(tmp_path, write_notebook):
    """Also where a shell started it in the background, with SIGINT ignored."""
    process = run_command(
        tmp_path, write_notebook(), "--seeds", "0-3", "-p", "seconds=60", "--jobs", "2", ignore_interrupts=True
    )
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(kernels(process.pid)) == 2
    process.send_signal(signal.SIGINT)
    status, output = finish(process, seconds=60)
    assert status == INTERRUPTED, output
    assert output.splitlines()[-1] == "2 stopped, 2 not started"
    wait_until(lambda: not any(is_alive(p.pid) for p in everyone if "resource_tracker" not in " ".join(_command(p))))
    log = (tmp_path / "data/runs/notebooks/made_up,seconds=60.0,seed=0.log").read_text(encoding="utf-8")
    assert "KeyboardInterrupt" in log


def test_a_killed_sweep_leaves_no_kernel(tmp_path, write_notebook):
    process = run_command(tmp_path, write_notebook(), "--seeds", "0-1", "-p", "seconds=60", "--jobs", "2")
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    left = kernels(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(kernel.pid) for kernel in left))


RECORDED = """# Parameters: of a notebook that says it trained
seed: int = 0
resume: bool = False
"""
RECORDS = [
    """import time
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.workbook.parameters import read_parameters
config = make_config(quick=True, **read_parameters(globals()))
""",
    """with RunRecords(config) as records:
    records.log({"step": 0, "val_reward": 0.5})
    time.sleep(3)
""",
]


def test_two_sweeps_at_once_never_do_the_same_run(tmp_path, with_data, write_notebook):
    notebook = write_notebook(RECORDED, *RECORDS)
    processes = [run_command(tmp_path, notebook, "--seeds", "0-1", "--jobs", "1") for _ in range(2)]
    outputs = "\n".join(finish(process)[1] for process in processes)
    assert "busy elsewhere" in outputs or "meanwhile" in outputs, outputs
    runs = tmp_path / "data/runs/quick/grpo"
    folders = sorted(path.name for path in runs.iterdir() if path.is_dir())
    assert folders == ["seed=0", "seed=1"], outputs  # and none that was moved aside
    for folder in folders:
        assert json.loads((runs / folder / "run.json").read_text(encoding="utf-8"))["status"] == "complete"
    logs = [file.read_text(encoding="utf-8") for file in (tmp_path / "data/runs/notebooks").glob("*.log")]
    assert [log.count("made_up.ipynb {") for log in logs] == [1, 1]


def test_a_run_that_somebody_has_open_is_busy_elsewhere(tmp_path, work_in, write_notebook, monkeypatch, capsys):
    """In a notebook of their own, not in a sweep."""
    monkeypatch.setenv("RLHELPERS_ROOT", str(tmp_path))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "data/runs")
    notebook = write_notebook(RECORDED, *RECORDS)
    with RunRecords(make_config(quick=True, seed=1)):
        [entry] = plan(notebook, seed="1")
        assert entry.found == "busy elsewhere"
        assert sweep([entry], on_this_machine(1)) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 busy elsewhere"


# On Ray.


@pytest.fixture(scope="module")
def ray_cluster():
    """A real one on this machine, which believes that it has four GPUs."""
    ray = pytest.importorskip("ray")
    context = ray.init(num_cpus=3, num_gpus=4, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


GPUS = """import os, pathlib, time
pathlib.Path(f"gpus-{seed}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"), encoding="utf-8")
if fail:
    raise ValueError("it was told to fail")
time.sleep(seconds)
"""


@pytest.mark.parametrize(("gpus", "given", "at_once"), [("2", 2, 2), ("3", 3, 1)])
def test_on_ray_every_run_has_gpus_of_its_own(tmp_path, ray_cluster, write_notebook, gpus, given, at_once):
    notebook = write_notebook(PARAMETERS, GPUS)
    process = run_command(
        tmp_path,
        *(notebook, "--seeds", "0-2", "-p", "seconds=1", "--engine", "ray", "--gpus-per-run", gpus),
        RAY_ADDRESS=ray_cluster,
    )
    status, output = finish(process)
    assert status == 0, output
    assert output.splitlines()[-1] == "3 complete"
    named = [(tmp_path / f"gpus-{seed}").read_text(encoding="utf-8").split(",") for seed in range(3)]
    assert all(len(set(ids)) == given for ids in named)
    if at_once == 2:
        assert not set(named[0]) & set(named[1])


def test_on_ray_a_run_that_fails_is_marked(tmp_path, ray_cluster, write_notebook):
    arguments = (write_notebook(), "--seeds", "0-1", "-p", "fail=True,False", "--engine", "ray")
    status, output = finish(run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster))
    assert status == 1, output
    assert sorted(output.splitlines()[-1].split(", ")) == ["2 complete", "2 failed"]


def test_on_ray_too_few_gpus_is_an_error(tmp_path, ray_cluster, write_notebook):
    arguments = (write_notebook(), "--engine", "ray", "--gpus-per-run", "5")
    status, output = finish(run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster))
    assert status == 2 and "gpus_per_run: got 5; no machine of this cluster has as many GPUs" in output


def test_on_ray_it_stops_cleanly(tmp_path, ray_cluster, write_notebook):
    arguments = (write_notebook(), "--seeds", "0-2", "-p", "seconds=60", "--engine", "ray", "--gpus-per-run", "2")
    process = run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster)
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    process.send_signal(signal.SIGINT)
    status, output = finish(process, seconds=60)
    assert status == INTERRUPTED, output
    assert output.splitlines()[-1] == "2 stopped, 1 not started"
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]


def test_without_ray_it_says_what_to_install(roots, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", str(GRPO), "--engine", "ray"]) == 1
    assert "Ray is not installed here; pip install --editable '.[ray]'" in capsys.readouterr().err


def test_names_of_files_are_short_enough(tmp_path):
    long = grid.name_of(Path("04_grpo.ipynb"), {"model": "/very/long" * 40, "seed": 1})
    assert len(long) <= 200 and long != grid.name_of(Path("04_grpo.ipynb"), {"model": "/very/long" * 40, "seed": 2})
    (tmp_path / f"{long}.ipynb").touch()
    (
        tmp_path / f"{grid.name_of(Path('04_grpo.ipynb'), {'model': 'ü' * 150})}.ipynb"
    ).touch()  # file systems count bytes
