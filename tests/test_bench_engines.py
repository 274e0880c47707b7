"""Benches of rollout engines: whether they do the policy's work, the report, what is refused; never how fast."""

import math
from dataclasses import replace

import pytest
import torch

from rlhelpers import cli, paths
from rlhelpers.bench import engines
from rlhelpers.bench.agreement import agreement, refuse_unless_done, refuse_unless_same
from rlhelpers.bench.case import Case, configuration
from rlhelpers.bench.engines import Measurement, Workload
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report, conditions
from rlhelpers.bench.textbook import GenerateEngine
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.training.config import make_config

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Question: Ada has 3 plums. How many?\nAnswer:", "Question: what is 2 + 3?\nAnswer:"]
FREE = Sampling(n=16, max_tokens=24)


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


def test_the_torch_engine_agrees_with_its_policy(tiny, rollouts):
    found = agreement(rollouts, FREE, *tiny)
    assert found["mismatch_mean"] <= found["mismatch_max"] < 1e-4 and abs(found["bias"]) < 4
    refuse_unless_same(found, "torch", torch.float32)
    refuse_unless_done(rollouts, PROMPTS, FREE, "torch")


def test_agreement_by_hand(tiny, rollouts):
    found = agreement([shifted(rollout, 0.25) for rollout in rollouts], FREE, *tiny)
    assert found["mismatch_mean"] == pytest.approx(0.25, abs=1e-4) == found["mismatch_max"]
    assert agreement(rollouts, replace(FREE, min_tokens=1), *tiny)["bias"] is None


def test_an_engine_that_misreports_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(engines, "make_engine", lambda config, policy, tokenizer, log: Liar(policy, tokenizer))
    monkeypatch.setattr(engines, "workloads", lambda case: [Workload("short", PROMPTS, FREE)])
    with pytest.raises(ValueError, match=r"engines: no speeds, for torch's log-probs differ .* by 0.1 nats"):
        engines.bench_engines(["torch"], rounds=1)


@pytest.mark.parametrize("temperature", [0, 0.6, 1.5])
def test_an_engine_that_draws_other_tokens_is_refused(tiny, temperature):
    """Their log-probs are true: those at temperature 1 of tokens that were drawn at another."""
    policy, tokenizer = tiny
    drawn = TorchEngine(policy, tokenizer).generate(PROMPTS, replace(FREE, temperature=temperature))
    found = agreement(drawn, FREE, policy, tokenizer)
    with pytest.raises(ValueError, match="engines: no speeds, for sly does not sample from the policy"):
        refuse_unless_same(found | {"mismatch_mean": 0.0}, "sly", torch.float32)


@pytest.mark.parametrize("broken", ["mismatch_mean", "bias"])
def test_no_number_is_refused(broken):
    found = {"mismatch_mean": 0.0, "mismatch_max": 0.0, "bias": 0.0} | {broken: math.nan}
    with pytest.raises(ValueError, match="no speeds"):
        refuse_unless_same(found, "vllm", torch.float32)


def test_less_work_is_refused(rollouts):
    for given, sampling in [
        (rollouts[:1], FREE),
        (rollouts[::-1], FREE),
        (rollouts, replace(FREE, n=17)),
        (rollouts, replace(FREE, max_tokens=23)),  # some are longer
    ]:
        with pytest.raises(ValueError, match="engines: no speeds, for vllm gave"):
            refuse_unless_done(given, PROMPTS, sampling, "vllm")


def test_the_work_is_the_default_runs():
    case = Case.of(make_config(experiment="bench", device="cpu"))
    fixed, stop, validation = engines.workloads(case)
    assert len(fixed.prompts) == 16 and fixed.prompts == stop.prompts == case.prompts(1)
    assert len(validation.prompts) == 512
    assert fixed.sampling == Sampling(n=8, max_tokens=64, min_tokens=64)
    assert stop.sampling == Sampling(n=8, max_tokens=64, stop="</answer>")
    assert validation.sampling == replace(stop.sampling, n=1)
    config = configuration(rollout_batch_size=engines.RESPONSES)
    assert config.prompts_per_step == 32 and config.device == "cpu"


