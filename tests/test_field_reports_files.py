"""What people met with nbval, progress bars, processes and files of runs, one test for each report, under the report's
number; the rest of group D stands in their modules' files."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session
from killable import write_model
from nbconvert.preprocessors import ExecutePreprocessor
from papermill.cli import papermill as papermill_command
from processes import wait_until

from rlhelpers import files as atomic
from rlhelpers import paths
from rlhelpers.evidence.runs import comparable, list_runs, read_curves, read_jsonl, read_metrics
from rlhelpers.rollouts.processes import ServerProcess, output_to
from rlhelpers.training import loop
from rlhelpers.training import run_folder as records
from rlhelpers.training.config import make_config
from rlhelpers.training.console import Progress
from rlhelpers.training.run_folder import RunRecords

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("*.ipynb"))
MARK = "# NBVAL_IGNORE_OUTPUT"


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """What nbval, with our conftest.py, says of a few cells that were saved with other output on standard error."""
    folder = tmp_path_factory.mktemp("nbval")
    shutil.copy(paths.ROOT / "notebooks/conftest.py", folder)
    sources = {
        "bar": "from tqdm import tqdm\nfor i in tqdm(range(3)):\n    pass\nprint('after a bar')",
        "warning": "import warnings\nwarnings.warn('this is new')\nprint('after a warning')",
        "time": "import time\nprint(time.perf_counter())",
        "error": "1 / 0",
    }
    saved = ["after a bar\n", "after a warning\n", "17.5\n", ""]
    cells = [
        nbformat.v4.new_code_cell(
            source, execution_count=n, outputs=[nbformat.v4.new_output("stream", text=text)] if text else []
        )
        for n, (source, text) in enumerate(zip(sources.values(), saved, strict=True), start=1)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "cells.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-rA", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=300)
    found = re.findall(r"^(PASSED|FAILED) \S*::Cell (\d)", result.stdout, re.MULTILINE)
    return {list(sources)[int(number)]: verdict for verdict, number in found}


def test_d12_a_bar_is_not_compared_and_a_time_fails(validated):
    assert (validated["bar"], validated["time"]) == ("PASSED", "FAILED")
    for file in NOTEBOOKS:  # in ours, where each printed line is compared
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code" and re.search(r"tqdm|perf_counter|monotonic|time\(\)|\.now\(", cell.source):
                assert MARK in cell.source, f"{file.name}: {cell.source}"


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_d13_no_picture_and_no_address_is_compared(file):
    for cell in nbformat.read(file, as_version=4).cells:
        shown = json.dumps(cell.get("outputs", []))
        if re.search(r"image/|<Figure size|<Axes|at 0x[0-9a-f]+|widget-view", shown):
            assert MARK in cell.source, cell.source


def test_d14_a_new_warning_is_not_compared_and_an_error_fails(validated):
    assert (validated["warning"], validated["error"]) == ("PASSED", "FAILED")
    assert not any("stderr" in json.dumps(cell.get("outputs", [])) for cell in nbformat.read(NOTEBOOKS[0], 4).cells)


def test_d15_a_thousand_steps_are_a_thousand_short_lines(monkeypatch):
    """So that an executed notebook stays below a megabyte; each line is there when its step is."""
    written = io.StringIO()
    flushed = []
    monkeypatch.setattr(written, "flush", lambda: flushed.append(written.getvalue().count("\n")), raising=False)
    monkeypatch.setattr(sys, "stdout", written)
    with Progress(1000) as progress:
        for step in range(1, 1001):
            progress.show({"step": step, "reward": 0.5, "format_reward": 0.5, "response_length": 30.0, "seconds": 1.0})
    text = written.getvalue()
    assert flushed == list(range(1, 1001)) and "\r" not in text and len(text) < 200_000


@pytest.fixture(params=["StringIO", "OutStream"])
def stream_without_a_file(request, monkeypatch):
    """Standard output and error of a notebook, with no descriptor behind them."""
    if request.param == "StringIO":
        stream = io.StringIO()
    else:
        thread = IOPubThread(zmq.Context.instance().socket(zmq.PUB))
        request.addfinalizer(thread.close)
        stream = OutStream(Session(), thread, "stdout", watchfd=False)
        request.addfinalizer(stream.close)
    with pytest.raises(io.UnsupportedOperation):
        stream.fileno()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)


def test_d16_a_server_is_started_from_a_notebook(stream_without_a_file, tmp_path):
    server = ServerProcess([sys.executable, "-c", "print('it fails'); raise SystemExit(4)"], {}, tmp_path / "a.log")
    wait_until(lambda: server.exit_status is not None)
    server.stop()
    assert server.exit_status == 4 and server.tail() == "it fails"
    with output_to(tmp_path / "b.log"):
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("from here")
    assert (tmp_path / "b.log").read_text(encoding="utf-8") == "from a child\nfrom here\n"


READS = """
import json, sys, warnings
from pathlib import Path
warnings.filterwarnings("error", category=EncodingWarning, module="rlhelpers")
assert not sys.flags.utf8_mode and sys.getfilesystemencoding() is not None
from rlhelpers import paths
from rlhelpers import files as atomic
from rlhelpers.sweep.grid import read
from rlhelpers.evidence.runs import read_metrics, read_rollouts
from rlhelpers.tasks import get_prompt, load_task
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords
from rlhelpers.training.run_folder import run_state
from rlhelpers.sweep import plan as configurations
paths.RUNS = Path("runs")
[problem] = load_task("task", 1, 1).train
assert problem.question == "Janet’s café: 数?", ascii(problem.question)
assert problem.question in get_prompt("r1_zero_three_shot")(problem.question)
with RunRecords(make_config(variant="e")) as records:
    records.log({"step": 0, "note": None})
    records.write_rollouts(0, "train", [{"response": "’é数"}])
