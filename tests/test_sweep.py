"""Sweeps: many runs at once go on through failures, kills and Ctrl-C, and say what became of each."""

import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
import yaml
from processes import is_alive, wait_until
from small_notebooks import CELL, PARAMETERS, RECORDED, RECORDS, write

from rlhelpers import cli, paths
from rlhelpers.evidence.comparisons import compare_finals
from rlhelpers.evidence.figures import save_for_writeup
from rlhelpers.evidence.runs import list_runs, read_curves, read_metrics
from rlhelpers.evidence.statistics import final_scores
from rlhelpers.evidence.tables import table_of_comparisons, table_of_finals
from rlhelpers.sweep import workers
from rlhelpers.sweep.grid import read_grid
from rlhelpers.sweep.plan import make_plan
from rlhelpers.sweep.run import Run, until_it_starts
from rlhelpers.sweep.workers import INTERRUPTED, Workers, as_table, on_this_machine, sweep
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords, run_state

GRPO = paths.ROOT / "notebooks/04_grpo.ipynb"
pytestmark = pytest.mark.usefixtures("no_quick")


# Without processes: what stands for a run is a function.


@pytest.fixture
def some_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return [Run(tmp_path / "made_up.ipynb", {"seed": seed}) for seed in range(4)]


def test_a_worker_that_dies_takes_no_other_run_along(some_runs, capsys):
    def execute(run, _):
        if run.parameters["seed"] == 1:
            raise OSError("no space left")
        return "complete", ""

    assert sweep(some_runs, Workers(execute, 2, share_cores=False)) == 1
    assert [run.state for run in some_runs] == ["complete", "killed", "complete", "complete"]
    output = capsys.readouterr().out
    assert "killed  made_up seed=1  its worker died: OSError: no space left\n  log: " in output
    assert output.splitlines()[-1] == "3 complete, 1 killed"
    [record] = (paths.RUNS / "sweeps").glob("*/*.json")
    assert json.loads(record.read_text(encoding="utf-8"))["state"] == "killed"


