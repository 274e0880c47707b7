"""Run folders: strict JSON, one writer at a time, how the run was made, and what has become of it."""

import json
import math
import threading
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from killable import write_model
from nbconvert.preprocessors import ExecutePreprocessor
from papermill.cli import papermill as papermill_command

from rlhelpers import files, paths
from rlhelpers.evidence.figures import learning_curves
from rlhelpers.evidence.runs import comparable, list_runs, read_curves, read_jsonl, read_metrics
from rlhelpers.files import write_atomically
from rlhelpers.training import loop, run_folder
from rlhelpers.training.checkpoint import Checkpoint
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords, RunState, run_state

CONFIG = make_config(quick=True)


@pytest.fixture(autouse=True)
def runs_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def about(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def test_a_run_is_running_then_complete():
    with RunRecords(CONFIG) as records:
        assert about(records.folder)["status"] == "running"
        records.log({"step": 0, "val_reward": 0.5})
        records.log({"step": 1, "loss": float("nan")})
        records.write_rollouts(1, "train", [{"response": "’é"}])
        records.remark("something to know")
    facts = about(records.folder)
    assert facts["status"] == "complete" and facts["remarks"] == ["something to know"]
    assert {"started", "finished", "commit", "python", "machine", "versions"} <= set(facts)
    lines = (records.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "val_reward": 0.5}, {"step": 1, "loss": None}]
    settings = yaml.safe_load((records.folder / "config.yaml").read_text(encoding="utf-8"))
    assert settings["estimator"]["name"] == "grpo" and settings["num_rollout_steps"] == 2


def test_an_exception_marks_the_run_failed_and_goes_on_up():
    with pytest.raises(KeyboardInterrupt), RunRecords(CONFIG) as records:
        records.log({"step": 0})
        raise KeyboardInterrupt
    assert about(records.folder)["status"] == "failed"
    assert (records.folder / "metrics.jsonl").read_text(encoding="utf-8") == '{"step":0}\n'


def test_two_writers_never_share_a_folder():
    with RunRecords(CONFIG) as records:
        records.log({"step": 0})
        with pytest.raises(RuntimeError, match="another process is writing this run"), RunRecords(CONFIG):
            pass
    assert about(records.folder)["status"] == "complete"


def test_what_has_become_of_a_run(tmp_path):
    records = RunRecords(CONFIG)
    folder, own = records.folder, CONFIG.fingerprint
    assert run_state(folder) == RunState("absent") and not paths.RUNS.exists()
    with records:
        assert run_state(folder) == RunState("running", own)
        assert about(folder)["fingerprint"] == own
    assert run_state(folder) == RunState("complete", own)
    with pytest.raises(OSError), RunRecords(CONFIG):
        assert run_state(folder) == RunState("running", own)
        raise OSError
    assert run_state(folder) == RunState("failed", own)
    # A process that is killed writes nothing more, and its lock is gone with it.
    for left, found in ((json.dumps({"status": "running", "fingerprint": "f"}), "f"), ("", None), ("[1]", None)):
        (folder / "run.json").write_text(left, encoding="utf-8")
        assert run_state(folder) == RunState("killed", found)
    (folder / "run.json").unlink()
    assert run_state(folder) == RunState("killed")


def test_who_looks_at_a_run_does_not_keep_it_from_beginning():
    with RunRecords(CONFIG) as records:
        pass
    lock = FileLock(records.folder.with_name(".seed=0.lock"), thread_local=False).acquire(timeout=0).lock
    threading.Timer(0.2, lock.release).start()
    with RunRecords(CONFIG):
        pass


def test_earlier_runs_are_kept():
    for number in range(3):
        with RunRecords(CONFIG) as records:
            records.log({"step": number})
    names = sorted(folder.name for folder in records.folder.parent.iterdir() if folder.is_dir())
    assert names == ["seed=0", "seed=0.earlier-1", "seed=0.earlier-2"]


