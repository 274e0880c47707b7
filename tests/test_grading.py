"""The reward functions: format, verdicts, and input that must not hang or run anything."""

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhelpers.tasks import question_only_reward_fn, r1_zero_reward_fn
from rlhelpers.tasks.judging import is_equal

REAL_RESPONSES = Path(__file__).parents[2] / "shared/data/olmo2_rollouts/rollouts.jsonl.gz"

EQUAL = [
    ("18", "18"),
    (" 18. ", "18"),
    ("$18", "18"),
    ("18.00", "18"),
    ("1,800", "1800"),
    ("1800", "1,800"),
    ("-3", "-3"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "1/2"),
    ("x = 18", "18"),
    ("18%", "18"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
]
DIFFERENT = [
    ("17", "18"),
    ("18 or 19", "18"),
    ("Tom has 18", "18"),
    ("1,2", "12"),
    ("7,00,00", "70000"),
    ("", "18"),
    ("   ", "18"),
    ("12+", "12"),
    ("nan", "5"),
    ("21", "2"),
    ("-18", "18"),
    ("3=18", "18"),
    ("84 - 63 = 21", "21"),
    ("18\x00", "18"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers(answer, truth):
    assert is_equal(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers(answer, truth):
    assert not is_equal(answer, truth)


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (" 2+2=4 </think> <answer> 4 </answer>", 1, 1),
        ("line\nline\n</think> <answer>4</answer>", 1, 1),
        (" </think> <answer> 5 </answer>", 1, 0),
        (" </think>\n<answer> 4 </answer>", 0, 0),
        (" 4 <answer> 4 </answer>", 0, 0),
        (" </think> <answer> 4", 0, 0),
        ("</answer></think> <answer>4", 0, 0),
        (" </think> <answer> 5 </answer> </think> <answer> 4 </answer>", 1, 1),
        (" </think> <answer> 4 </answer> </think> <answer> 5 </answer>", 1, 0),
        (" </think> <answer> 4 </answer> </think> <answer> 4", 1, 0),
        (" </think> <answer> The answer is 4. </answer>", 1, 0),
        ("", 0, 0),
    ],
)
def test_r1_zero_reward(response, format_reward, reward):
    assert r1_zero_reward_fn(response, "4") == {
        "format_reward": format_reward,
        "answer_reward": reward,
        "reward": reward,
    }


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (r"so \boxed{8}.", 1, 1),
        (r"\boxed{3} so \boxed{8}", 1, 1),
        (r"\boxed{8} hmm \boxed{3}", 1, 0),
        (r"\boxed{8} and \boxed{", 0, 0),
        (r"\boxed{\frac{16}{2}}", 1, 1),
        (r"\boxed{}", 1, 0),
        ("The answer is 8.", 0, 0),
    ],
)
def test_question_only_reward(response, format_reward, reward):
    assert question_only_reward_fn(response, "8") == {
        "format_reward": format_reward,
        "answer_reward": reward,
        "reward": reward,
    }


@pytest.mark.parametrize("truth", ["", "  ", "$", None])
def test_a_ground_truth_without_an_answer_is_an_error_not_a_reward(truth):
    with pytest.raises(ValueError, match="ground_truth"):
        r1_zero_reward_fn("</think> <answer> 5 </answer>", truth)


def test_bombs_end_quickly_and_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hostile = [
        "99999999999!",
        "9**9**9**9",
        "3**40**5",
        "9^{9^{9}}",
        "1" * 5000,
        "(" * 100 + "1" + ")" * 100,
        'open("pwned","w")',
        '__import__("os").mkdir("pwned")',
        r"\frac{1}{0}",
        r"\binom{99999999}{9999999}",
        r"\Gamma(99999999)",
        "(x+1)^{9999}",
        "".join(f"({a}+{b})" for a, b in zip("abcdefghij", "klmnopqrst", strict=True)),
        "(a+1)" * 30,
        "x" * 100_000,
    ]
    started = time.perf_counter()
    assert not any(is_equal(answer, truth) for answer in hostile for truth in ("1/3", "x+1"))
    assert time.perf_counter() - started < 20  # a bomb would take for ever; this allows for a slow machine
    assert not (tmp_path / "pwned").exists()


def test_algebra_works_in_threads():
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(is_equal, [r"\frac{1}{2}", r"\frac{2}{4}", r"\frac{1}{3}"] * 4, ["0.5"] * 12))
    assert verdicts == [True, True, False] * 4


@given(st.text(max_size=60), st.sampled_from(["18", "1/2", r"\sqrt{2}"]))
@settings(max_examples=200, deadline=None)
def test_no_answer_raises(text, truth):
    assert is_equal(text, truth) in (True, False)
    assert r1_zero_reward_fn(f"</think> <answer>{text}</answer>", truth)["reward"] in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9))
def test_a_number_equals_its_own_spellings(number):
    spellings = [str(number), f"{number:,}", f"{number}.0", f" {number} ", f"{number}."]
    assert all(is_equal(spelling, str(number)) for spelling in spellings)
    assert not is_equal(str(number + 1), str(number))


@pytest.mark.skipif(not REAL_RESPONSES.exists(), reason="the responses of OLMo-2-1B are not at hand")
def test_agreement_with_the_course_grader_on_real_responses():
    with gzip.open(REAL_RESPONSES, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    reward_fns = {"question_only": question_only_reward_fn}
    agreed = 0
    for row in rows:
        grade = reward_fns.get(row["prompt"], r1_zero_reward_fn)(row["response"], row["ground_truth"])
        agreed += (grade["format_reward"], grade["answer_reward"]) == (row["format_reward"], row["answer_reward"])
    assert agreed / len(rows) > 0.99