def test_the_report_from_numbers():
    work = [Workload("short", PROMPTS, FREE)]
    measured = {
        "short": {
            "torch": [Measurement(100, 1.0, 1.0, 0.0), Measurement(200, 1.0, 1.0, 0.0), Measurement(90, 0.3, 1.0, 0.0)],
            "vllm": [Measurement(50, 1.0, 1.5, 0.2), Measurement(300, 1.0, 1.7, 0.4), Measurement(30, 0.1, 1.6, 0.3)],
        }
    }
    true = {"mismatch_mean": 2e-6, "mismatch_max": 3e-5, "bias": None}
    agreements = {"short": {"torch": true | {"bias": -0.5}, "vllm": true}}
    lives = {"torch": {"threads": 2, "startup_seconds": 0.01}, "vllm": {"threads": None, "startup_seconds": 20.0}}
    report = engines.report("engines", conditions(), work, measured, agreements, lives)
    torch_row, vllm_row, _, vllm_life = report.rows
    assert torch_row["speed_ratio"] == Spread(1.0, 1.0, 1.0) and torch_row["bias"] == -0.5
    assert vllm_row["tokens_per_second"] == Spread(300.0, 50.0, 300.0)
    assert vllm_row["speed_ratio"] == Spread(1.0, 0.5, 1.5)  # the median of the rounds' ratios
    assert vllm_row["tokens"] == [50, 300, 30] and vllm_row["cores"].median == 1.6
    assert vllm_life["sync_seconds"] == Spread(0.3, 0.2, 0.4) and vllm_life["startup_seconds"] == 20.0
    text = str(report)
    assert "300 (50.0 to 300)" in text and "1.00 (0.500 to 1.50)" in text and "2.0e-06" in text and "rounds: 3" in text
    assert "short: prompts 2, n 16, temperature 1.00" in text and "threads: those that compute" in text


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
    monkeypatch.setattr(engines, "workloads", lambda case: work)
    assert cli.main(["bench", "engines", "--engines", "torch"]) == 0
    printed = capsys.readouterr().out
    assert "tokens per second" in printed and str(paths.RUNS / "bench" / "engines.json") in printed
    report = Report.read(paths.RUNS / "bench" / "engines.json")
    short, fixed, life = report.rows
    assert report.conditions["cores"] >= 1 and report.conditions["versions"]["torch"] and life["threads"] == 1
    assert fixed["tokens"] == [32] * engines.ROUNDS and short["mismatch_max"] < 1e-4


SMALL = {"group_size": 4, "rollout_batch_size": 16, "train_batch_size": 16, "max_tokens": 12}
SMALL |= {"n_train_examples": 64, "n_val_examples": 16}


@pytest.fixture(scope="module")
def trained():
    return Case.of(configuration(**SMALL))


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


def test_agreement_of_an_engine_without_log_probs(trained):
    engine, sampling = GenerateEngine(trained.policy, trained.tokenizer), trained.sampling(1)
    found = agreement(engine.generate(trained.prompts(1), sampling), sampling, trained.policy, trained.tokenizer)
    assert found["mismatch_mean"] is None is found["mismatch_max"] and abs(found["bias"]) < 5


def test_bench_rollouts(trained, monkeypatch):
    monkeypatch.setattr(Case, "of", classmethod(lambda cls, config: trained))
    report = engines.bench_rollouts(rounds=1)
    rows = {(row["workload"], row["engine"]): row for row in report.rows}
    assert set(rows) == {(load, engine) for load in ("fixed length", "stop string") for engine in ("generate", "torch")}
    generate, torch_row = rows["fixed length", "generate"], rows["fixed length", "torch"]
    assert generate["tokens"] == torch_row["tokens"] == [16 * 12]
    assert generate["mismatch_mean"] is None and torch_row["mismatch_mean"] < 1e-4


def test_either_engine_of_bench_rollouts_is_checked(trained, monkeypatch):
    class Hot(TorchEngine):
        def generate(self, prompts, sampling):
            return super().generate(prompts, replace(sampling, temperature=2.0))

    more = Case.of(configuration(**SMALL | {"rollout_batch_size": 64}))
    monkeypatch.setattr(Case, "of", classmethod(lambda cls, config: more))
    monkeypatch.setattr(engines, "GenerateEngine", Hot)
    with pytest.raises(ValueError, match="no speeds, for generate"):
        engines.bench_rollouts(rounds=1)
