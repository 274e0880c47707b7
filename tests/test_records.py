"""Run folders: strict JSON, one writer at a time, how the run was made, and what has become of it."""

import json
import threading

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock

from rlhelpers import paths
from rlhelpers.files import strict_json
from rlhelpers.training.config import make_config
from rlhelpers.training.run_folder import RunRecords, RunState, run_state

CONFIG = make_config(quick=True)


@pytest.fixture(autouse=True)
def runs_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def about(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def test_json_is_strict():
    row = {
        "kl": float("nan"),
        "max": float("inf"),
        "loss": torch.tensor(1.5),
        "n": np.int64(3),
        "text": "é数",
        "x": None,
    }
    line = strict_json(row)
    assert json.loads(line, parse_constant=pytest.fail) == row | {"kl": None, "max": None, "loss": 1.5, "n": 3}
    assert "é数" in line


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
    assert (records.folder / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 0}\n'


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
