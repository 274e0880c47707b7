r"""What people met with other graders, one test for each report, under the report's number.

Where a report leaves a question to policy, its test pins ours.  There is one mode only: no fast and full, no strict and
flexible.  The forms of a report's `grade(answer, ground_truth)` are `judge_answer`, those of `extract_answer`
`find_boxes`.
"""

import inspect
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhelpers.kernels import compute_rollout_rewards
from rlhelpers.tasks import Grader, algebra, get_prompt, grade, grading, question_only_reward_fn
from rlhelpers.tasks import grading as judging
from rlhelpers.tasks import r1_zero_reward_fn as reward
from rlhelpers.tasks.answers import MAX_CHARS, find_boxes, parse_gsm8k_response
from rlhelpers.tasks.grading import judge_answer
from rlhelpers.tasks.gsm8k import final_answer, read_problems
from rlhelpers.training.evaluation import reason_counts

REPORTS = Path(__file__).parents[2] / "shared/cases/field_reports.jsonl"


def table(*cases):
    """Cases of a test: answer, ground truth, and ours, True for right."""
    return pytest.mark.parametrize(("answer", "truth", "is_right"), cases)


def judge(answer, truth):
    return judge_answer(answer, truth) == "right"


def response(answer):
    return f"x </think> <answer> {answer} </answer>"


@table(("99999999999!", "x+1", False), ("3**40**5", "1/3", False), ("1" * 5000, "7", False))
def test_a02_integer_bombs_end_without_an_error(answer, truth, is_right):
    """The digits that CPython refuses to print are never made: what is logged is the response itself, and of what a
    box holds only the beginning is compared with other boxes."""
    started = time.monotonic()
    assert judge(answer, truth) is is_right
    assert time.monotonic() - started < 30
    assert all(len(content) <= MAX_CHARS for content in find_boxes(rf"\boxed{{{answer}}}").contents)


def test_a03_grading_in_a_thread_is_as_in_the_main_thread():
    def rewards(pool_map):
        answers = ["1/2", "2/4", "1/3", r"\frac{\sqrt{4}}{4}", r"\frac{1}{\sqrt{2}}"]
        truths = ["1/2", "1/2", "1/2", "1/2", r"\frac{\sqrt{2}}{2}"]
        return list(pool_map(lambda answer, truth: reward(response(answer), truth)["reward"], answers, truths))

    with ThreadPoolExecutor(4) as pool:
        assert rewards(pool.map) == rewards(map) == [1, 1, 0, 0, 1]
        verdict = pool.submit(algebra.compare, "9^{9^{9}}", "x+1", 0.2).result(timeout=60)
    assert verdict == algebra.TIMED_OUT


def test_a04_a_failed_backend_is_never_an_unmarked_zero(monkeypatch):
    """Equal texts and numbers do not touch sympy.  Where it fails, the reason says so, and the metrics count it."""

    def fail(*_):
        raise ValueError

    monkeypatch.setattr(algebra, "compare", fail)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(judge, r"7.41\%", r"7.41\%").result()
    assert judge(r"\sqrt{2}", r"\sqrt{2}")
    monkeypatch.setattr(algebra, "compare", lambda *_: algebra.UNREADABLE)
    graded = grade(response(r"\sqrt{2}"), r"\sqrt{3}")
    assert (graded.answer, graded.reason) == (0, "unreadable")
    assert reason_counts([{"reason": graded.reason, "boxes_agree": True}])["reason/unreadable"] == 1


def test_a06_half_a_second_is_a_limit_and_zero_is_an_error():
    started = time.monotonic()
    assert judge_answer("9**9**9**9", "0.5", time_limit=0.5) != "right"
    assert algebra.compare("9^{9^{9}}", "x", 0.5) == algebra.TIMED_OUT
    assert time.monotonic() - started < 30
    for limit in (0, -0.5, float("nan")):
        with pytest.raises(ValueError, match="time_limit"):
            algebra.compare("x", "y", limit)