@pytest.mark.parametrize(("number", "most"), [(1, 1), (3, 3), (9, 4)])
def test_no_more_at_once_than_there_are_workers(some_runs, monkeypatch, number, most):
    """They share the cores as threads; one alone has torch's own number of them."""
    working, seen, threads = set(), [], set()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(workers.joblib, "cpu_count", lambda: 12)

    def execute(run, shared):
        working.add(run.name)
        seen.append(len(working))
        threads.add(shared.environment.get("OMP_NUM_THREADS"))
        time.sleep(0.2)
        working.remove(run.name)
        return "complete", ""

    assert sweep(some_runs, Workers(execute, number, share_cores=True)) == 0
    assert max(seen) == most and threads == {None if number == 1 else str(12 // most)}


def test_a_number_of_threads_that_is_set_is_kept(some_runs, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    shares = []
    sweep(some_runs, Workers(lambda _, shared: shares.append(shared.environment) or ("complete", ""), 2, True))
    assert not any("OMP_NUM_THREADS" in environment for environment in shares)


def test_what_is_complete_is_not_run(some_runs):
    some_runs[0].state = "complete"
    executed = []
    assert sweep(some_runs, Workers(lambda run, _: executed.append(run.name) or ("complete", ""), 1, False)) == 0
    assert executed == [run.name for run in some_runs[1:]]


def test_a_second_interrupt_waits_for_nothing(some_runs, capsys):
    def execute(run, shared):
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(shared.stop.exists)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep(some_runs, Workers(execute, 1, share_cores=False))
    assert time.monotonic() - began < 10


def test_a_terminal_shows_a_table_and_what_works_first(some_runs, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of it for rich
    assert sweep(some_runs, Workers(lambda *_: ("complete", ""), 1, share_cores=False)) == 0
    assert "made_up seed=3" in capsys.readouterr().out
    for run, state in zip(some_runs, ("complete", "running", "waiting", "failed"), strict=True):
        run.state = state
    assert [f"{cell}" for cell in as_table(some_runs, 2).columns[1].cells] == ["running", "failed"]
    assert as_table(some_runs, 0).row_count == 1
    assert as_table(some_runs, 9).caption == "1 complete, 1 running, 1 waiting, 1 failed"


@pytest.mark.field_report("D09")
@pytest.mark.parametrize(("failures", "is_started"), [(0, True), (2, True), (3, False)])
def test_a_kernel_that_does_not_start_is_tried_three_times(capsys, failures, is_started):
    """A run that fails after all is marked by the sweep, which goes on with the others and exits with 1."""
    calls = []

    def execute():
        calls.append(1)
        if len(calls) <= failures:
            raise RuntimeError("Kernel died before replying to kernel_info")

    if is_started:
        until_it_starts(execute)
    else:
        with pytest.raises(RuntimeError, match="Kernel died before replying"):
            until_it_starts(execute)
    assert len(calls) == min(failures + 1, 3)
    assert capsys.readouterr().out.count("of 3)") == failures


# Processes.


@pytest.fixture
def notebook(tmp_path):
    return write(tmp_path / "made_up.ipynb", PARAMETERS, CELL)


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


ENDS = """with RunRecords(config) as records:
    for step in range(3):
        records.log({"step": step, "val_reward": float(seed), "seconds": 1.0})
        if seed == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if seed == 3:
        raise ValueError("it was told to fail")
    if seed == 4:
        with open("kernel", "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}")
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    print("seed", seed, "in", os.getpid())
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of five seeds, three at once, of which two end well: the folder, the status, the output.

    The kernel of seed 1 is killed in its second step, seed 3 fails, and of seed 4 the process that has the kernel is
    killed.  The notebook was saved with a kernel that is only on its author's machine.
    """
    folder = tmp_path_factory.mktemp("swept")
    (folder / "data").mkdir()
    (folder / "data/tiny").symlink_to(paths.TINY)
    notebook = write(folder / "in.ipynb", *RECORDED, ENDS, name="py39_new")
    command = [notebook, "--seeds", "0-4", "--jobs", "3"]
    return folder, *finish(run_command(folder, *command, RLHELPERS_QUICK=""))


@pytest.mark.slow
@pytest.mark.field_report("D11")
def test_what_fails_or_is_killed_is_marked_and_left_out(swept, monkeypatch):
    folder, status, output = swept
    assert status == 1 and output.splitlines()[-1] == "2 complete, 2 killed, 1 failed", output
    for line in (
        "killed  in seed=1  its kernel died",
        "killed  in seed=4  by SIGKILL",
        "failed  in seed=3  ValueError: it was told to fail",
    ):
        assert f"{line}\n  log: " in output, output
    runs = folder / "data/runs/quick/grpo"
    states = [run_state(runs / f"seed={seed}").status for seed in range(5)]
    assert states == ["complete", "killed", "complete", "failed", "killed"]
    assert read_metrics(runs / "seed=1").index.tolist() == [0, 1]
    monkeypatch.setattr(paths, "RUNS", folder / "data/runs")
    assert list_runs("quick")["seed"].tolist() == [0, 2]


@pytest.mark.slow
def test_every_run_leaves_a_log_and_a_record(swept):
    folder, _, _ = swept
    logs = [(folder / f"data/runs/notebooks/in,seed={s}.log").read_text(encoding="utf-8") for s in range(5)]
    assert "DeadKernelError" in logs[1] and "it was told to fail" in logs[3] and "Traceback" in logs[3]
    kernel = int((folder / "kernel").read_text(encoding="utf-8"))
    wait_until(lambda: not is_alive(kernel))  # it notices that its process was killed
    records = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("data/runs/sweeps/*/*.json")]
    assert sorted((record["run"], record["state"]) for record in records) == [
        (f"in,seed={s}", state) for s, state in enumerate(["complete", "killed", "complete", "failed", "killed"])
    ]


@pytest.mark.slow
@pytest.mark.field_report("D08")
def test_runs_at_once_are_processes_with_records_of_their_own(swept):
    folder, _, _ = swept
    executed = [nbformat.read(folder / f"data/runs/notebooks/in,seed={s}.ipynb", as_version=4) for s in (0, 2)]
    printed = [notebook.cells[-1].outputs[0].text.split() for notebook in executed]
    assert [words[1] for words in printed] == ["0", "2"] and printed[0][3] != printed[1][3]
    for seed in (0, 2):
        metrics = read_metrics(folder / f"data/runs/quick/grpo/seed={seed}")
        assert metrics["val_reward"].tolist() == [seed] * 3


@pytest.mark.slow
@pytest.mark.field_report("D10")
def test_a_sweep_runs_in_its_own_environment(swept):
    folder, _, _ = swept
    assert sys.executable in (folder / "data/runs/notebooks/in,seed=0.log").read_text(encoding="utf-8")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_interrupted_it_stops_and_says_what_is_left(tmp_path, notebook):
    """Also where a shell started it in the background, with SIGINT ignored."""
    process = run_command(
        tmp_path, notebook, "--seeds", "0-3", "-p", "seconds=60", "--jobs", "2", ignore_interrupts=True
    )
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(kernels(process.pid)) == 2
    process.send_signal(signal.SIGINT)
    status, output = finish(process, seconds=60)
    assert status == INTERRUPTED, output
    assert output.splitlines()[-1] == "2 stopped, 2 not started"
    wait_until(lambda: not any(is_alive(p.pid) for p in everyone))
    log = (tmp_path / "data/runs/notebooks/made_up,seconds=60.0,seed=0.log").read_text(encoding="utf-8")
    assert "KeyboardInterrupt" in log


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_kernel(tmp_path, notebook):
    process = run_command(tmp_path, notebook, "--seeds", "0-1", "-p", "seconds=60", "--jobs", "2")
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    left = kernels(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(kernel.pid) for kernel in left))


@pytest.mark.slow
def test_two_sweeps_at_once_never_do_the_same_run(tmp_path, with_data):
    notebook = write(tmp_path / "made_up.ipynb", *RECORDED, RECORDS)
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


@pytest.mark.slow
def test_a_run_that_somebody_has_open_is_left_to_them(tmp_path, monkeypatch, capsys):
    """In a notebook of their own, not in a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHELPERS_ROOT", str(tmp_path))
    monkeypatch.setattr(paths, "RUNS", tmp_path / "data/runs")
    notebook = write(tmp_path / "made_up.ipynb", *RECORDED, RECORDS)
    with RunRecords(make_config(quick=True, seed=1)):
        runs, _ = make_plan([read_grid(notebook, {"seed": "1"})])
        assert sweep(runs, on_this_machine(1)) == 1
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


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "given", "at_once"), [("2", 2, 2), ("3", 3, 1)])
def test_on_ray_every_run_has_gpus_of_its_own(tmp_path, ray_cluster, gpus, given, at_once):
    notebook = write(tmp_path / "made_up.ipynb", PARAMETERS, GPUS)
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


@pytest.mark.slow
def test_on_ray_a_run_that_fails_is_marked(tmp_path, ray_cluster, notebook):
    arguments = (notebook, "--seeds", "0-1", "-p", "fail=True,False", "--engine", "ray")
    status, output = finish(run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster))
    assert status == 1, output
    assert sorted(output.splitlines()[-1].split(", ")) == ["2 complete", "2 failed"]


@pytest.mark.slow
def test_on_ray_too_few_gpus_is_an_error(tmp_path, ray_cluster, notebook):
    arguments = (notebook, "--engine", "ray", "--gpus-per-run", "5")
    status, output = finish(run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster))
    assert status == 2 and "gpus_per_run: got 5; no machine of this cluster has as many GPUs" in output


@pytest.mark.slow
def test_on_ray_it_stops_cleanly(tmp_path, ray_cluster, notebook):
    arguments = (notebook, "--seeds", "0-2", "-p", "seconds=60", "--engine", "ray", "--gpus-per-run", "2")
    process = run_command(tmp_path, *arguments, RAY_ADDRESS=ray_cluster)
    wait_until(lambda: (tmp_path / "began-0").exists() and (tmp_path / "began-1").exists())
    process.send_signal(signal.SIGINT)
    status, output = finish(process, seconds=60)
    assert status == INTERRUPTED, output
    assert output.splitlines()[-1] == "2 stopped, 1 not started"
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_command(p))]


@pytest.mark.slow
def test_on_ray_what_waits_for_room_stops_too(tmp_path, ray_cluster, notebook):
    import ray

    others = ray.remote(num_cpus=3)(lambda: time.sleep(300)).remote()
    process = run_command(tmp_path, notebook, "--engine", "ray", RAY_ADDRESS=ray_cluster)
    wait_until(lambda: list(tmp_path.glob("data/runs/sweeps/*")))
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    status, output = finish(process, seconds=60)
    ray.cancel(others, force=True)
    assert status == INTERRUPTED and output.splitlines()[-1] == "1 not started", output


def test_without_ray_it_says_what_to_install(roots, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["sweep", str(GRPO), "--engine", "ray"]) == 1
    assert "Ray is not installed here; pip install --editable '.[ray]'" in capsys.readouterr().err
