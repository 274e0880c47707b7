"""What a response earns, and why."""

import random
from functools import partial

import pytest

from rlhelpers.tasks import Grader, get_prompt, grade, question_only_reward_fn, r1_zero_reward_fn
from rlhelpers.tasks.grading import REASONS, Grade, judge_answer
from rlhelpers.tasks.prompts import PROMPTS

# What stands in the box -> the reason, for the ground truth 5.
BOXES = {
    " 5 ": "right",
    "$5.00": "right",
    "5 eggs": "right",
    "$5 per month": "right",
    r"5 \text{ eggs}": "right",
    "6": "wrong value",
    " $1,800.50. ": "wrong value",
    "-5": "wrong value",
    "6%": "wrong value",
    "3/4": "wrong value",
    r"\frac{10}{3}": "wrong value",
    "She has 5.": "sentence in the box",
    "5 eggs, because she ate 3": "sentence in the box",
    "5 eggs and 3 hens": "sentence in the box",
    "2+3=5": "equation in the box",
    "2+3": "not computed",
    "5 or 6": "several answers",
    "five": "no number in the box",
    "2+": "unfinished formula",
    "5:00": "unreadable",
    "5" * 201: "too long",
    "": "empty box",
    " \n": "empty box",
}

# A response to an r1 prompt -> the reason.
TAGS = {
    "": "empty response",
    " \n": "empty response",
    "5": "no </think>",
    "5 <answer> 5 </answer>": "no </think>",
    "5 </ think> <answer> 5 </answer>": "no </think>",
    "5 </think> 5": "no <answer>",
    r"5 </think> \boxed{5}": "no <answer>",
    "5 </think> <Answer> 5 </Answer>": "no <answer>",
    "<answer> 5 </answer> </think>": "answer before </think>",
    "5 </think>\n<answer> 5 </answer>": "newline between tags",
    "5 </think> \n\n <answer> 5 </answer>": "newline between tags",
    "5 </think><answer> 5 </answer>": "no single space between tags",
    "5 </think>  <answer> 5 </answer>": "no single space between tags",
    "5 </think>\t<answer> 5 </answer>": "no single space between tags",
    "5 </think>\nso <answer> 5 </answer>": "text between tags",
    "5 </think> <answer> 5": "no </answer>",
    "</answer> 5 </think> <answer> 5": "no </answer>",
    "a </think> <answer> 5 </answer> b </think> <answer> 5": "box not closed",
}

# A response to question_only -> the reason.
NO_BOX = {
    "": "empty response",
    "So 5.": r"no \boxed",
    r"\fbox{5}": r"no \boxed",
    r"\boxed 5": r"no \boxed",
    r"\boxed{5": "box not closed",
    r"\boxed{5} or \boxed{5": "box not closed",
}


@pytest.mark.parametrize(("box", "reason"), BOXES.items())
def test_a_box_that_is_there(box, reason):
    right = float(reason == "right")
    for prompt, form in (("r1_zero", "2+3=5 </think> <answer>{}</answer>"), ("question_only", r"2+3=5 \boxed{{{}}}")):
        graded = grade(form.format(box), "5", prompt)
        assert graded == Grade(1.0, right, box, reason, boxes=1, boxes_agree=True)
        assert graded.rewards == {"format_reward": 1.0, "answer_reward": right, "reward": right}


@pytest.mark.parametrize(("response", "reason"), TAGS.items())
def test_broken_tags(response, reason):
    for prompt in ("r1_zero", "r1_zero_three_shot"):
        graded = grade(response, "5", prompt)
        assert (graded.reason, graded.answer) == (reason, 0.0)
        assert graded.format == (reason == "box not closed")  # an earlier answer has the format


@pytest.mark.parametrize(("response", "reason"), NO_BOX.items())
def test_no_box(response, reason):
    graded = grade(response, "5", "question_only")
    assert (graded.format, graded.answer, graded.extracted, graded.reason) == (0.0, 0.0, None, reason)


def test_every_reason_is_reached_by_an_example():
    hurried = Grader(get_prompt("r1_zero"), partial(judge_answer, time_limit=0.001))
    timed_out = hurried.grade(r"so </think> <answer>\sin(\sin(x))</answer>", "x+1")
    assert (timed_out.format, timed_out.answer, timed_out.reason) == (1.0, 0.0, "timed out")
    assert {*BOXES.values(), *TAGS.values(), *NO_BOX.values(), timed_out.reason} == set(REASONS)


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (" 2+2=4 </think> <answer> 4 </answer>", 1, 1),
        ("<think> 2+2=4 </think> <answer> 4 </answer>", 1, 1),
        ("line\nline\n</think> <answer>4</answer>", 1, 1),
        (" </think> <answer> 5 </answer>", 1, 0),
        (" </think>\n<answer> 4 </answer>", 0, 0),
        (" 4 <answer> 4 </answer>", 0, 0),
        (" </think> <answer> 4", 0, 0),
        ("</answer></think> <answer>4", 0, 0),
        (" </think> <answer> 4 </answer><|endoftext|>", 1, 1),
        (" </think> <answer> 4 </answer>\nUser: And 2 more?\nAssistant: 6", 1, 1),
        (" </think> <answer> 5 </answer> </think> <answer> 4 </answer>", 1, 1),
        (" </think> <answer> 4 </answer> </think> <answer> 5 </answer>", 1, 0),
        (" </think> <answer> 4 </answer> </think> <answer> 4", 1, 0),
        (" </think> <answer> The answer is 4. </answer>", 1, 0),
        (r"4 \boxed{4}", 0, 0),
        ("", 0, 0),
    ],
)
def test_r1_zero_reward(response, format_reward, reward):
    expected = {"format_reward": format_reward, "answer_reward": reward, "reward": reward}
    assert r1_zero_reward_fn(response, "4") == expected
    assert Grader(get_prompt("r1_zero_three_shot"))(response, "4") == expected


