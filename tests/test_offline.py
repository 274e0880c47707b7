"""What tuning on instructions and on preferences share: settings, records, and runs that go on."""

import json
from pathlib import Path

import pytest
import torch
from killable import write_model

from rlhelpers import paths
from rlhelpers.evidence.runs import list_runs, read_metrics
from rlhelpers.models import load_policy
from rlhelpers.tasks.datasets import PreferencePair, write_pairs
from rlhelpers.training import dpo, sft
from rlhelpers.training.console import Log
from rlhelpers.training.run_folder import run_state

pytestmark = pytest.mark.usefixtures("one_thread", "roots")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Settings of a run of four updates of each method, with a model that takes no time."""
    folder = tmp_path_factory.mktemp("given")
    write_model(folder / "model")
    rows = [{"prompt": f"What is {i}+1?", "response": f" It is {i + 1}."} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_pairs(folder / "pairs.jsonl", [PreferencePair(f"{i}+1?", f"{i + 1}", "No.", "made") for i in range(12)])
    common = {
        "model": str(folder / "model"),
        "device": "cpu",
        "n_val_examples": 2,
        "max_tokens": 4,
        "learning_rate": 0.01,
    }
    common |= {"batch_size": 4, "gradient_accumulation_steps": 2, "eval_every": 2, "checkpoint_every": 2, "epochs": 2}
    rows_file = str(folder / "rows.jsonl")
    return {
        "sft": common | {"train_data": rows_file, "val_data": rows_file, "seq_length": 130},
        "dpo": common | {"pairs": str(folder / "pairs.jsonl"), "n_val_pairs": 4},
    }


TRAIN = {"sft": (sft.make_sft_config, sft.train), "dpo": (dpo.make_dpo_config, dpo.train)}


def run(given, method, **settings):
    make_config, train = TRAIN[method]
    return train(make_config(**given[method] | settings))


def without_times(folder):
    return read_metrics(folder).drop(columns="seconds")


def fail_at(monkeypatch, step):
    """The run's log is full when the metrics of this step come."""
    add = Log.add

    def failing(self, metrics):
        if metrics["step"] == step:
            raise OSError("no space left")
        add(self, metrics)

    monkeypatch.setattr(Log, "add", failing)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_run_that_failed_goes_on_bit_for_bit(given, method, monkeypatch, capsys):
    whole = run(given, method, variant="whole")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        fail_at(patch, 4)
        run(given, method, variant="again")
    folder = paths.RUNS / "08_supplement/again/seed=0"
    assert run_state(folder).status == "failed" and (folder / "checkpoints/step_00002").exists()
    assert run(given, method, variant="again", resume=True) == folder
    assert "Goes on after step 2 of 4, from its checkpoint." in capsys.readouterr().out
    assert run_state(folder).status == "complete"
    assert without_times(folder).equals(without_times(whole)) and len(without_times(whole)) == 5
    for kept in ("policy", "best") if method == "dpo" else ("policy",):
        assert (folder / kept / "model.safetensors").read_bytes() == (whole / kept / "model.safetensors").read_bytes()
    monkeypatch.setattr({"sft": sft, "dpo": dpo}[method], "load_policy", pytest.fail)
    assert run(given, method, variant="again", resume=True) == folder
    assert "again/seed=0 is complete: nothing is trained." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_update_does_not_depend_on_the_microbatches(given, method):
    one, four = (
        load_policy(str(run(given, method, gradient_accumulation_steps=n, max_grad_norm=1e-3) / "policy"), "cpu")[0]
        for n in (1, 4)
    )
    for a, b in zip(one.parameters(), four.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_its_records_are_those_of_a_run(given, method):
    folder = run(given, method, seed=3)
    assert folder.name == "seed=3" and folder.parent.name.startswith(f"{method},model=")
    runs = list_runs("08_supplement")
    assert list(runs["estimator"]) == [method] and list(runs["seed"]) == [3]
    metrics = read_metrics(folder)
    assert list(metrics.index) == [0, 1, 2, 3, 4]
    assert (
        metrics["val_reward"].notna().tolist()
        == metrics["val_loss"].notna().tolist()
        == [True, False, True, False, True]
    )
    assert metrics["loss"].notna().tolist() == [False, True, True, True, True]
    assert {"policy", "config.yaml", "run.json"} <= {file.name for file in folder.iterdir()}


def test_the_fingerprint_is_of_what_files_hold(given, tmp_path):
    settings = given["sft"]
    rows = (tmp_path / "rows.jsonl", tmp_path / "changed" / "rows.jsonl")
    rows[1].parent.mkdir()
    content = Path(settings["train_data"]).read_text(encoding="utf-8")
    rows[0].write_text(content, encoding="utf-8")
    rows[1].write_text(content + "\n", encoding="utf-8")
    here, moved, changed = (
        sft.make_sft_config(**settings | {"train_data": str(path)}).fingerprint
        for path in (settings["train_data"], *rows)
    )
    assert here == moved != changed
    assert sft.make_sft_config(**settings | {"learning_rate": 0.5}).fingerprint != here
    assert sft.make_sft_config(**settings | {"checkpoint_every": 9, "experiment": "x"}).fingerprint == here


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "big"}, "preset: got 'big'; accepted are tiny, course"),
        ({"betta": 0.1}, "betta: there is no such setting; did you mean beta"),
        ({"learning_rate": 2.0}, "learning_rate: got 2.0"),
        (
            {"batch_size": 6, "gradient_accumulation_steps": 4},
            "gradient_accumulation_steps: got 4; it must be a divisor",
        ),
        ({"pairs": None}, "pairs: it is missing; accepted is a file of pairs"),
        ({"n_val_pairs": 12}, "n_val_pairs: got 12; there are 12 pairs, accepted are fewer"),
        (
            {"batch_size": 16},
            "pairs: .* leaves 8 pairs to train on beside 4 held out; accepted are at least batch_size=16",
        ),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_made(given, settings, message):
    with pytest.raises(ValueError, match=message):
        run(given, "dpo", **settings)
    assert not paths.RUNS.exists()
