"""The benchmarks' arithmetic, tables and refusals; never how fast anything is."""

import importlib
import json
import math
import pkgutil
from dataclasses import replace

import pandas as pd
import pytest
import torch

from rlhelpers import cli, paths, tasks
from rlhelpers.bench import ahead, conditions, engines, grader, tables
from rlhelpers.bench.agreement import Agreement, agreement, refuse_unless_done, refuse_unless_same
from rlhelpers.bench.engines import Contestant, Measurement, Workload
from rlhelpers.bench.rounds import Clock, Spread, in_turns
from rlhelpers.models import load_policy
from rlhelpers.rollouts import Sampling, TorchEngine
from rlhelpers.tasks import grade

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
    assert cli.main(["bench", "ahead"]) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("response", "prompt", "verdict"),
    [
        ("3+2 </think> <answer> 5 </answer>", "r1_zero", (1, 1)),
        ("3+2 </think> <answer> 6 </answer>", "r1_zero", (1, 0)),
        ("</think> <answer> She has 5. </answer>", "r1_zero_three_shot", (1, 1)),  # ours pays no sentence
        ("3+2 = 5 </think> <answer></answer>", "r1_zero", (1, 0)),  # it sees what the box holds, and no more
        ("</think> <answer> 5 </answer> <answer>", "r1_zero", (1, 0)),
        ("</think>\n<answer> 5 </answer>", "r1_zero", (0, 0)),
        (r"\boxed{5}", "r1_zero", (0, 0)),
        (r"So \boxed{\dfrac{10}2}", "question_only", (1, 1)),  # read as LaTeX
        ("It is 5.", "question_only", (0, 0)),
    ],
)
def test_math_verify_judges_what_the_box_holds(response, prompt, verdict):
    assert grader.math_verify_verdict(response, "5", prompt) == verdict


def test_our_verdict_is_the_grade():
    assert grader.our_verdict("</think> <answer> 5 </answer>", "5", "r1_zero") == (1, 1)
    assert grader.our_verdict("</think> <answer> She has 5. </answer>", "5", "r1_zero") == (1, 0)