@pytest.mark.parametrize(
    ("response", "format_reward", "reward"),
    [
        (r"so \boxed{8}.", 1, 1),
        (r"so \boxed{8}.<|endoftext|>", 1, 1),
        (r"\boxed{3} so \boxed{8}", 1, 1),
        (r"\boxed{8} hmm \boxed{3}", 1, 0),
        (r"\boxed{8} and \boxed{", 0, 0),
        (r"\boxed{\frac{16}{2}}", 1, 1),
        (r"\boxed{}", 1, 0),
        ("The answer is 8.", 0, 0),
        ("so </think> <answer>8</answer>", 0, 0),
    ],
)
def test_question_only_reward(response, format_reward, reward):
    expected = {"format_reward": format_reward, "answer_reward": reward, "reward": reward}
    assert question_only_reward_fn(response, "8") == expected


@pytest.mark.parametrize(
    ("boxes", "agree"),
    [
        (["5"], True),
        (["5", "5"], True),
        (["5.00", "$5", " 5 eggs"], True),
        (["1/2", "0.5"], True),
        (["yes", r"\text{yes}"], True),
        (["4", "5"], False),
        (["5", "4", "5"], False),
        (["5 eggs", "5 hens"], False),
        (["2+3", "5"], False),  # nothing is computed here
        (["", "5"], False),
        (["5" * 300, "5" * 301], True),  # as far as they are looked at
    ],
)
def test_how_many_boxes_and_whether_they_agree(boxes, agree):
    tags = "".join(f" </think> <answer>{box}</answer>" for box in boxes)
    for graded in (
        grade(tags, "5"),
        grade(" and ".join(rf"\boxed{{{box}}}" for box in boxes), "5", "question_only"),
        grade("<answer>".join(f"{box}</answer>" for box in ["", *boxes]), "5"),  # also without the format
    ):
        assert (graded.boxes, graded.boxes_agree, graded.extracted) == (len(boxes), agree, boxes[-1])


def test_a_box_that_is_not_closed_is_counted_and_has_nothing_to_agree_with():
    graded = grade(" </think> <answer>4</answer> <answer>5", "5")
    assert (graded.boxes, graded.boxes_agree, graded.extracted) == (2, True, None)
    graded = grade("nothing", "5")
    assert (graded.boxes, graded.boxes_agree, graded.extracted) == (0, True, None)


def test_the_tasks_own_verdict_counts():
    response = " </think> <answer>6</answer>"
    asked = []

    def judge(answer, truth):
        asked.append((answer, truth))
        return "right"

    assert Grader(get_prompt("r1_zero"), judge).grade(response, "5").reason == "right"
    assert Grader(get_prompt("r1_zero"), judge)("<answer>6</answer>", "5")["reward"] == 0  # without the format
    assert asked == [("6", "5"), ("", "5")]
    with pytest.raises(ValueError, match="judge: it gave 'correct'; accepted are right, wrong value"):
        Grader(get_prompt("r1_zero"), lambda answer, truth: "correct").grade(response, "5")


@pytest.mark.parametrize("truth", ["", "  ", "$", r"\boxed{", "9" * 201, None, 5, ["5"]])
@pytest.mark.parametrize("response", ["", "5", " </think> <answer>5</answer>", r"\boxed{5}", r"\boxed{"])
def test_a_ground_truth_that_cannot_be_read_is_an_error_whatever_the_response(response, truth):
    for reward_fn in (r1_zero_reward_fn, question_only_reward_fn, grade):
        with pytest.raises(ValueError, match="ground_truth: got"):
            reward_fn(response, truth)


def test_an_unknown_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt: got 'r2_zero'; accepted are r1_zero"):
        grade("5", "5", "r2_zero")
    with pytest.raises(ValueError, match="prompt: got 'r1_zero'; accepted is a Prompt"):
        Grader("r1_zero")


@pytest.mark.parametrize("response", [None, 5, b"5", ["5"]])
def test_a_response_that_is_no_text_is_an_error(response):
    for reward_fn in (r1_zero_reward_fn, question_only_reward_fn, grade):
        with pytest.raises(ValueError, match=r"response: got .*, a (NoneType|int|bytes|list); accepted is a text"):
            reward_fn(response, "5")


def test_every_response_has_one_reason_of_the_set_and_only_the_right_are_paid():
    pieces = ["</think>", "<answer>", "</answer>", " ", "\n", "5", "7 eggs", "so", r"\boxed{", "}", "5.", "\nUser: 5?"]
    rng, seen = random.Random(0), set()
    for _ in range(4000):
        response = "".join(rng.choices(pieces, k=rng.randrange(9)))
        for prompt in PROMPTS:
            graded = grade(response, "5", prompt)
            assert graded.reason in REASONS
            assert graded.answer == (graded.reason == "right") <= graded.format
            assert not graded.answer or graded.extracted.strip(" .\n") == "5"
            seen.add(graded.reason)
    assert len(seen) > 10