@pytest.mark.parametrize(
    "answer",
    [
        r"\pi+__import__(\"os\").mkdir(\"rl_pwn\")",
        r"\begin{pmatrix}__import__(\"os\").mkdir(\"rl_pwn\")\end{pmatrix}",
        'setattr(__import__("rlhelpers"),"grade",lambda *a:1)',
    ],
)
def test_a07_an_answer_is_not_run(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(grading)), dict(vars(judging))
    for truth in ("5", "x+1"):
        assert not judge(answer, truth)
        assert algebra.compare(answer, truth) != algebra.EQUAL  # also where it is not kept from sympy
    assert (dict(vars(grading)), dict(vars(judging))) == before
    assert not judge("4", "5")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "answer", ['open("rl_pwn2","w")', "().__class__.__base__.__subclasses__()", "exit()", "print(7)"]
)
def test_a08_only_a_grammar_of_formulas_reaches_the_evaluator(answer, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(algebra, "compare", lambda *question: asked.append(question) or algebra.EQUAL)
    assert not judge(answer, "x")
    assert not asked
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_a09_a_comma_after_the_number():
    assert parse_gsm8k_response("So she keeps 96 stamps, altogether, in the album.") == "96"
    assert parse_gsm8k_response(", , no digits,") is None


@table(
    ("$70,000", " 70,000", True),
    ("70,000.00", " 70,000", True),
    ("**$70,000**", " 70,000", True),
    ("70000", " 70,000", True),
    ("70 000", " 70,000", True),  # policy: spaces may group thousands
    ("7,00,00", " 70,000", False),
)
def test_a10_currency_and_thousands(answer, truth, is_right):
    assert judge(answer, truth) is is_right
    assert reward(response(answer), final_answer(f"so #### {truth}"))["reward"] == is_right


@table(
    ("29.00", "29", True),
    ("29.", "29", True),
    ("29.0.", "29", True),  # the report expects 0; to us the second dot is a full stop
    ("$29", "29", True),
    ("29.50", "29", False),
)
def test_a11_zeros_and_a_full_stop(answer, truth, is_right):
    assert judge(answer, truth) is is_right


def test_a12_the_number_is_found_before_a_long_tail():
    """The last number of the text, wherever it stands; there is no strict mode that asks for `####`."""
    tail = " and this agrees with the steps above"
    assert parse_gsm8k_response("2+40=42\n#### 42\n" + tail * 200) == "42"
    started = time.monotonic()
    assert parse_gsm8k_response("2+40=42\n#### 42\n" + tail * 50_000) == "42"
    assert time.monotonic() - started < 30


def test_a13_the_last_mark_counts():
    assert parse_gsm8k_response("Example: #### 6\nNow mine.\n#### 1,080") == "1080"
    assert final_answer("Ann has 3.\n#### 1,080") == "1,080"


def test_a14_a_missing_form_is_seen():
    """There is no flexible mode to choose: what counts as form is the prompt, which the run's configuration names.
    That nobody keeps to it shows in the format reward and in the reasons."""
    grader = Grader(get_prompt("question_only"))
    responses, truths = ["The answer is 12."] * 8, ["12"] * 8
    rewards, metrics = compute_rollout_rewards(grader, responses, truths)
    assert rewards.sum() == 0
    assert metrics["mean_format_reward"] == 0.0
    rows = [vars(grader.grade(*pair)) for pair in zip(responses, truths, strict=True)]
    assert reason_counts(rows) == {r"reason/no \boxed": 8, "boxes_disagree": 0}


@pytest.mark.parametrize("truth", ["", "   ", None, r"\boxed{", "#### "])
def test_a15_a_ground_truth_that_cannot_be_read_pays_nobody(truth, tmp_path):
    for answer in ("anything", "", str(truth)):
        with pytest.raises(ValueError, match="ground_truth"):
            reward(response(answer), truth)
    file = tmp_path / "train.jsonl"
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "1+1?", "answer": truth and f"#### {truth}"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        read_problems(file)


def test_a16_without_a_box_nothing_is_graded():
    rewards = question_only_reward_fn("I think 3 or maybe 8 or 12, not sure", "12")
    assert rewards == {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("text", "inside"), [(r"\fbox{7}", None), (r"\boxed 7", None), (r"\boxed {7}", "7"), (r"\boxed{}", ""), ("", None)]
)
def test_a17_what_is_a_box(text, inside):
    r"""A box is `\boxed` and a brace.  An empty one is a box: it has the format, and no answer."""
    assert find_boxes(text).last == inside
    graded = grade(text, "7", "question_only")
    assert (graded.format, graded.answer) == (inside is not None, inside == "7")


@pytest.mark.parametrize(
    ("text", "format_reward", "answer_reward"),
    [
        (r"\boxed{3} so \boxed{8}", 1, 1),
        (r"\boxed{8} hmm \boxed{3}", 1, 0),
        (r"\boxed{8} ... \boxed{8}", 1, 1),
        (r"\boxed{8} and \boxed{", 0, 0),
    ],
)
def test_a18_the_last_of_several_boxes_counts(text, format_reward, answer_reward):
    graded = grade(text, "8", "question_only")
    assert (graded.format, graded.answer, graded.boxes) == (format_reward, answer_reward, 2)
    assert graded.boxes_agree == ("3" not in text)


@pytest.mark.parametrize("inside", [r"\frac{1}{\sqrt{2}}", r"\left\{x : \frac{x}{\sqrt{x^{2}}}=1\right\}"])
def test_a19_braces_in_braces(inside):
    r"""`\{` and `\}` are no braces of the box."""
    assert find_boxes(rf"\boxed{{{inside}}}").last == inside
    assert judge(r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}")


def test_a20_thoughts_of_several_lines():
    rewards = reward("step 1\nstep 2\n</think> <answer>9</answer>", "9")
    assert (rewards["format_reward"], rewards["reward"]) == (1, 1)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (" ", "right"),
        ("", "no single space between tags"),
        ("  ", "no single space between tags"),
        ("\n", "newline between tags"),
        (" text ", "text between tags"),
    ],
)
def test_a21_what_stands_between_the_tags(between, reason):
    """Exactly one space, as the course has it; the reason says what stood there instead."""
    graded = grade(f"9 </think>{between}<answer>9</answer>", "9")
    assert (graded.format, graded.answer, graded.reason) == (between == " ", between == " ", reason)


