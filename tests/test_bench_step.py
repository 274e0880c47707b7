"""Benches of the step and of the whole step: their checks, refusals and reports; never how fast anything is."""

import copy
import importlib.util
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlhelpers import cli, paths
from rlhelpers.bench import step
from rlhelpers.bench.case import (
    Batch,
    Case,
    Rows,
    configuration,
    difference,
    make_up_rows,
    package_step,
    refuse_unless_equal,
)
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report
from rlhelpers.bench.textbook import cut, textbook_step
from rlhelpers.kernels.tokens import padding_id
from rlhelpers.rollouts import Completion, Rollout
from rlhelpers.tasks import Grader

pytestmark = pytest.mark.usefixtures("one_thread")

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
SMALL = {"group_size": 4, "rollout_batch_size": 16, "train_batch_size": 16, "max_tokens": 12}
SMALL |= {"n_train_examples": 64, "n_val_examples": 16}


class ByLetters(Grader):
    """Rewards that differ, which the right answers of so few tokens do not."""

    def grade(self, response, ground_truth):
        return replace(super().grade(response, ground_truth), answer=float(sum(map(ord, response)) % 2))


@pytest.fixture(scope="module")
def trained():
    return Case.of(configuration(**SMALL))


@pytest.fixture(scope="module")
def small(trained):
    """With random weights, which say anything: so rewards differ, and gradients are large."""
    config = copy.deepcopy(trained.policy.config)
    config.num_hidden_layers, config.initializer_range = 2, 0.1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = type(trained.policy)(config).eval()
    return replace(trained, policy=policy, grader=ByLetters(trained.grader.prompt, trained.grader.verify))


@pytest.fixture(scope="module")
def batch(small):
    return step.sample_batch(small)


@pytest.fixture
def measured_here(monkeypatch, small, roots):
    """The small case for everybody, without TRL, and memory measured in this process."""
    monkeypatch.setattr(Case, "of", classmethod(lambda cls, config: small))
    monkeypatch.setattr(step, "installed", lambda: ["rlhelpers", "textbook"])
    monkeypatch.setattr(step, "in_own_process", lambda function, *arguments: function(*arguments))


