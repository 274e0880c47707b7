"""The exercises of 01: what passes, what fails, and what the report says of it."""

import re

import pytest

from rlhelpers import exercises as check
from rlhelpers.exercises.prompting import count_categories, has_format, in_substance
from rlhelpers.tasks.grading import r1_zero_reward_fn


def loop_has_format(response):
    opening, closing = "</think> <answer>", "</answer>"
    places = range(len(response))
    return any(
        response[i:].startswith(opening) and any(response[j:].startswith(closing) for j in places if j > i)
        for i in places
    )


def loop_count(format_rewards, answer_rewards):
    counts = [0, 0, 0]
    for has, right in zip(format_rewards, answer_rewards, strict=True):
        counts[0 if has and right else 1 if has else 2] += 1
    return tuple(counts)


def regex_in_substance(text, ground_truth):
    numbers = re.findall(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == float(ground_truth)


SOLUTIONS = {"has_format": loop_has_format, "count_categories": loop_count, "in_substance": regex_in_substance}
EXERCISES = [has_format, count_categories, in_substance]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_another_right_solution_passes(exercise, capsys):
    assert getattr(check, exercise.name) is exercise
    assert exercise(SOLUTIONS[exercise.name]) == 1.0
    assert "FAILS" not in capsys.readouterr().out


def test_has_format_is_the_graders_format_reward():
    for statement in has_format.properties:
        for inputs in has_format.inputs(statement):
            assert loop_has_format(**inputs) == r1_zero_reward_fn(inputs["response"], "5")["format_reward"]


def test_the_silent_bug_is_found_on_its_smallest_input(capsys):
    def buggy_in_substance(text, ground_truth):
        return ground_truth in text

    assert buggy_in_substance("So it is 18.", "18")
    assert in_substance.repairs(buggy_in_substance, regex_in_substance) == 1.0
    shown = capsys.readouterr().out
    assert "text = '180'" in shown and "it gives True, and yours False." in shown
    assert in_substance.repairs(buggy_in_substance, buggy_in_substance) < 1
    assert "The bug is found" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        lambda text, ground_truth: re.findall(r"\d+", text)[-1] == ground_truth,
        lambda text, ground_truth: float(re.findall(r"-?[\d.,]*\d", text)[-1].replace(",", "")) == float(ground_truth),
        lambda text, ground_truth: float(ground_truth) in [float(n) for n in re.findall(r"\d+", text)],
        lambda text, ground_truth: True,
        lambda text, ground_truth: False,
    ],
)
def test_other_wrong_repairs_fail(wrong):
    assert in_substance(wrong) < 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda response: "<answer>" in response,
        lambda response: response.endswith("</answer>"),
        lambda response: re.fullmatch(r".*</think> <answer>.*</answer>", response) is not None,
        lambda response: re.fullmatch(r"[^<]*</think> <answer>[^<]*</answer>.*", response, re.S) is not None,
    ],
)
def test_other_wrong_predicates_fail(wrong):
    assert has_format(wrong) < 1