@pytest.mark.parametrize(
    ("text", "agree"),
    [
        ("a </think> <answer>4</answer> <answer>5</answer>", False),
        ("a </think> <answer>5</answer> <think> b </think> <answer>5</answer>", True),
    ],
)
def test_a22_several_answers(text, agree):
    """The last counts, as the course has it; how many there were is told, and the metrics count those that differ."""
    graded = grade(text, "5")
    assert (graded.format, graded.answer, graded.boxes, graded.boxes_agree) == (1, 1, 2, agree)
    assert reason_counts([vars(graded)])["boxes_disagree"] == (not agree)


@pytest.mark.parametrize("inside", ["", "   ", r"\text{ }", "{}", "$$"])
def test_a24_an_empty_answer_earns_nothing(inside):
    graded = grade(f"x </think> <answer>{inside}</answer>", "5")
    assert (graded.answer, graded.reason) == (0, "empty box")


@table(*[(answer, "2", False) for answer in ("2 or 3", "1, 2, 3", "21", "12", "2 (or 4)", r"\pm 2")])
def test_a25_several_candidates_earn_nothing(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@pytest.mark.parametrize("opening", ["", "<think> "])
def test_a27_the_opening_tag_stands_in_the_prompt(opening):
    assert get_prompt("r1_zero").template.endswith("<think>")
    rewards = reward(f"{opening}because 2+2 is 4 </think> <answer> 4 </answer>", "4")
    assert (rewards["format_reward"], rewards["reward"]) == (1, 1)


@table(("35\\%", "35", True), ("35\\%", "0.35", False), ("35", "0.35", False), ("35 percent", "35\\%", True))
def test_a29_percent_is_a_unit(answer, truth, is_right):
    """35% is 35, as 35 metres are; it is never 0.35."""
    assert judge(answer, truth) is judge(truth, answer) is is_right


@table(
    (r"\frac{1}{2^{90}}", r"\frac{1}{2^{91}}", False),
    (r"\frac{1}{1500!}", r"\frac{1}{1502!}", False),  # a factorial is right only where it repeats the ground truth
    ("1e-12", "2e-12", False),
)
def test_a30_small_numbers_that_differ(answer, truth, is_right):
    assert judge(answer, truth) is is_right
    assert judge(truth, truth)


@table(
    ("n=2,5,7", "n=1,5,7", False),
    ("D=(0,1)", "D=(0,1.5)", False),
    (r"\pm 9", "9", False),
    ("x=5", "5", True),
    ("12:30", "2:30", False),
)
def test_a31_a_label_hides_nothing(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@table(
    ("3x+4y+14=0", "3*x-1*y+13=0", False),
    ("y=2x+1", "y=3x+1", False),
    ("2x+4y=3", "y=3/4-x/2", False),  # the same line; an equation is right only where it repeats the ground truth
    ("2x+4y=3", "2x+4y=3", True),
)
def test_a32_an_equation_is_not_its_last_number(answer, truth, is_right):
    assert judge(answer, truth) is is_right


def test_a33_which_is_the_answer_and_which_the_truth():
    """An inequality is right only where it repeats the ground truth, in both directions.  Numbers may change places.
    The arguments are named, not keyword-only: a reward function takes its two in the course's order."""
    inequality, interval = r"m \ge \sqrt{2}", r"[\sqrt{2},\infty)"
    assert not judge(inequality, interval) and not judge(interval, inequality)
    assert judge(inequality, inequality) and judge(interval, interval)
    for one, other in (("5", "5.0"), ("5", "6"), ("5 m", "5"), ("5 m", "5 s"), ("1/2", "0.5"), ("35%", "0.35")):
        assert judge(one, other) is judge(other, one)
    assert judge_answer(answer="5", ground_truth="5") == "right"
    assert list(inspect.signature(grade).parameters) == ["response", "ground_truth", "prompt"]


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("x </think> <answer> **73** </answer>", "r1_zero"),
        (r"\boxed{\mathbf{73}}", "question_only"),
        ("x </think> <answer> `73` </answer>", "r1_zero"),  # policy: marks of code are no part of an answer
    ],
)
def test_a34_bold_and_code(text, prompt):
    assert grade(text, "73", prompt).reason == "right"