@pytest.mark.parametrize("max_grad_norm", [None, 1e9, 1e-3])
def test_the_textbooks_step_is_the_packages(tiny_gpt2, tokenizer, max_grad_norm):
    ids = [([3, 4, 5], [6, 7]), ([3, 4, 5], [8, 9, 10, 11, 1]), ([6], [7, 8, 9]), ([6], [1])] * 2
    rows = Rows(ids, [1.0, 0.0, 1.0, 1.0, 0.25, 0.0, 1.0, 0.0], 2, 20.0)
    models = [tiny_gpt2(), tiny_gpt2()]
    before = [p.detach().clone() for p in models[0].parameters()]
    results = [
        take(model, padding_id(tokenizer), torch.optim.SGD(model.parameters(), lr=1.0), rows, size, max_grad_norm)
        for model, take, size in zip(models, (textbook_step, package_step), (3, 4), strict=True)
    ]
    assert results[0][0].item() == pytest.approx(results[1][0].item())
    assert results[0][1]["grad_norm"] == pytest.approx(results[1][1]["grad_norm"])
    for p, q, old in zip(models[0].parameters(), models[1].parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
        assert p.grad is None and q.grad is None and (p != old).any()


def test_cut():
    assert cut("a b </x> c </x>", "</x>") == "a b </x>"
    assert cut("a b", "</x>") == "a b" == cut("a b", None)


def test_difference_of_updates():
    updates = [torch.tensor([3.0]), torch.tensor([4.1])], [torch.tensor([3.0]), torch.tensor([4.0])]
    assert difference(*updates) == pytest.approx(0.1 / 5, rel=1e-5)
    assert difference([torch.zeros(2)], [torch.zeros(2)]) == float("inf")
    refuse_unless_equal(1e-4, "x")
    for broken in (1.01e-4, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step: no speeds, for x's update"):
            refuse_unless_equal(broken, "x")


NAMES = ["rlhelpers", "textbook", pytest.param("TRL", marks=needs_trl)]


@pytest.mark.parametrize("name", NAMES)
def test_all_take_the_same_step(small, batch, name):
    work = step.check(small, name, batch)
    assert work["difference"] <= 1e-4 and (work["difference"] == 0) == (name == "textbook")
    whole = sum(len(prompt) + len(response) for prompt, response in batch.token_ids)
    assert (work["tokens_read"] < whole / 2) if name == "rlhelpers" else (work["tokens_read"] > 0.9 * whole)


def test_a_broken_step_is_refused(small, batch, monkeypatch):
    right = Case.optimizer

    def slower(case, model, number, meter, given):
        with monkeypatch.context() as patched:
            patched.setattr(Case, "optimizer", almost_right)
            return step.textbook(case, model, number, meter, given)

    def almost_right(case, model):
        optimizer = right(case, model)
        optimizer.param_groups[0]["lr"] *= 0.999
        return optimizer

    monkeypatch.setitem(step.CONTESTANTS, "slower", slower)
    with pytest.raises(ValueError, match="for slower's update of the weights differs from the textbook's"):
        step.check(small, "slower", batch)


def printed(capsys, name):
    """What the command prints; the file has the same numbers."""
    assert cli.main(["bench", name]) == 0
    report = Report.read(paths.RUNS / "bench" / f"{name}.json")
    text = capsys.readouterr().out
    assert text.startswith(str(report))
    return text, {row["step"]: row for row in report.rows}, report.settings


@pytest.mark.slow
def test_the_command_step(measured_here, capsys):
    text, rows, settings = printed(capsys, "step")
    assert settings["responses"] == 16 and settings["group_size"] == 4 and settings["rounds"] == step.ROUNDS
    ours, theirs = rows["rlhelpers"], rows["textbook"]
    assert ours["time_ratio"] == Spread(1.0, 1.0, 1.0) and ours["extra_MiB"] >= 0
    assert ours["tokens_read"] < theirs["tokens_read"] and ours["difference"] <= 1e-4
    assert "on the same responses" in text and "tokens read: those that go" in text


@pytest.mark.parametrize("name", NAMES)
def test_what_a_whole_step_did_is_checked(small, name):
    work = step.check(small, name)
    assert work["difference"] <= 1e-4 and abs(work["bias"]) <= 5


def test_a_whole_step_that_does_other_work_is_refused(small, batch, monkeypatch):
    def given(change):
        def contestant(case, model, number, meter, given):
            step.textbook(case, model, number, meter, batch)
            return change(batch)

        monkeypatch.setitem(step.CONTESTANTS, "lazy", contestant)
        return step.check(small, "lazy")

    given(lambda batch: batch)
    with pytest.raises(ValueError, match="for lazy trained on 16 responses"):
        given(lambda batch: replace(batch, prompts=batch.prompts[::-1]))
    with pytest.raises(ValueError, match="for lazy trained on 16 responses of 0 to"):
        given(lambda batch: replace(batch, token_ids=[(p, []) for p, _ in batch.token_ids]))
    with pytest.raises(ValueError, match="lazy does not sample from the policy"):
        given(lambda batch: replace(batch, token_ids=[(p, [5] * 12) for p, _ in batch.token_ids]))
    with pytest.raises(ValueError, match="lazy's update"):
        given(lambda batch: replace(batch, responses=["", "123"] * 8))


@pytest.mark.slow
def test_the_command_whole_step(measured_here, capsys):
    text, rows, settings = printed(capsys, "whole-step")
    assert list(rows) == ["rlhelpers", "textbook"] and settings["rounds"] == step.ROUNDS
    for row in rows.values():
        assert 1 <= row["response_length"] <= 12 and row["extra_MiB"] >= 0 and abs(row["bias"]) <= 5
    assert "each on its own samples" in text


def test_the_default_case():
    config = configuration()
    assert config.prompts_per_step == 16 and config.estimator.name == "dr_grpo" and config.device == "cpu"
    row = config.estimator.step_arguments()  # what package_step does
    assert (row["baseline"], row["advantage_normalizer"], row["loss_normalization"]) == ("mean", "none", "constant")


def test_a_batch_is_flat(small):
    problems = small.problems(1)[:2]
    made = [
        Rollout(p.question, [i], [Completion(f"{i}{j}", [i, j], "stop", []) for j in range(2)])
        for i, p in enumerate(problems)
    ]
    found = Batch.of(problems, made)
    assert found.responses == ["00", "01", "10", "11"] and found.response_tokens == 8
    assert found.token_ids == [([0], [0, 0]), ([0], [0, 1]), ([1], [1, 0]), ([1], [1, 1])]
    assert found.ground_truths == [p.answer for p in problems for _ in range(2)]


def test_made_up_rows():
    rows = make_up_rows(50, 3, 2, (4, 6), (1, 3), without_signal=1)
    assert rows == make_up_rows(50, 3, 2, (4, 6), (1, 3), without_signal=1)
    assert rows.rewards == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert [rows.has_signal(i) for i in range(6)] == [True] * 4 + [False] * 2
    assert all(4 <= len(p) <= 6 and 1 <= len(r) <= 3 for p, r in rows.token_ids)
    assert rows.token_ids[0][0] is rows.token_ids[1][0] and rows.token_ids[1][0] != rows.token_ids[2][0]


def test_trl_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert step.installed() == ["rlhelpers", "textbook"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert step.installed() == ["rlhelpers", "textbook", "TRL"]


@needs_trl
def test_trl_keeps_the_randomness_of_the_process(small, batch):
    state = torch.get_rng_state()
    step.trl(small, small.model(), 1, nullcontext(), batch)
    assert torch.equal(torch.get_rng_state(), state)
