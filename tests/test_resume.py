"""A run that is killed goes on as if nothing had happened: the same metrics, responses and weights, to the last bit."""

import json
import os
import random
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from copying_engine import CopyingEngine
from killable import finish, start, write_model
from small_runs import FOLDER, SMALL, assert_same, contents, read_about, without_times

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics
from rlhelpers.kernels.estimators import Estimator
from rlhelpers.training import loop
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import train
from rlhelpers.training.run_folder import RunRecords, run_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

ROUNDS = int(os.environ.get("RLHELPERS_KILL_ROUNDS", "1"))  # more of them, for an evening


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return SMALL | {"model": str(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, settings):
    """The run in one piece, and how many seconds it takes."""
    runs = tmp_path_factory.mktemp("whole")
    for _ in range(2):  # the first one waits for the imports of the server
        started = time.monotonic()
        assert not finish(start(runs, settings))
    metrics = read_metrics(runs / FOLDER)
    assert (metrics["grad_norm"][1:] > 0).all() and metrics["clip_fraction"].max() > 0
    assert without_times(runs / FOLDER).equals(without_times((runs / FOLDER).with_name("seed=0.earlier-1")))
    return runs / FOLDER, time.monotonic() - started


@pytest.mark.parametrize(
    ("moment", "at"),
    [
        (("half the weights of a checkpoint", 2), 2),
        (("half the state of a checkpoint", 1), None),
        (("a checkpoint without its name", 6), 2),
        (("half a line of metrics", 5), 2),
        (("half the responses", 6), 2),
        (("logged and no checkpoint", 5), 2),
        (("a checkpoint", 2), 4),
        (("the policy", 1), 5),
        (("half the policy", 1), 5),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_killed_at_the_worst_of_moments(tmp_path, settings, whole, moment, at):
    """`at`: the step of the checkpoint that it goes on from; None where there is none yet."""
    assert finish(start(tmp_path, settings, moment))
    assert run_state(tmp_path / FOLDER).status == "killed"
    assert not finish(start(tmp_path, settings | {"resume": True}))
    assert_same(tmp_path / FOLDER, whole[0])
    assert [entry["step"] for entry in read_about(tmp_path / FOLDER).get("resumed", [])] == ([at] if at else [])
    output = (tmp_path / "output.txt").read_text(encoding="utf-8")
    assert (f"Goes on after step {at} of 5" in output) if at else ("begins anew" in output)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_again_and_again(tmp_path, settings, whole, number):
    """Four times at random moments, each time while it goes on from the time before."""
    kills, lasts = [], whole[1]
    while len(kills) < 4:
        process = start(tmp_path, settings | {"resume": True})
        process.join(random.uniform(0.1, 1.0) * lasts)
        process.kill()
        if not finish(process):
            break
        folder = tmp_path / FOLDER
        kills.append((run_state(folder).status, len(list(folder.glob("checkpoints/step_*")))))
    finish(start(tmp_path, settings | {"resume": True}))
    assert_same(tmp_path / FOLDER, whole[0])
    print(kills, read_about(tmp_path / FOLDER).get("resumed"))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_before_any_change_of_a_file(tmp_path, settings, whole, number):
    """Changes of files and folders are counted; two of the run's, and of those that it makes when it goes on."""
    for _ in range(2):
        if not finish(start(tmp_path, settings | {"resume": True}, ("change", random.randint(1, 90)))):
            break
    finish(start(tmp_path, settings | {"resume": True}))
    assert_same(tmp_path / FOLDER, whole[0])


# In this process: runs that fail, which leave the same files.


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def fail_in(monkeypatch):
    """Makes the next run fail in a step."""

    def fail(settings, step):
        def failing(self, number):
            if number == step:
                raise KeyboardInterrupt
            return original(self, number)

        original = loop.Run.step
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(loop.Run, "step", failing)
            train(make_config(**settings))

    return fail


WHERE = Path("quick", "killed", "seed=0")


@pytest.fixture
def quick(settings):
    return settings | {"num_rollout_steps": 4, "checkpoint_every": 1}


def test_a_failed_run_goes_on_too_and_says_so(runs, fail_in, capsys, quick):
    fail_in(quick, 3)
    assert run_state(runs / WHERE).status == "failed"
    capsys.readouterr()
    folder = train(make_config(**quick | {"resume": True}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Goes on after step 2 of 4, from its checkpoint."
    assert [line.split("/")[0] for line in lines[1:]] == ["step 3", "step 4"]
    about = read_about(folder)
    assert about["status"] == "complete" and "error" not in about and about["started"] <= about["resumed"][0]["time"]
    assert read_metrics(folder).index.tolist() == [0, 1, 2, 3, 4]
    assert folder == runs / WHERE and not list(folder.parent.glob("*.earlier-*"))


def test_what_is_complete_is_not_trained_again(runs, monkeypatch, capsys, quick):
    folder = train(make_config(**quick))
    before = contents(folder / "policy"), (folder / "run.json").read_bytes()
    monkeypatch.setattr(loop, "load_policy", pytest.fail)
    capsys.readouterr()
    # How much of it is kept may be another.
    assert train(make_config(**quick | {"resume": True, "rollouts_every": 3})) == folder
    assert capsys.readouterr().out == f"{WHERE} is complete: nothing is trained.\n"
    assert before == (contents(folder / "policy"), (folder / "run.json").read_bytes())


def test_another_configuration_in_the_same_folder_is_moved_aside(runs, fail_in, capsys, quick):
    fail_in(quick, 3)
    folder = train(make_config(**quick | {"learning_rate": 5e-4, "resume": True}))
    assert (
        "There is no checkpoint to go on from: begins anew; what was here is seed=0.earlier-1."
        in capsys.readouterr().out
    )
    assert "resumed" not in read_about(folder)
    assert run_state(folder.with_name("seed=0.earlier-1")).status == "failed"
    # A complete run of another configuration is no more trusted.
    train(make_config(**quick | {"learning_rate": 6e-4, "resume": True}))
    assert run_state(folder.with_name("seed=0.earlier-2")).status == "complete"


def test_without_resume_a_killed_run_is_moved_aside(runs, fail_in, quick):
    fail_in(quick, 3)
    folder = train(make_config(**quick))
    assert "resumed" not in read_about(folder)
    assert (folder.with_name("seed=0.earlier-1") / "checkpoints/step_00002/state.pt").is_file()


def test_nobody_goes_on_with_a_run_that_is_running(runs, fail_in, quick):
    fail_in(quick, 3)
    with RunRecords(make_config(**quick | {"resume": True})) as records:
        assert run_state(records.folder).status == "running"
        with pytest.raises(RuntimeError, match="another process is writing this run"):
            train(make_config(**quick | {"resume": True}))
        assert list(records.folder.glob("checkpoints/step_00002"))


def test_a_damaged_checkpoint_is_left_for_the_one_before(runs, fail_in, capsys, quick):
    whole = train(make_config(**quick | {"variant": "whole"}))
    fail_in(quick, 4)
    newest = runs / WHERE / "checkpoints/step_00003/policy.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    capsys.readouterr()
    folder = train(make_config(**quick | {"resume": True}))
    said = "The checkpoint step_00003 is not used: policy.safetensors is not what was written"
    assert said in capsys.readouterr().out and read_about(folder)["remarks"] == [said]
    assert [entry["step"] for entry in read_about(folder)["resumed"]] == [2]
    assert_same(folder, whole)


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"stop": 1}', "\udcff"])
@pytest.mark.parametrize(("line", "moved"), [(1, True), (4, False)])  # the newest checkpoint is of step 3
def test_damaged_metrics_are_moved_aside_or_cut_off(runs, fail_in, quick, line, moved, damage):
    fail_in(quick, 4)
    file = runs / WHERE / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    lines[line:] = [damage.encode("utf-8", errors="surrogateescape"), *lines[line + 1 :]]
    file.write_bytes(b"\n".join(lines) + b"\n")
    folder = train(make_config(**quick | {"resume": True}))
    assert read_metrics(folder).index.tolist() == [0, 1, 2, 3, 4]
    assert ("resumed" in read_about(folder)) is not moved
    assert folder.with_name("seed=0.earlier-1").exists() is moved  # with all that was there


def test_another_number_of_threads_is_remarked(runs, fail_in, monkeypatch, quick):
    fail_in(quick, 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    about = read_about(train(make_config(**quick | {"resume": True})))
    assert about["remarks"] == ["Goes on with other threads than before: its numbers may differ for that."]
    assert about["threads"] == 1 and about["resumed"][0]["threads"] == 5


def test_a_policy_of_another_dtype_does_not_go_on(runs, fail_in, monkeypatch, quick):
    """As on a GPU, with a checkpoint from the CPU."""
    fail_in(quick, 3)
    load = loop.load_policy

    def in_bf16(*arguments):
        policy, tokenizer = load(*arguments)
        return policy.to(torch.bfloat16), tokenizer

    monkeypatch.setattr(loop, "load_policy", in_bf16)
    with pytest.raises(ValueError, match=r"resume: in the checkpoint .*float32.*bfloat16.*; a run goes on with"):
        train(make_config(**quick | {"resume": True}))
    monkeypatch.undo()


def test_remarks_stand_once(runs, tmp_path, fail_in, capsys, quick):
    """The one of the beginning, and that of the end when the run fails after it."""
    (tmp_path / "hard").mkdir()
    row = '{"question": "What is the 7th digit of e^e^e?", "answer": "#### 123456789"}\n'
    long = json.dumps({"question": "word " * 2500, "answer": "#### 4"}) + "\n"
    for name in ("train", "validation"):
        (tmp_path / "hard" / f"{name}.jsonl").write_text(row * 3 + long, encoding="utf-8")
    sizes = {"n_train_examples": 4, "n_val_examples": 4}
    settings = quick | sizes | {"estimator": "grpo", "task": str(tmp_path / "hard")}
    fail_in(settings, 3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(loop, "save_policy", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        train(make_config(**settings | {"resume": True}))
    about = read_about(train(make_config(**settings | {"resume": True})))
    assert about["status"] == "complete" and [entry["step"] for entry in about["resumed"]] == [2, 4]
    first, second = about["remarks"]
    assert "2 problems exceed" in first and "mean reward of the last step: 0.000" in second


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_with_weights_of_its_own(runs, fail_in, monkeypatch, ahead, quick):
    """One step ahead, the batch that was sampled before the kill, by weights that are gone, is in the checkpoint."""
    made = []

    def make_engine(config, policy, tokenizer, log):
        made.append(CopyingEngine(policy, tokenizer))
        return made[-1]

    monkeypatch.setattr(loop, "make_engine", make_engine)
    monkeypatch.setattr(loop, "check_engine", lambda *_: None)
    settings = quick | {"engine": "vllm-server", "rollouts_ahead": ahead}
    whole = train(make_config(**settings | {"variant": "whole"}))
    fail_in(settings, 3)
    folder = train(make_config(**settings | {"resume": True}))
    assert_same(folder, whole)
    expected, _, resumed = ([(weights, prompts) for weights, prompts, _ in engine.sampled] for engine in made)
    assert resumed[1:] == expected[1 - len(resumed) :]  # after the check that the weights have arrived


def test_restarts_of_the_engine_are_counted_over_the_whole_run(runs, fail_in, monkeypatch, quick):
    engines = iter([[("generate", 3)], [("generate", n) for n in range(2, 20)]])
    monkeypatch.setattr(
        loop, "make_engine", lambda config, policy, tokenizer, log: CopyingEngine(policy, tokenizer, next(engines))
    )
    monkeypatch.setattr(loop, "check_engine", lambda *_: None)
    settings = quick | {"engine": "vllm-server"}
    fail_in(settings, 3)
    with pytest.raises(RuntimeError, match="it died in generate"):
        train(make_config(**settings | {"resume": True}))
    remarks = read_about(runs / WHERE)["remarks"]
    assert len([text for text in remarks if "The engine died" in text]) == 3


def test_the_tracker_gets_each_step_once(runs, fail_in, monkeypatch, quick):
    begun, steps = [], []
    library = types.ModuleType("wandb")
    library.init = lambda **settings: begun.append(settings)
    library.log = lambda metrics, step: steps.append(step)
    library.finish = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", library)
    settings = quick | {"tracker": "wandb", "checkpoint_every": 2}
    fail_in(settings, 4)
    fail_in(settings | {"resume": True}, 3)  # whose metrics were cut back to step 2
    train(make_config(**settings | {"resume": True}))
    assert steps == [0, 1, 2, 3, 4]
    assert len({settings["id"] for settings in begun}) == 1
    assert [settings.get("resume") for settings in begun] == [None, "allow", "allow"]


def test_an_estimator_of_ones_own_is_known_by_its_source(runs, fail_in, quick):
    def baseline(rewards):
        return -torch.ones_like(rewards)

    own = quick | {"estimator": Estimator("own", baseline=baseline)}
    fail_in(own, 3)
    other = replace(own["estimator"], baseline=lambda rewards: -2 * torch.ones_like(rewards))
    assert "resumed" not in read_about(train(make_config(**own | {"estimator": other, "resume": True})))


def test_the_tiny_model(runs, fail_in):
    """Which earns rewards: GRPO's own advantages, and the estimator of notebook 06 with the old policy."""
    settings = SMALL | {"estimator": "offpolicy_clip", "learning_rate": 1e-3, "max_tokens": 64, "num_rollout_steps": 3}
    whole = train(make_config(**settings | {"variant": "whole"}))
    assert (read_metrics(whole)["grad_norm"][1:] > 0).all()
    fail_in(settings, 3)
    assert_same(train(make_config(**settings | {"resume": True})), whole)