@table(
    ("5/8", r"\frac{5}{8}", True),
    ("5", "5/8", False),
    ("0.625", "5/8", True),
    ("-5/8", r"-\dfrac58", True),
    ("5/8 cups", "5/8", True),
)
def test_a35_a_fraction_is_read_whole(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@table(
    ("3*pi/4", r"\frac{3\pi}{4}", True),
    ("sqrt(8)", r"2\sqrt{2}", True),
    ("e^2-1", r"e^{2}-1", True),
    ("O(n)", r"\Theta(n)", False),
)
def test_a36_plain_formulas_and_latex(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@pytest.mark.parametrize("truth", ["\x0crac12", "\tfrac12", "3\x0crac12"])
def test_a37_a_command_that_lost_its_backslash_is_an_error_at_load_time(truth, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": f"#### {truth}"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1.*ground_truth.*control character"):
        read_problems(file)


@table(
    ("\u22127", "-7", True),
    ("\u20137", "-7", True),  # policy: an en dash before a number is a minus
    ("- 7", "-7", True),
    (r"\text{-}7", "-7", True),
    ("\u22127", "7", False),
    ("\u20147", "-7", False),  # an em dash is none
)
def test_a38_minus_signs(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@table(
    ("１０００", "1000", True),
    ("1_000", "1000", False),
    ("1e3", "1000", False),  # a formula that is not computed
    ("01000", "1000", True),
    *[(answer, "5", False) for answer in ("nan", "inf", "Infinity", "1e999")],
)
def test_a39_what_python_takes_for_a_number(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@table(
    ("4/6", "2/3", True),
    (r"\frac{0.5}{1}", "1/2", True),
    ("2^{10}", "1024", False),  # where a number is asked for, it has to be computed
    (r"\sqrt{16}", "4", False),
)
def test_a41_fractions_need_not_be_reduced_but_numbers_computed(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@table(
    (r"-\frac 12", r"-\frac{1}{2}", True),
    (r"\frac", "1", False),
    (r"\frac1", "1", False),
    (r"\sqrt", "2", False),
    (r"(-\infty,-\frac 12)\cup(-\frac 12,\infty)", r"(-\infty,-\frac{1}{2})\cup(-\frac{1}{2},\infty)", True),
)
def test_a42_fractions_without_braces(answer, truth, is_right):
    assert judge(answer, truth) is is_right


@pytest.mark.skipif(not REPORTS.exists(), reason="the reports are not at hand")
def test_every_report_on_grading_has_its_test():
    with REPORTS.open(encoding="utf-8") as lines:
        reported = {report["id"].lower() for report in map(json.loads, lines) if report["group"] == "A"}
    assert {re.match(r"test_(a\d+)_|", name)[1] for name in globals()} - {None} == reported
