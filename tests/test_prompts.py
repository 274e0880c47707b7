"""The prompts: their text, their stop strings, questions with braces, and the template of Alpaca."""

import pytest
from bad_input import NOT_A_NAME, NOT_TEXT, Row, check_refusal, name_of

from rlhelpers.tasks import Grader, get_prompt
from rlhelpers.tasks.prompts import ALPACA, read_alpaca, render

ALPACA_TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n{response}"
)


def test_r1_zero_ends_where_the_model_begins_to_think():
    text = get_prompt("r1_zero")("How many?")
    assert text.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant")
    assert text.endswith("</answer>.\nUser: How many?\nAssistant: <think>")


def test_three_shot_is_r1_zero_with_three_solved_examples():
    zero, three = get_prompt("r1_zero")("Q"), get_prompt("r1_zero_three_shot")("Q")
    preamble, rest = zero.split("\nUser: ")
    parts = three.split("\nUser: ")
    assert parts[0] == preamble and parts[-1] == rest
    answers = [part.split("<answer> ")[1].split(" </answer>")[0] for part in parts[1:-1]]
    assert answers == ["6", "5", "39"]  # trees, cars, chocolates
    assert all("\nAssistant: <think> " in part and "</think> <answer>" in part for part in parts[1:-1])


def test_question_only():
    assert get_prompt("question_only")("2+2?") == r"2+2? Please put your final answer within \boxed{}."


@pytest.mark.parametrize("name", ["r1_zero", "r1_zero_three_shot", "question_only"])
def test_braces_in_a_question_survive(name):
    question = "What is {x} in {question} and {}?"
    assert question in get_prompt(name)(question)


def test_stop_strings():
    stops = {name: get_prompt(name).stop for name in ("r1_zero", "r1_zero_three_shot", "question_only")}
    assert stops == {"r1_zero": "</answer>", "r1_zero_three_shot": "</answer>", "question_only": None}


def test_the_document_is_the_one_of_alpaca():
    before, behind = ALPACA_TEXT.removesuffix("{response}").split("{prompt}")
    assert render("Say {x}.\n", " {response} \n") == f"{before}Say {{x}}.\n{behind} {{response}} \n"
    assert render("Set {x} and {response}.", "{prompt} ") == f"{before}Set {{x}} and {{response}}.{behind}{{prompt}} "


@pytest.mark.field_report("B47")
def test_white_space_of_a_template_file_changes_nothing(tmp_path):
    with_crlf, file = ALPACA_TEXT.replace("\n", "\r\n") + "\r\n", tmp_path / "template.txt"
    for content in (ALPACA_TEXT, ALPACA_TEXT + "\n", ALPACA_TEXT + " \n", with_crlf, "\ufeff" + ALPACA_TEXT):
        file.write_bytes(content.encode("utf-8"))
        assert read_alpaca(file) == ALPACA.template
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        read_alpaca(tmp_path / "nowhere.txt")


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        ("He has 3+4=7. So the answer is 7.", 1.0, "right"),
        ("The answer is 7. Question: what is 8?", 0.0, "wrong value"),
        ("Seven.", 0.0, "no number in the box"),
        ("", 0.0, "empty response"),
    ],
)
def test_the_last_number_is_the_answer(response, reward, reason):
    grade = Grader(ALPACA).grade(response, "7")
    assert (grade.answer, grade.reason) == (reward, reason)
    assert grade.format == float(any(c.isdigit() for c in response))


GOOD = {
    "get_prompt": (get_prompt, {"name": "r1_zero"}),
    "Prompt": (get_prompt("r1_zero"), {"question": "How many?"}),
    "render": (render, {"instruction": "a", "response": "b"}),
}
ROWS = [
    Row("get_prompt", "name", [*NOT_A_NAME, ["r1"]], "prompt: got "),
    Row("get_prompt", "name", ["r1"], "prompt: got 'r1'; accepted are r1_zero, r1_zero_three_shot, question_only"),
    Row("Prompt", "question", NOT_TEXT),
    Row("render", "instruction", NOT_TEXT),
    Row("render", "response", NOT_TEXT),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
