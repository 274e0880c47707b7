"""The benchmarks of step, whole step and rollouts: their checks, refusals and reports; never how fast anything is."""

import copy
import importlib.util
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlhelpers import cli, paths
from rlhelpers.bench import case as cases
from rlhelpers.bench import rollouts, step, textbook, training_tables, whole_step
from rlhelpers.bench.agreement import agreement
from rlhelpers.bench.case import Batch, Case, configuration, difference, refuse_unless_equal
from rlhelpers.bench.memory import PeakMemory, in_own_process
from rlhelpers.bench.rounds import compare_seconds
from rlhelpers.bench.textbook import GenerateEngine, cut, textbook_step
from rlhelpers.kernels import grpo_train_step
from rlhelpers.rollouts import Completion, Rollout, Sampling, TorchEngine
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
    """The small case for everybody, and memory measured in this process."""
    monkeypatch.setattr(Case, "of", classmethod(lambda cls, config: small))
    for module in (step, whole_step):
        monkeypatch.setattr(module, "in_own_process", lambda function, *arguments: function(*arguments))


def run_command(monkeypatch, capsys, module, name, report):
    """What the command prints where that is the report; the file has the same numbers."""
    monkeypatch.setattr(module, f"bench_{name.replace('-', '_')}", lambda: report)
    assert cli.main(["bench", name]) == 0
    assert json.loads((paths.RUNS / "bench" / f"{name}.json").read_text(encoding="utf-8")) == report
    return capsys.readouterr().out


def without_trl(monkeypatch):
    for module in (step, whole_step):
        monkeypatch.setattr(module, "installed", lambda names: [name for name in names if name != "TRL"])


