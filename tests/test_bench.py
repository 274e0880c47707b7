"""The benchmarks' arithmetic, tables and refusals; never how fast anything is."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from rlhelpers import cli, paths
from rlhelpers.bench import ahead, conditions, engines, tables
from rlhelpers.bench.agreement import Agreement, agreement, refuse_unless_done, refuse_unless_same
from rlhelpers.bench.engines import Contestant, Measurement, Workload
from rlhelpers.bench.rounds import Clock, Spread, in_turns
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.training.policy import load_policy

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Question: Ada has 3 plums. How many?\nAnswer:", "Question: what is 2 + 3?\nAnswer:"]
FREE = Sampling(n=16, max_tokens=24)
FOUND = conditions.conditions()


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny", "cpu")


@pytest.fixture(scope="module")
def rollouts(tiny):
    return TorchEngine(*tiny).generate(PROMPTS, FREE)


class Liar(TorchEngine):
    """Claims other log-probs than those of what it samples."""

    def generate(self, prompts, sampling):
        return [shifted(rollout) for rollout in super().generate(prompts, sampling)]


def shifted(rollout, by=0.1):
    completions = [replace(c, log_probs=[p + by for p in c.log_probs]) for c in rollout.completions]
    return replace(rollout, completions=completions)


def test_turns_alternate():
    order = []
    turns = {name: lambda number, name=name: order.append((name, number)) or number for name in "ab"}
    assert in_turns(turns, 2) == {"a": [1, 2], "b": [1, 2]}
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread(1234.5, 1.0, 2000.0).show(1) == "1,234.5 (1.0 to 2,000.0)"
    with pytest.raises(ValueError, match="values: got none"):
        Spread.of([])


def test_the_clock_counts_this_process():
    with Clock() as clock:
        sum(i * i for i in range(100_000))
    assert clock.seconds > 0 and clock.cores >= 0


def test_the_torch_engine_agrees_with_its_policy(tiny, rollouts):
    found = agreement(rollouts, FREE, *tiny)
    assert found.mismatch_mean <= found.mismatch_max < 1e-4 and abs(found.bias) < 4
    refuse_unless_same(found, "torch", torch.float32)
    refuse_unless_done(rollouts, PROMPTS, FREE, "torch")


def test_agreement_by_hand(tiny, rollouts):
    found = agreement([shifted(rollout, 0.25) for rollout in rollouts], FREE, *tiny)
    assert found.mismatch_mean == pytest.approx(0.25, abs=1e-4) == found.mismatch_max
    assert agreement(rollouts, replace(FREE, min_tokens=1), *tiny).bias is None


def test_an_engine_that_misreports_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(engines, "make_engine", lambda config, policy, tokenizer, log: Liar(policy, tokenizer))
    monkeypatch.setattr(engines, "default_work", lambda: [Workload("short", PROMPTS, FREE)])
    with pytest.raises(ValueError, match=r"engines: no speeds, for torch's log-probs differ .* by 0.1 nats"):
        engines.bench_engines(["torch"], rounds=1)


@pytest.mark.parametrize("temperature", [0, 0.6, 1.5])
def test_an_engine_that_draws_other_tokens_is_refused(tiny, temperature):
    """Their log-probs are true: those at temperature 1 of tokens that were drawn at another."""
    policy, tokenizer = tiny
    drawn = TorchEngine(policy, tokenizer).generate(PROMPTS, replace(FREE, temperature=temperature))
    found = agreement(drawn, FREE, policy, tokenizer)
    with pytest.raises(ValueError, match="engines: no speeds, for sly does not sample from the policy"):
        refuse_unless_same(replace(found, mismatch_mean=0.0), "sly", torch.float32)


@pytest.mark.parametrize("broken", [Agreement(math.nan, 0.0, 0.0), Agreement(0.0, 0.0, math.nan)])
def test_no_number_is_refused(broken):
    with pytest.raises(ValueError, match="no speeds"):
        refuse_unless_same(broken, "vllm", torch.float32)


def test_less_work_is_refused(rollouts):
    for given, sampling in [
        (rollouts[:1], FREE),
        (rollouts[::-1], FREE),
        (rollouts, replace(FREE, n=17)),
        (rollouts, replace(FREE, max_tokens=23)),  # some are longer
    ]:
        with pytest.raises(ValueError, match="engines: no speeds, for vllm gave"):
            refuse_unless_done(given, PROMPTS, sampling, "vllm")


def test_the_work_is_the_default_runs(tiny):
    fixed, stop, validation = engines.default_work()
    assert len(fixed.prompts) == 16 and fixed.prompts == stop.prompts and len(validation.prompts) == 512
    assert fixed.sampling == Sampling(n=8, max_tokens=64, min_tokens=64)
    assert stop.sampling == Sampling(n=8, max_tokens=64, stop="</answer>")
    assert validation.sampling == replace(stop.sampling, n=1)


def test_the_report_from_numbers():
    work = [Workload("short", PROMPTS, FREE)]
    measured = {
        "short": {
            "torch": [Measurement(100, 1.0, 1.0, 0.0), Measurement(200, 1.0, 1.0, 0.0), Measurement(90, 0.3, 1.0, 0.0)],
            "vllm": [Measurement(50, 1.0, 1.5, 0.2), Measurement(300, 1.0, 1.7, 0.4), Measurement(30, 0.1, 1.6, 0.3)],
        }
    }
    contestants = {"torch": Contestant(None, 0.01, 2), "vllm": Contestant(None, 20.0, None)}
    agreements = {"short": {"torch": Agreement(1e-7, 1e-6, -0.5), "vllm": Agreement(2e-6, 3e-5, None)}}
    report = engines.report(FOUND, work, contestants, agreements, measured)
    rows = report["workloads"]["short"]["engines"]
    assert rows["torch"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows["vllm"]["tokens_per_second"] == {"median": 300.0, "low": 50.0, "high": 300.0}
    assert rows["vllm"]["ratio"] == {"median": 1.0, "low": 0.5, "high": 1.5}  # the median of the rounds' ratios
    assert rows["vllm"]["tokens"] == [50, 300, 30] and rows["vllm"]["cores"]["median"] == 1.6
    assert report["engines"]["vllm"]["sync_seconds"] == {"median": 0.3, "low": 0.2, "high": 0.4}
    text = tables.engines_text(report)
    assert "300 (50 to 300)" in text and "1.00 (0.50 to 1.50)" in text and "2.0e-06" in text
    assert "of 3 rounds" in text and "short: 2 prompts x 16, at most 24 tokens" in text
    assert "ratio to torch" in text and FOUND["cpu"] in text


def test_what_vllm_says_about_its_threads(tmp_path, monkeypatch):
    log = tmp_path / "vllm.log"
    log.write_text("INFO \tlocal_rank=0, core ids=[0]\nINFO \tlocal_rank=0, core ids=[4, 5, 7]\n", encoding="utf-8")
    assert engines.vllm_threads(log) == 3
    log.write_text("skip_setup=True\n", encoding="utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert engines.vllm_threads(log) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert engines.vllm_threads(log) is None


def test_the_command_measures_the_torch_engine(monkeypatch, roots, capsys):
    sampling = Sampling(n=2, max_tokens=8)
    work = [Workload("short", PROMPTS, sampling), Workload("fixed", PROMPTS, replace(sampling, min_tokens=8))]
    monkeypatch.setattr(engines, "default_work", lambda: work)
    assert cli.main(["bench", "engines", "--engines", "torch"]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and str(paths.RUNS / "bench" / "engines.json") in printed
    report = json.loads((paths.RUNS / "bench" / "engines.json").read_text(encoding="utf-8"))
    assert report["conditions"]["cores"] >= 1 and report["conditions"]["versions"]["torch"]
    assert report["engines"]["torch"]["threads"] == 1
    assert report["workloads"]["fixed"]["engines"]["torch"]["tokens"] == [32] * engines.ROUNDS
    assert report["workloads"]["short"]["engines"]["torch"]["mismatch_max"] < 1e-4


def test_the_runs_of_bench_ahead_differ_in_one_setting():
    in_turn, ahead_of = (ahead.configuration(value, 10).model_dump(mode="json") for value in (False, True))
    assert {name for name in in_turn if in_turn[name] != ahead_of[name]} == {"rollouts_ahead", "variant"}
    assert in_turn["engine"] == "vllm-server" and in_turn["estimator"]["name"] == "offpolicy_clip"


def run(sampling, training):
    steps = pd.DataFrame({"seconds_sampling": sampling, "seconds_training": training, "seconds_syncing": 0.0})
    return ahead.TimedRun(steps.assign(response_length=40.0, mismatch_mean=1e-6), 1)


def test_ahead_from_numbers():
    runs = {
        "in turn": [run([2.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0]), run([3.0, 3.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0])],
        "one step ahead": [
            run([2.0, 0.0, 0.0, 0.0], [4.0, 4.0, 5.0, 4.0]),
            run([3.0, 0.0, 0.0, 0.0], [4.0, 4.0, 4.0, 3.0]),
        ],
    }
    report = ahead.report(FOUND, ahead.configuration(False, 4), runs)
    first, second = report["runs"].values()
    assert first["seconds_per_step"] == {"median": 6.5, "low": 6.0, "high": 7.0}
    assert second["seconds_per_step"] == {"median": 4.0, "low": 4.0, "high": 5.0}  # neither the first step nor the last
    assert second["run_seconds"] == [19.0, 18.0]
    assert second["ratio"]["low"] == pytest.approx(18 / 28) and second["ratio"]["high"] == pytest.approx(19 / 24)
    text = tables.ahead_text(report)
    assert "one step ahead" in text and "16 updates for each batch, 4 steps; runs of each kind, in turns: 2." in text


def test_bench_ahead_runs_the_loop_and_leaves_nothing(monkeypatch, roots):
    """With the torch engine in the server's place, which cannot sample ahead."""
    quick = {"quick": True, "device": "cpu", "n_val_examples": 2, "rollout_batch_size": 16, "train_batch_size": 16}
    config = ahead.make_config(**quick, max_tokens=8, num_rollout_steps=3)
    monkeypatch.setattr(ahead, "configuration", lambda ahead_of, steps: config)
    monkeypatch.setattr(ahead, "vllm_threads", lambda log: 1)
    report = ahead.bench_ahead(rounds=1, steps=3)
    assert report["runs"]["in turn"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert roots[0] == paths.RUNS and not roots[0].exists()


def test_bench_ahead_needs_vllm(monkeypatch, roots, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "ahead"]) == 1
    assert "vLLM is not installed here" in capsys.readouterr().err
