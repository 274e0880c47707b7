"""The loop on the tiny model: what is written, that it repeats, that it is off-policy when told, that it learns."""

import json
import sys
import types

import pandas as pd
import pytest
import torch
from copying_engine import CopyingEngine, fingerprint

from rlhelpers import paths
from rlhelpers.evidence.runs import read_metrics, read_rollouts
from rlhelpers.kernels.estimators import ESTIMATORS, Estimator
from rlhelpers.tasks.grading import REASONS, Grader
from rlhelpers.training import loop, updates
from rlhelpers.training.config import make_config
from rlhelpers.training.loop import derive_seed, draw_batch, train
from rlhelpers.training.sampler import NotInSyncError

SMALL = {
    "quick": True,
    "device": "cpu",
    "n_val_examples": 4,
    "rollout_batch_size": 16,
    "train_batch_size": 16,
    "max_tokens": 24,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def runs_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", tmp_path / "runs")


def without_times(metrics):
    return metrics.drop(columns=[name for name in metrics if "seconds" in name])


def test_a_run_leaves_its_records():
    folder = train(make_config(**SMALL, seed=2))
    assert folder.parent.parent == paths.RUNS / "quick" and folder.name == "seed=2"
    metrics = read_metrics(folder)
    assert metrics.index.tolist() == [0, 1, 2]
    expected = {
        "loss",
        "grad_norm",
        "token_entropy",
        "reward",
        "format_reward",
        "clip_fraction",
        "response_length",
        "pass_at_k",
        "signal_fraction",
        "predicted_signal_fraction",
        "pruned_rows",
        "val_reward",
        "val_format_reward",
        "seconds",
    }
    assert expected <= set(metrics.columns)
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "complete" and about["versions"]["torch"] == torch.__version__
    assert len(read_rollouts(folder, 0, "validation")) == 4
    rows = read_rollouts(folder, 2, "train")
    assert len(rows) == 16
    assert rows["reward"].mean() == pytest.approx(metrics["reward"][2])
    assert (folder / "policy/model.safetensors").is_file()


WITH_ANSWERS = SMALL | {"max_tokens": 64}  # with 24 tokens no response comes to an answer
WITH_FORMAT = list(REASONS)[: list(REASONS).index("empty response")]


def counted(metrics, prefix=""):
    """A row for each step that counted reasons, a column for each reason."""
    counts = metrics.filter(regex=f"^{prefix}reason/").dropna(how="all").fillna(0)
    return counts.rename(columns=lambda name: name.removeprefix(f"{prefix}reason/"))


def test_every_step_counts_why_its_responses_were_graded_so():
    folder = train(make_config(**WITH_ANSWERS))
    metrics = read_metrics(folder)
    for prefix, split, steps, responses in (("", "train", [1, 2], 16), ("val_", "validation", [0, 1, 2], 4)):
        counts = counted(metrics, prefix)
        assert counts.sum(axis=1).to_dict() == dict.fromkeys(steps, responses)
        assert counts.columns.isin(REASONS).all() and len(counts.columns) > 2
        rows = read_rollouts(folder, 2, split)
        assert counts.loc[2][lambda n: n > 0].to_dict() == rows["reason"].value_counts().to_dict()
        assert metrics[f"{prefix}boxes_disagree"][2] == (~rows["boxes_agree"]).sum()
        # The reasons explain the rewards: who is right is paid, and the format is a matter of the first of them.
        right = counts.reindex(columns=["right"], fill_value=0)["right"] / responses
        assert right.tolist() == metrics[f"{prefix}reward"].dropna().tolist()
        well_formed = counts.reindex(columns=WITH_FORMAT, fill_value=0).sum(axis=1) / responses
        assert well_formed.tolist() == metrics[f"{prefix}format_reward"].dropna().tolist()


def test_with_a_readers_own_step_the_reasons_are_still_the_graders(tmp_path, monkeypatch):
    """This one pays for the format, whatever the reward function says."""
    source = """
from rlhelpers.kernels import grpo_train_step as step_of_the_package


def grpo_train_step(*arguments, **settings):
    def pays_for_format(response, ground_truth):
        grade = reward_fn(response, ground_truth)
        return grade | {"reward": grade["format_reward"]}

    reward_fn = arguments[5]
    return step_of_the_package(*arguments[:5], pays_for_format, *arguments[6:], **settings)
"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_components.py").write_text(source, encoding="utf-8")
    folder = train(make_config(**WITH_ANSWERS, components="mine"))
    metrics = read_metrics(folder)
    assert counted(metrics).sum(axis=1).to_dict() == {1: 16, 2: 16}
    rows = read_rollouts(folder, 1, "train")
    assert metrics["reward"][1] == metrics["format_reward"][1] == rows["reward"].mean() > 0
    assert rows["reward"].eq(rows["reason"].isin(WITH_FORMAT)).all()
    assert (rows["reason"] == "right").mean() < rows["reward"].mean()


def test_the_tracker_gets_the_counts(monkeypatch):
    logged = []
    library = types.ModuleType("trackio")
    library.init = library.finish = lambda **_: None
    library.log = lambda metrics, step: logged.append(metrics)
    monkeypatch.setitem(sys.modules, "trackio", library)
    train(make_config(**SMALL, tracker="trackio"))
    for prefix, responses, steps in (("", 16, logged[1:]), ("val_", 4, logged)):
        for metrics in steps:
            counts = [n for name, n in metrics.items() if name.startswith(f"{prefix}reason/")]
            assert sum(counts) == responses and min(counts) > 0
            assert metrics[f"{prefix}boxes_disagree"] == 0


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path, monkeypatch):
    first = read_metrics(train(make_config(**SMALL, seed=1)))
    again = read_metrics(train(make_config(**SMALL, seed=1)))
    other = read_metrics(train(make_config(**SMALL, seed=3)))
    assert without_times(first).equals(without_times(again))
    assert not without_times(first).equals(without_times(other))


def test_a_second_run_of_the_same_name_moves_the_first_aside():
    folder = train(make_config(**SMALL))
    kept = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    train(make_config(**SMALL))
    earlier = folder.with_name("seed=0.earlier-1")
    assert (earlier / "metrics.jsonl").read_text(encoding="utf-8") == kept


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_every_row_of_the_table_trains_off_policy(estimator):
    """Four updates per rollout batch, with a learning rate that moves the policy between them."""
    settings = SMALL | {"train_batch_size": 8, "rollout_batch_size": 32, "num_rollout_steps": 1, "max_tokens": 64}
    folder = train(make_config(**settings, estimator=estimator, learning_rate=1e-3))
    metrics = read_metrics(folder)
    assert metrics["grad_norm"][1] > 0
    assert metrics["skipped_update"][1] == 0
    trained = loop.load_policy(str(folder / "policy"), "cpu")[0]
    base = loop.load_policy("tiny", "cpu")[0]
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))


def test_old_log_probs_are_those_of_the_policy_that_sampled(monkeypatch):
    """In the first update of a rollout batch every ratio is 1, in later ones it is not."""
    ratios = []

    def spy(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        ratios.append((policy_log_probs - old_log_probs)[mask].detach().abs().max().item())
        return -advantages * (policy_log_probs - old_log_probs).exp(), torch.zeros_like(mask)

    settings = SMALL | {"train_batch_size": 8, "gradient_accumulation_steps": 1, "num_rollout_steps": 1}
    # Without a baseline a rewarded row is never pruned, and with every row rewarded each update sees its rows.
    row = Estimator("spy", baseline=lambda r: -torch.ones_like(r), importance_reweighting_method=spy)
    train(make_config(**settings, estimator=row, learning_rate=1e-3))
    assert len(ratios) == 2
    assert ratios[0] < 1e-5 < 1e-3 < ratios[1]


def test_gradient_checkpointing_changes_memory_and_not_the_run():
    settings = WITH_ANSWERS | {"num_rollout_steps": 1, "eval_every": 1}
    with_it, without = (
        without_times(read_metrics(train(make_config(**settings, gradient_checkpointing=wanted))))
        for wanted in (True, False)
    )
    assert with_it["grad_norm"][1] > 0
    pd.testing.assert_frame_equal(with_it, without, rtol=1e-3, check_exact=False)


def test_a_reader_s_own_row_trains():
    row = Estimator("leave_one_out", baseline=lambda r: (r.sum(1, keepdim=True) - r) / (r.shape[1] - 1))
    assert read_metrics(train(make_config(**SMALL, estimator=row))).index[-1] == 2


def test_a_model_that_earns_nothing_says_so(capsys, tmp_path):
    (tmp_path / "hard").mkdir()
    for name in ("train", "validation"):
        rows = '{"question": "What is the 7th digit of e^e^e?", "answer": "#### 123456789"}\n' * 4
        (tmp_path / "hard" / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    folder = train(make_config(**SMALL | {"n_train_examples": 4}, task=str(tmp_path / "hard")))
    assert "In no group did the rewards differ (mean reward of the last step: 0.000)" in capsys.readouterr().out
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "complete" and "no weight changed" in about["remarks"][0]
    trained, base = (loop.load_policy(m, "cpu")[0] for m in (str(folder / "policy"), "tiny"))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))


def test_problems_that_do_not_fit_the_context_are_left_out_and_counted(capsys, tmp_path):
    (tmp_path / "long").mkdir()
    short = '{"question": "What is 2+2?", "answer": "#### 4"}\n'
    long = json.dumps({"question": "word " * 2500, "answer": "#### 4"}) + "\n"
    for name in ("train", "validation"):
        (tmp_path / "long" / f"{name}.jsonl").write_text(short * 3 + long, encoding="utf-8")
    settings = SMALL | {"n_train_examples": 4}
    folder = train(make_config(**settings, task=str(tmp_path / "long")))
    assert "2 problems exceed the model's context" in capsys.readouterr().out
    assert len(read_rollouts(folder, 0, "validation")) == 3


def test_a_failed_run_keeps_its_steps_and_says_so(monkeypatch):
    def step(self, step):
        if step == 2:
            raise RuntimeError("the engine died")
        return original(self, step)

    original = loop.Run.step
    monkeypatch.setattr(loop.Run, "step", step)
    config = make_config(**SMALL)
    with pytest.raises(RuntimeError, match="the engine died"):
        train(config)
    folder = paths.RUNS / config.experiment / config.variant / "seed=0"
    assert read_metrics(folder).index.tolist() == [0, 1]
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["status"] == "failed" and "the engine died" in about["error"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere"}, "model: got '/nowhere'"),
        ({"task": "nothing"}, "task: got 'nothing'"),
        ({"n_val_examples": 9999}, "n_val_examples: got 9999"),
        ({"device": "cuda:7"}, "device: got 'cuda:7'"),
    ],
)
def test_what_cannot_start_leaves_no_folder(settings, message):
    if "device" in settings and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ValueError, match=message):
        train(make_config(**SMALL | settings))
    assert not paths.RUNS.exists()


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_without_vllm_nothing_is_loaded_or_made(engine, monkeypatch):
    """A configuration may be of a run on another machine; the first thing that a run does is to look for its engine."""
    monkeypatch.setattr("importlib.util.find_spec", lambda module, package=None: None)
    for name in ("load_task", "load_policy", "RunRecords.__enter__"):
        monkeypatch.setattr(f"rlhelpers.training.loop.{name}", lambda *_: pytest.fail("it was not told before"))
    with pytest.raises(ValueError, match=f"engine: got '{engine}', but vLLM is not installed here"):
        train(make_config(**SMALL, engine=engine))
    assert not paths.RUNS.exists()


def test_batches_of_problems_go_through_every_problem_once_an_epoch():
    problems = list(range(10))
    drawn = [p for batch in range(10) for p in draw_batch(problems, batch, 3, seed=0)]
    epochs = [drawn[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == problems for epoch in epochs) and epochs[0] != epochs[1]
    assert drawn != [p for batch in range(10) for p in draw_batch(problems, batch, 3, seed=1)]


def test_every_use_of_randomness_has_its_own_seed():
    seeds = {derive_seed(s, purpose, n) for s in range(5) for purpose in ("train", "validation") for n in range(5)}
    assert len(seeds) == 50


@pytest.mark.slow
def test_the_optimizer_learns_the_task_it_is_given():
    """Eight half-size steps of the default settings raise the reward on the training batches far above chance."""
    half = {"rollout_batch_size": 64, "train_batch_size": 64, "gradient_accumulation_steps": 2}
    metrics = read_metrics(train(make_config(device="cpu", num_rollout_steps=8, n_val_examples=1, **half)))
    assert metrics["reward"][7:].mean() > metrics["reward"][1:2].mean() + 0.15


# Engines with weights of their own, as those in other processes have.

# Every row counts, so that every update moves the policy; two of three steps have a batch to sample ahead.
PUSH = Estimator("push", baseline=lambda rewards: -torch.ones_like(rewards))
MOVING = SMALL | {"estimator": PUSH, "learning_rate": 1e-3, "num_rollout_steps": 3}
AHEAD = {"engine": "vllm-server", "rollouts_ahead": True}


@pytest.fixture
def engines(monkeypatch):
    """Makes runs sample with a CopyingEngine of such settings; gives the list of those that runs have made."""

    def use(**settings):
        made = []

        def make_engine(config, policy, tokenizer, log):
            made.append(CopyingEngine(policy, tokenizer, **settings))
            return made[-1]

        monkeypatch.setattr(loop, "make_engine", make_engine)
        monkeypatch.setattr(loop, "check_engine", lambda *_: None)
        return made

    return use


def batches(engine, n):
    """The weights and the prompts of what was sampled n times a prompt: 8 for a rollout batch, 1 to validate."""
    return [(weights, prompts) for weights, prompts, sampling in engine.sampled if sampling.n == n]


def read_about(folder):
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def test_every_step_says_how_far_apart_engine_and_trainer_are():
    metrics = read_metrics(train(make_config(**SMALL)))
    assert (metrics["mismatch_mean"][1:] <= metrics["mismatch_p99"][1:]).all()
    assert (metrics["mismatch_p99"][1:] <= metrics["mismatch_max"][1:]).all()
    assert (metrics["mismatch_max"][1:] < 1e-4).all() and (metrics["mismatch_outside"][1:] == 0).all()
    assert {"seconds_sampling", "seconds_training"} <= set(metrics.columns)


def test_a_mismatch_is_seen(engines):
    engines(shift=5e-4)
    metrics = read_metrics(train(make_config(**SMALL)))
    assert metrics["mismatch_mean"][1:].tolist() == pytest.approx([5e-4, 5e-4], abs=2e-5)


def test_a_run_whose_engine_dies_goes_on_as_if_nothing_had_happened(engines):
    """Once over a rollout batch, once over new weights, once at rest."""
    undisturbed = read_metrics(train(make_config(**MOVING)))
    engines(deaths=[("generate", 3), ("sync_weights", 4), ("sleep", 3)])
    folder = train(make_config(**MOVING))
    assert without_times(read_metrics(folder)).equals(without_times(undisturbed))
    about = read_about(folder)
    assert about["status"] == "complete"
    deaths = ["generate", "sync_weights", "sleep"]
    assert about["remarks"] == [f"The engine died and was started again: it died in {name}" for name in deaths]


def test_a_run_whose_engine_keeps_old_weights_fails(engines):
    engines(keeps_weights=True)
    config = make_config(**MOVING | {"learning_rate": 1e-2})
    with pytest.raises(NotInSyncError, match="weights not in sync"):
        train(config)
    folder = paths.RUNS / config.experiment / config.variant / "seed=0"
    about = read_about(folder)
    assert about["status"] == "failed" and "weights not in sync" in about["error"]
    assert read_metrics(folder).index.tolist() == [0]


def test_an_engine_that_cannot_be_kept_alive_fails_the_run_and_is_closed(engines):
    made = engines(deaths=[("generate", number) for number in range(4, 50)])
    config = make_config(**MOVING)
    with pytest.raises(RuntimeError, match="it died in generate"):
        train(config)
    about = read_about(paths.RUNS / config.experiment / config.variant / "seed=0")
    assert about["status"] == "failed" and len(about["remarks"]) == 3
    assert made[0].calls[-1] == "close"


def test_each_batch_is_sampled_with_the_weights_of_the_last_update_and_then_the_engine_rests(engines):
    made = engines()
    train(make_config(**MOVING))
    [engine] = made
    validated = [weights for weights, _ in batches(engine, 1)]
    assert len(set(validated)) == 4
    assert [weights for weights, _ in batches(engine, 8)] == validated[:3]
    # A check and a validation; then, each step, the batch, rest, new weights, their check, and a validation.
    step = ["generate", "sleep", "sync_weights", "generate", "generate"]
    assert engine.calls == ["sync_weights", "generate", "generate", *step * 3, "close"]


def test_rollouts_ahead_are_of_the_weights_before_the_last_update(engines):
    """The same problems as without, in the same order; validation is of the weights as they are."""
    made = engines()
    train(make_config(**MOVING))
    folder = train(make_config(**MOVING, **AHEAD))
    usual, ahead = made
    validated = [weights for weights, _ in batches(ahead, 1)]
    assert len(set(validated)) == 4
    assert validated[-1] == fingerprint(loop.load_policy(str(folder / "policy"), "cpu")[0])
    assert [weights for weights, _ in batches(ahead, 8)] == [validated[0], validated[0], validated[1]]
    for n in (1, 8):
        assert [prompts for _, prompts in batches(ahead, n)] == [prompts for _, prompts in batches(usual, n)]
    assert "sleep" not in ahead.calls
    metrics = read_metrics(folder)
    assert metrics.index.tolist() == [0, 1, 2, 3]
    # The first batch was sampled by the policy that learns from it, the second was not.
    assert metrics["mismatch_max"][1] < 1e-4 < 1e-3 < metrics["mismatch_max"][2]


def test_rollouts_ahead_are_reweighted_from_what_sampled_them(engines):
    """In the first step every ratio is 1; in the second the policy has moved on since its batch was sampled."""
    ratios = []

    def spy(advantages, policy_log_probs, old_log_probs, cliprange, mask):
        ratios.append((policy_log_probs - old_log_probs)[mask].detach().abs().max().item())
        return -advantages * (policy_log_probs - old_log_probs).exp(), torch.zeros_like(mask)

    engines()
    row = Estimator("spy", baseline=lambda r: -torch.ones_like(r), importance_reweighting_method=spy)
    settings = MOVING | AHEAD | {"estimator": row, "gradient_accumulation_steps": 1, "num_rollout_steps": 2}
    train(make_config(**settings))
    assert len(ratios) == 2 and ratios[0] < 1e-4 < 1e-3 < ratios[1]


def test_a_death_over_a_batch_ahead(engines):
    """It is sampled again, by the policy as it is by then."""
    made = engines(deaths=[("generate", 4)])
    folder = train(make_config(**MOVING, **AHEAD))
    about = read_about(folder)
    assert about["status"] == "complete" and len(about["remarks"]) == 1
    validated = [weights for weights, _ in batches(made[0], 1)]
    assert [weights for weights, _ in batches(made[0], 8)] == [validated[0], validated[1], validated[1]]


def test_weights_against_the_engine_reach_the_step(engines, monkeypatch):
    given = []

    def spy(policy, optimizer, batch, row, **settings):
        given.append(batch.token_weights)
        return step(policy, optimizer, batch, row, **settings)

    step = updates.policy_gradient_step
    monkeypatch.setattr(updates, "policy_gradient_step", spy)
    engines(shift=5e-4)
    train(make_config(**MOVING | {"estimator": Estimator("capped", engine_ratio_cap=2.0)}))
    assert len(given) == 3
    for weights in given:
        sampled = weights[weights != 1]
        assert len(sampled) > 16
        torch.testing.assert_close(sampled, torch.full_like(sampled, -5e-4).exp(), atol=5e-5, rtol=0)
    given.clear()
    train(make_config(**MOVING))
    assert given == [None] * 3


# --- each response once, and a penalty towards the first policy ------------------------------------------------------


def test_each_response_is_graded_once(monkeypatch):
    graded, original = [], Grader.grade

    def spy(self, response, ground_truth):
        graded.append(response)
        return original(self, response, ground_truth)

    monkeypatch.setattr(Grader, "grade", spy)
    train(make_config(**SMALL))
    assert len(graded) == 3 * 4 + 2 * 16  # validation at steps 0 to 2, and two rollout batches


@pytest.mark.slow
def test_a_kl_penalty_is_measured_from_the_first_policy(monkeypatch):
    """It is 0 in the first update, and then grows.  A strong penalty holds the policy back."""
    distances = {}
    for coefficient in (1e-6, 10.0):
        row = Estimator("penalised", kl_coefficient=coefficient, prunes=False)
        settings = WITH_ANSWERS | {"estimator": row, "learning_rate": 1e-3, "num_rollout_steps": 4}
        metrics = read_metrics(train(make_config(**settings)))
        assert metrics["kl_to_reference"][1] == pytest.approx(0, abs=1e-6)
        assert (metrics["pruned_rows"][1:] == 0).all()
        distances[coefficient] = metrics["kl_to_reference"][4]
    assert distances[1e-6] > 1e-3 and distances[10.0] < distances[1e-6]
