"""The three prompts: their text, their stop strings, and questions with braces."""

import pytest

from rlhelpers.tasks import get_prompt


def test_r1_zero_ends_where_the_model_begins_to_think():
    text = get_prompt("r1_zero")("How many?")
    assert text.startswith("A conversation between User and Assistant. The User asks a question, and the Assistant")
    assert text.endswith("</answer>.\nUser: How many?\nAssistant: <think>")


def test_three_shot_is_r1_zero_with_three_solved_examples_before_the_question():
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


def test_an_unknown_prompt_is_named_with_what_is_accepted():
    with pytest.raises(ValueError, match="prompt: got 'r1'; accepted are r1_zero, r1_zero_three_shot, question_only"):
        get_prompt("r1")
    with pytest.raises(ValueError, match=r"prompt: got \['r1'\]; accepted are r1_zero"):
        get_prompt(["r1"])