def test_every_cache_of_the_grader_is_emptied():
    """Else a later round would time a memory.  What is left is the process that computes, which is no memory."""
    modules = [
        importlib.import_module(f"{tasks.__name__}.{found.name}") for found in pkgutil.iter_modules(tasks.__path__)
    ]
    cached = {value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")}
    assert {value.__name__ for value in cached - set(grader.CACHES)} == {"_process_of"}
    assert set(grader.CACHES) <= cached


def test_invented_responses_are_of_several_kinds():
    table = grader.invented_responses(40)
    assert table.equals(grader.invented_responses(40))
    groups = grader.split(table)
    assert {group.name for group in groups} == {f"invented, {name}" for name in tasks.prompts.PROMPTS}
    assert all(len(group.rows) == 40 and not any(group.rewards) for group in groups)
    reasons = {grade(*row).reason for group in groups for row in group.rows}
    assert {"right", "wrong value", "sentence in the box", "no </think>", r"no \boxed"} <= reasons


GRADES = [grade(f"</think> <answer>{box}</answer>", "5") for box in ("5", "6", "It is 5.")] + [grade("", "5")]


def test_agreement_of_verdicts_by_hand():
    assert grader.agreement(GRADES, [(1, 1), (1, 0), (1, 1), (0, 0)]) == {
        "responses": 4,
        "differences": 1,
        "share": 0.75,
        "format_differences": 0,
        "answer_differences": 1,
        "reasons": {"sentence in the box": 1},
    }
    other = grader.agreement(GRADES, [(0, 0), (1, 0), None, (1, 0)])
    assert other["responses"] == 3 and other["differences"] == 2 and other["share"] == pytest.approx(1 / 3)
    assert other["format_differences"] == 2 and other["answer_differences"] == 1
    assert other["reasons"] == {"right": 1, "empty response": 1}


def test_the_grader_report_from_numbers():
    names = ("a, r1_zero", "b, r1_zero")
    grades = dict.fromkeys(names, GRADES)
    theirs = [(1, 1), (1, 0), (1, 1), (0, 0)]
    verdicts = {
        grader.OURS: {name: [(g.format, g.answer) for g in GRADES] for name in names},
        grader.MATH_VERIFY: {names[0]: theirs, names[1]: theirs},
        grader.IN_THE_FILE: {names[0]: theirs, names[1]: [None] * 4},
    }
    measured = {
        names[0]: {grader.OURS: [10.0, 30.0, 20.0], grader.MATH_VERIFY: [1000.0, 900.0, 3000.0]},
        names[1]: {grader.OURS: [5.0, 6.0, 7.0], grader.MATH_VERIFY: [60.0, 60.0, 60.0]},
    }
    report = grader.report(FOUND, "mine.jsonl", grades, verdicts, measured)
    assert report["responses"] == 8 and report["rounds"] == 3
    assert report["median_group"] == names[0]  # of two the slower
    row = report["groups"][names[0]]["graders"][grader.MATH_VERIFY]
    assert row["ms_per_1000"] == {"median": 1000.0, "low": 900.0, "high": 3000.0}
    assert row["ratio"] == {"median": 100.0, "low": 30.0, "high": 150.0}  # round by round
    assert report["groups"][names[0]]["graders"][grader.OURS]["ratio"]["high"] == 1.0
    assert report["groups"][names[1]]["agreement"][grader.IN_THE_FILE]["share"] is None
    assert report["agreement"][grader.MATH_VERIFY]["differences"] == 2
    assert report["agreement"][grader.IN_THE_FILE]["responses"] == 4
    text = tables.grader_text(report)
    for part in (
        "8 responses (mine.jsonl)",
        "In the median group, a, r1_zero, ms per 1,000 responses: rlhelpers 20, math-verify 1,000",
        "100.0 (30.0 to 150.0)",
        "75.00%",
        "of 3 rounds in turns",
        "Where math-verify differs, rlhelpers says: sentence in the box 2",
    ):
        assert part in text


def test_the_median_group():
    groups = {name: {"graders": grader.times({grader.OURS: [ms]})} for name, ms in (("x", 3.0), ("y", 1.0), ("z", 2.0))}
    assert grader.median_group(groups) == "z"


@pytest.mark.parametrize("value", [0.5, "1", [1], math.nan])
def test_a_reward_in_the_file_that_is_none_is_refused(value):
    table = grader.invented_responses(1)
    table.at[1, "answer_reward"] = value
    with pytest.raises(ValueError, match=r"answer_reward: got .* in response 2; accepted is 0 or 1"):
        grader.split(table)


COURSE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Rewards:
    value: float

def r1_zero_reward_fn(response, ground_truth):
    return {"format_reward": 1.0, "answer_reward": Rewards(float(ground_truth in response)).value}

def question_only_reward_fn(response, ground_truth):
    return {"format_reward": 0.0, "answer_reward": 0.0}
"""


@pytest.fixture
def course(tmp_path):
    file = tmp_path / "their_grader.py"
    file.write_text(COURSE, encoding="utf-8")
    return file


def test_the_courses_functions_are_called_by_prompt(course):
    verdict = grader.load_course(course)
    assert verdict("5", "5", "r1_zero") == verdict("5", "5", "r1_zero_three_shot") == (1, 1)
    assert verdict("5", "5", "question_only") == (0, 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.txt", COURSE, r"it does not end in \.py"),
        ("x.py", "def", "SyntaxError"),
        ("x.py", "import no_such_module", "no_such_module"),
        ("x.py", "raise SystemExit(3)", "SystemExit"),
        ("x.py", "r1_zero_reward_fn = print", "question_only_reward_fn"),
    ],
)
def test_a_course_file_that_is_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"course: got .*{name}'; .*{message}.*; accepted is a python file with"):
        grader.load_course(tmp_path / name)


def test_another_grader_that_fails_is_named():
    def raises(response, ground_truth, prompt):
        raise TypeError("no string")

    for broken, message in ((raises, "TypeError"), (lambda *_: (1.0, 0.5), ".*it gave"), (lambda *_: 1, "TypeError")):
        with pytest.raises(ValueError, match=rf"course: {message}.* for 'text' against '5'; accepted are the rewards"):
            grader.give_verdicts("course", broken, [("text", "5", "r1_zero")])


def test_bench_grader_measures_a_file(tmp_path, course, roots, capsys):
    row = {"prompt": "r1_zero", "question": "2+3?", "ground_truth": "5", "response": "</think> <answer>5</answer>"}
    rows = [
        row | {"format_reward": 1.0, "answer_reward": 1},
        row | {"response": "</think> <answer> It is 5. </answer>", "format_reward": 1, "answer_reward": 1},
        row | {"prompt": "question_only", "run": 3},
        row | {"prompt": "question_only", "run": None},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(["bench", "grader", str(file), "--course", str(course)]) == 0
    printed = capsys.readouterr().out
    assert "4 responses (mine.jsonl)" in printed and str(paths.RUNS / "bench" / "grader.json") in printed
    report = json.loads((paths.RUNS / "bench" / "grader.json").read_text(encoding="utf-8"))
    assert set(report["groups"]) == {"3, question_only", "mine, question_only", "mine, r1_zero"}
    assert set(report["groups"]["mine, r1_zero"]["graders"]) == {"rlhelpers", "math-verify", "course"}
    found = {name: (row["responses"], row["differences"]) for name, row in report["agreement"].items()}
    assert found == {"math-verify": (4, 1), "course": (4, 1), "in the file": (2, 1)}
    assert report["rounds"] == grader.ROUNDS and report["conditions"]["versions"]["math-verify"]


def test_bench_grader_without_a_file(monkeypatch, roots, capsys):
    few = grader.invented_responses(3)
    monkeypatch.setattr(grader, "invented_responses", lambda: few)
    assert cli.main(["bench", "grader"]) == 0
    assert "9 responses (invented)" in capsys.readouterr().out
    report = json.loads((paths.RUNS / "bench" / "grader.json").read_text(encoding="utf-8"))
    assert "in the file" not in report["agreement"]


def test_bench_grader_says_what_is_wrong(tmp_path, roots, capsys):
    assert cli.main(["bench", "grader", str(tmp_path / "no.jsonl")]) == 2
    assert "responses: got" in capsys.readouterr().err
    assert cli.main(["bench", "grader", "--course", str(tmp_path / "no.py")]) == 2
    assert "no.py'; there is no such file; accepted is a python file with r1_zero_reward_fn" in capsys.readouterr().err