assert run_state(records.folder).status == "complete" and len(read_metrics(records.folder)) == 1
assert read_rollouts(records.folder, 0, "train").response.tolist() == ["’é数"]
assert configurations.fingerprint_of_settings(records.folder)
[grid] = read(Path("04.ipynb"), {"seed": "1"})
assert configurations.configuration(grid.notebook, {"seed": 1, "variant": "é"}).variant == "é"
print("all read")
"""


def test_d17_the_platforms_encoding_is_never_used(tmp_path):
    """ruff looks for open() and its like; the run finds text=True of subprocess too."""
    row = json.dumps({"question": "Janet’s café: 数?", "answer": "#### 3"}, ensure_ascii=False) + "\n"
    (tmp_path / "task").mkdir()
    for name in ("train", "validation"):
        (tmp_path / f"task/{name}.jsonl").write_text(row, encoding="utf-8")
    notebook = nbformat.read(paths.ROOT / "notebooks/04_grpo.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell("’é数"))
    nbformat.write(notebook, tmp_path / "04.ipynb")
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    (tmp_path / "reads.py").write_text(READS, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "reads.py"], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert result.stdout == "all read\n", result.stderr[-2000:]
    settings = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "PLW1514" in settings["tool"]["ruff"]["lint"]["select"]


@pytest.mark.usefixtures("one_thread")
def test_d18_no_timeout_by_default_and_an_interrupt_loses_a_step(tmp_path, monkeypatch):
    """papermill and nbconvert wait for ever, nbval 2000 s for a cell; autograding takes the time that README names."""
    typed = papermill_command.make_context("papermill", ["in.ipynb", "out.ipynb"]).params
    assert typed["execution_timeout"] is None
    assert ExecutePreprocessor().timeout is None
    assert "--nbval notebooks" in (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    write_model(tmp_path)
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    sizes = {"rollout_batch_size": 16, "train_batch_size": 16, "n_train_examples": 8, "n_val_examples": 2}
    settings = {"quick": True, "device": "cpu", "model": str(tmp_path), "max_tokens": 8, "num_rollout_steps": 3} | sizes
    original = loop.Run.step

    def interrupted(self, step):
        if step == 3:
            raise KeyboardInterrupt
        return original(self, step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Run, "step", interrupted)
        loop.train(make_config(**settings))
    [file] = (tmp_path / "runs").glob("*/*/seed=0/metrics.jsonl")
    assert [row["step"] for row in read_jsonl(file)] == [0, 1, 2] and file.read_bytes().endswith(b"}\n")
    folder = loop.train(make_config(**settings, resume=True))
    assert folder == file.parent and read_metrics(folder).index.tolist() == [0, 1, 2, 3]
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert [again["step"] for again in about["resumed"]] == [2]


def test_d19_an_interrupt_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, roots):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    file = tmp_path / "config.yaml"
    file.write_text("old", encoding="utf-8")
    for moment in ((Path, "write_text"), (atomic, "to_disk"), (Path, "replace")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*moment, interrupt)
            atomic.write_atomically(file, "new")
        assert file.read_text(encoding="utf-8") == "old"
    with RunRecords(make_config()) as run:
        run.log({"step": 0, "reward": 0.5})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(records, "json_lines", interrupt)
            run.log({"step": 1, "reward": 0.5})
        metrics = run.folder / "metrics.jsonl"
        assert metrics.read_text(encoding="utf-8") == '{"step": 0, "reward": 0.5}\n'
    with open(metrics, "a", encoding="utf-8") as torn:
        torn.write('{"step": 1, "rew')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 2: it was cut off, and is left out"):
        assert read_metrics(run.folder)["reward"].tolist() == [0.5]
    within_a_letter = tmp_path / "rows.jsonl"
    within_a_letter.write_bytes('{"text": "é"}\n{"text": "é'.encode()[:-1])
    with pytest.warns(UserWarning, match=r"rows\.jsonl, line 2: it was cut off, and is left out"):
        assert read_jsonl(within_a_letter) == [{"text": "é"}]
    with (
        pytest.warns(UserWarning, match="seed=0 is left out: .*its last line is cut off"),
        pytest.raises(FileNotFoundError),
    ):
        list_runs("04_grpo")  # what says that it is complete is not believed
    with open(metrics, "a", encoding="utf-8") as torn:
        torn.write('\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(run.folder)


def test_d22_runs_of_one_name(roots, write_run):
    """The second of two at once is refused, a later one moves the first aside; settings, not names, make a group."""
    config = make_config(variant="mine")
    with RunRecords(config) as first:
        first.log({"step": 0})
        with pytest.raises(RuntimeError, match="another process is writing this run"), RunRecords(config):
            pass
    with RunRecords(config) as second:
        pass
    assert second.folder == first.folder
    assert (first.folder.with_name("seed=0.earlier-1") / "metrics.jsonl").is_file()

    own, _ = roots
    for seed, name in enumerate(["a", "b", "c"]):
        write_run(own, seed=seed, experiment="one", variant=name)
    write_run(own, seed=0, experiment="one", variant="another_rate", learning_rate=1e-4)
    runs = list_runs("one")
    with pytest.raises(ValueError, match="two runs have estimator='grpo' and seed 0"):
        read_curves(runs, "val_reward", "estimator")
    group = comparable(runs, make_config().model_dump(mode="json"), except_for=[])
    assert read_curves(group, "val_reward", "estimator").columns.tolist() == [("grpo", s) for s in range(3)]