@pytest.mark.field_report("B44")
def test_a_resumed_run_has_every_step_once(tiny_gpt2):
    policy = tiny_gpt2(torch.float32)
    moving = policy, torch.optim.AdamW(policy.parameters())
    config = make_config(quick=True, num_rollout_steps=10, checkpoint_every=5)
    with pytest.raises(RuntimeError, match="crash"), RunRecords(config) as records:
        for step in range(8):
            records.log({"step": step, "reward": 0.1})
            if step == 5:
                carried = {"tally": {}, "restarts": 0, "remarks": []}
                records.keep(Checkpoint.take(step, records.fingerprint, carried, *moving, None))
        raise RuntimeError("crash")
    with RunRecords(config.model_copy(update={"resume": True})) as records:
        for step in range(records.step + 1, 11):
            records.log({"step": step, "reward": 0.2, "new": 1.0})
    metrics = read_metrics(records.folder)
    assert list(metrics.index) == list(range(11))
    assert metrics["reward"].tolist() == [0.1] * 6 + [0.2] * 5
    assert metrics["new"].isna().tolist() == [True] * 6 + [False] * 5
    assert [line.split(",")[0] for line in metrics.to_csv().splitlines()] == ["step", *map(str, range(11))]
    (line,) = learning_curves(metrics, "title").axes[0].lines
    assert (np.diff(line.get_xdata()) > 0).all()
    plt.close("all")


@pytest.mark.field_report("B44")
@pytest.mark.parametrize("steps", [[0, 1, 1], [0, 2, 1], [0, 1, None]])
def test_a_step_that_stands_twice_is_named(tmp_path, steps):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps), encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: step (1|nan)"):
        read_metrics(tmp_path)


@pytest.mark.field_report("B49")
def test_every_line_is_json_for_every_parser():
    """Policy: what is not finite is null."""
    row = {"kl": math.nan, "ratio_max": math.inf, "loss": torch.tensor(1.5), "n": np.int64(3), "text": "é"}
    row |= {"half": torch.tensor(0.5, dtype=torch.bfloat16), "some": [torch.tensor([1.0, math.nan]), -math.inf]}
    with RunRecords(make_config(quick=True)) as records:
        records.log({"step": 0} | row)
        records.write_rollouts(0, "train", [row])
    files = [records.folder / "metrics.jsonl", records.folder / "rollouts" / "step_00000_train.jsonl"]
    lines = [json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail) for file in files]
    wanted = {"kl": None, "ratio_max": None, "loss": 1.5, "n": 3, "text": "é", "half": 0.5, "some": [[1.0, None], None]}
    assert lines == [{"step": 0} | wanted, wanted]
    assert type(lines[0]["n"]) is int


@pytest.mark.field_report("D18")
@pytest.mark.usefixtures("one_thread")
def test_no_timeout_by_default_and_an_interrupt_loses_a_step(tmp_path, monkeypatch):
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


@pytest.mark.field_report("D19")
def test_an_interrupt_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch, roots):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    file = tmp_path / "config.yaml"
    file.write_text("old", encoding="utf-8")
    for moment in ((Path, "write_text"), (files, "to_disk"), (Path, "replace")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*moment, interrupt)
            write_atomically(file, "new")
        assert file.read_text(encoding="utf-8") == "old"
    with RunRecords(make_config()) as run:
        run.log({"step": 0, "reward": 0.5})
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(run_folder, "json_lines", interrupt)
            run.log({"step": 1, "reward": 0.5})
        metrics = run.folder / "metrics.jsonl"
        assert metrics.read_text(encoding="utf-8") == '{"step":0,"reward":0.5}\n'
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


@pytest.mark.field_report("D22")
def test_runs_of_one_name(roots, write_run):
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
    group = comparable(runs, make_config().comparable_settings(), except_for=[])
    assert read_curves(group, "val_reward", "estimator").columns.tolist() == [("grpo", s) for s in range(3)]