def graded(response, ground_truth):
    return {"reward": float(ground_truth), "format_reward": 1.0}


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_the_textbooks_step_is_the_packages(tiny_gpt2, tokenizer, max_grad_norm):
    rows = [([3, 4, 5], [6, 7]), ([3, 4, 5], [8, 9, 10, 11, 1]), ([6], [7, 8, 9]), ([6], [1])] * 2
    rewards = [1.0, 0.0, 1.0, 1.0, 0.25, 0.0, 1.0, 0.0]
    models = [tiny_gpt2(), tiny_gpt2()]
    before = [p.detach().clone() for p in models[0].parameters()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    textbook_step(models[0], tokenizer, optimizers[0], rows, torch.tensor(rewards), 2, 3, 20.0, max_grad_norm)
    texts = [""] * 8, [""] * 8, [str(reward) for reward in rewards]
    arguments = {"advantage_normalizer": "none", "loss_normalization": "constant", "normalization_constant": 20.0}
    grpo_train_step(
        models[1], tokenizer, optimizers[1], 2, max_grad_norm, graded, *texts, 2, rollout_token_ids=rows, **arguments
    )
    for p, q, old in zip(models[0].parameters(), models[1].parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)
        assert p.grad is None and q.grad is None and (p != old).any()


def test_generate_as_an_engine(trained):
    engine, prompts, tokenizer = (
        GenerateEngine(trained.policy, trained.tokenizer),
        trained.prompts(1),
        trained.tokenizer,
    )
    sampling = Sampling(n=4, max_tokens=24, stop="left", seed=3)
    state = torch.get_rng_state()
    found = engine.generate(prompts, sampling)
    assert torch.equal(torch.get_rng_state(), state) and found == engine.generate(prompts, sampling)
    assert found != engine.generate(prompts, replace(sampling, seed=4))
    assert [r.prompt for r in found] == prompts and all(len(r.completions) == 4 for r in found)
    completions = [c for r in found for c in r.completions]
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert tokenizer.pad_token_id not in c.token_ids and 1 <= len(c.token_ids) <= 24
        ended = c.text.endswith("left") or c.token_ids[-1] == tokenizer.eos_token_id
        assert ended == (c.finish_reason == "stop") and c.text.count("left") <= 1
        assert tokenizer.decode(c.token_ids, skip_special_tokens=True).startswith(c.text)
    fixed = engine.generate(prompts, Sampling(n=2, max_tokens=9, min_tokens=9))
    assert {len(c.token_ids) for r in fixed for c in r.completions} == {9}


def test_cut():
    assert cut("a b </x> c </x>", "</x>") == "a b </x>"
    assert cut("a b", "</x>") == "a b" == cut("a b", None)


def test_agreement_of_an_engine_that_gives_no_log_probs(small):
    sampling = small.sampling(1)
    found = agreement(
        GenerateEngine(small.policy, small.tokenizer).generate(small.prompts(1), sampling),
        sampling,
        small.policy,
        small.tokenizer,
    )
    assert found.mismatch_mean is None is found.mismatch_max and abs(found.bias) < 5


def test_difference_of_updates():
    assert difference(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1 / 5)
    assert difference(torch.zeros(2), torch.zeros(2)) == float("inf")
    refuse_unless_equal(1e-4, "x")
    for broken in (1.01e-4, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step: no speeds, for x's update"):
            refuse_unless_equal(broken, "x")


@pytest.mark.parametrize("name", ["rlhelpers", "textbook", pytest.param("TRL", marks=needs_trl)])
def test_all_take_the_same_step(small, batch, name):
    [work] = step.check(small, batch, [name]).values()
    assert work.difference <= 1e-4 and (work.difference == 0) == (name == "textbook")
    whole = sum(len(prompt) + len(response) for prompt, response in batch.token_ids)
    assert (work.tokens_read < whole / 2) if name == "rlhelpers" else (work.tokens_read > 0.9 * whole)


def test_a_broken_step_is_refused(small, batch, monkeypatch):
    def slower(case, model, batch, meter):
        for group in (optimizer := torch.optim.AdamW(model.parameters())).param_groups:
            group["lr"] = 0.999 * case.config.learning_rate
        monkeypatch.setattr(Case, "optimizer", lambda case, model: optimizer)
        step.textbook(case, model, batch, meter)

    monkeypatch.setitem(step.CONTESTANTS, "slower", slower)
    with pytest.raises(ValueError, match="for slower's update of the weights differs from the textbook's"):
        step.check(small, batch, ["slower"])


def test_the_command_step(measured_here, monkeypatch, capsys):
    without_trl(monkeypatch)
    report = step.bench_step(rounds=2)
    assert report["responses"] == 16 and report["group_size"] == 4 and report["conditions"]["cores"] >= 1
    ours, theirs = report["contestants"]["rlhelpers"], report["contestants"]["textbook"]
    assert ours["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0} and theirs["rounds"] == 2
    assert ours["tokens_read"] < theirs["tokens_read"] and ours["extra_bytes"] >= 0 and ours["difference"] <= 1e-4
    printed = run_command(monkeypatch, capsys, step, "step", report)
    assert "One AdamW step of Dr. GRPO on the same 16 responses in groups of 4" in printed and "tokens read" in printed


@pytest.mark.parametrize("name", ["rlhelpers", "plain loop", pytest.param("TRL", marks=needs_trl)])
def test_what_a_whole_step_did_is_checked(small, name):
    work = whole_step.check(small, name)
    assert work.difference <= 1e-4 and abs(work.bias) <= 5


def test_a_whole_step_that_does_less_or_other_work_is_refused(small, batch, monkeypatch):
    def given(change):
        def contestant(case, model, number, meter):
            step.textbook(case, model, batch, meter)
            return change(batch)

        monkeypatch.setitem(whole_step.CONTESTANTS, "lazy", contestant)
        return whole_step.check(small, "lazy")

    given(lambda batch: batch)
    with pytest.raises(ValueError, match="for lazy trained on 16 responses"):
        given(lambda batch: replace(batch, prompts=batch.prompts[::-1]))
    with pytest.raises(ValueError, match="for lazy trained on 16 responses of 0 to"):
        given(lambda batch: replace(batch, token_ids=[(p, []) for p, _ in batch.token_ids]))
    with pytest.raises(ValueError, match="lazy does not sample from the policy"):
        given(lambda batch: replace(batch, token_ids=[(p, [5] * 12) for p, _ in batch.token_ids]))
    with pytest.raises(ValueError, match="lazy's update"):
        given(lambda batch: replace(batch, responses=["", "123"] * 8))


def test_the_command_whole_step(measured_here, monkeypatch, capsys):
    without_trl(monkeypatch)
    report = whole_step.bench_whole_step(rounds=2)
    assert list(report["contestants"]) == ["rlhelpers", "plain loop"]
    for row in report["contestants"].values():
        assert row["rounds"] == 2 and 1 <= row["response_length"] <= 12 and row["extra_bytes"] >= 0
    assert "each trains on its own samples" in run_command(monkeypatch, capsys, whole_step, "whole-step", report)


def test_the_command_rollouts(measured_here, monkeypatch, capsys):
    report = rollouts.bench_rollouts(rounds=1)
    assert set(report["workloads"]) == set(report["likelihood"]) == {"stop string", "fixed length"}
    fixed = report["workloads"]["fixed length"]["engines"]
    assert fixed["generate"]["tokens"] == fixed["torch"]["tokens"] == [16 * 12]
    assert fixed["generate"]["mismatch_mean"] is None and fixed["torch"]["mismatch_mean"] < 1e-4
    printed = run_command(monkeypatch, capsys, rollouts, "rollouts", report)
    assert "ratio to generate" in printed and "taken within prompts" in printed


def test_the_default_work():
    config = configuration(rollout_batch_size=rollouts.RESPONSES)
    assert config.prompts_per_step == 32 and config.estimator.name == "dr_grpo" and config.device == "cpu"
    assert configuration().prompts_per_step == 16


def test_samples_of_another_temperature_are_less_likely(trained):
    case = replace(trained, config=configuration(**SMALL | {"rollout_batch_size": 64}))
    draw = [
        TorchEngine(case.policy, case.tokenizer).generate(case.prompts(1), replace(case.sampling(1), **changes))
        for changes in ({}, {"seed": 5}, {"temperature": 2.0})
    ]
    assert abs(rollouts.difference_of_likelihood(draw[0], draw[1], case.policy, case.tokenizer)) < 4
    assert rollouts.difference_of_likelihood(draw[0], draw[2], case.policy, case.tokenizer) > 5

    class Hot(TorchEngine):
        def generate(self, prompts, sampling):
            return super().generate(prompts, replace(sampling, temperature=2.0))

    workload = rollouts.workloads(case)[0]
    engines = {n: kind(case.policy, case.tokenizer) for n, kind in (("generate", GenerateEngine), ("torch", Hot))}
    contestants = {name: rollouts.Contestant(engine, 0.0, 1) for name, engine in engines.items()}
    with pytest.raises(ValueError, match="rollouts: no speeds, for the log-probs of the two engines' responses differ"):
        rollouts.check(workload, contestants, case)


def test_ratios_of_seconds():
    found = compare_seconds({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 12.0]})
    assert found["a"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["b"] == {
        "seconds": {"median": 2.0, "low": 2.0, "high": 12.0},
        "ratio": {"median": 2.0, "low": 1.0, "high": 3.0},
        "rounds": 3,
    }


def test_memory_is_what_came_on_top():
    with PeakMemory() as memory:
        block = torch.ones(64, 2**20 // 4)  # 64 MiB
        del block
    assert memory.held > 0 and 60 * 2**20 < memory.extra < 128 * 2**20


def test_in_a_process_of_its_own():
    assert in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_own_process(divmod, 1, 0)


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


def test_installed(monkeypatch):
    assert cases.installed(["rlhelpers"]) == ["rlhelpers"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cases.installed(step.CONTESTANTS) == ["rlhelpers", "textbook"]
    assert cases.installed(whole_step.CONTESTANTS) == ["rlhelpers", "plain loop"]


@needs_trl
def test_trl_keeps_the_randomness_of_the_process(small, batch):
    state = torch.get_rng_state()
    step.trl(small, small.model(), batch, nullcontext())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_texts_have_their_numbers():
    row = {"seconds": {"median": 1.5, "low": 1.0, "high": 2.0}, "ratio": {"median": 4.25, "low": 4.0, "high": 5.0}}
    row |= {"rounds": 5, "extra_bytes": 3 * 2**20, "difference": 1.2e-5, "tokens_read": 25_088}
    row |= {"response_length": 44.25, "bias": -1.0}
    found = {"cpu": "a cpu", "cores": 2, "load": 0.1, "versions": {"trl": "1.0"}, "python": "3", "torch_threads": 2}
    report = {"conditions": found | {"environment": {}, "date": "today"}, "contestants": {"TRL": row}}
    report |= {"responses": 128, "group_size": 8, "response_tokens": 5774, "without_advantage": 48}
    for text in (training_tables.step_text(report), training_tables.whole_step_text(report)):
        assert "1.50 (1.00 to 2.00)" in text and "4.25 (4.00 to 5.00)" in text and "1.2e-05" in text
    assert "25,088" in training_tables.step_text(report) and "44.2" in training_tables.whole_step_text(report)
    assert textbook.__doc__.startswith("Dr. GRPO")
