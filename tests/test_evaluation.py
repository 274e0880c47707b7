"""Validation: what it counts, and the rows that it leaves to be read."""

from collections import Counter

import pytest

from rlhelpers.rollouts import Completion, Rollout, Sampling
from rlhelpers.tasks import Grader, Problem, get_prompt
from rlhelpers.tasks.grading import REASONS
from rlhelpers.training.evaluation import evaluate, reason_counts

RESPONSES = {
    " </think> <answer> 5 </answer>": "right",
    " </think> <answer> $5.00 </answer>": "right",
    " </think> <answer> 6 </answer>": "wrong value",
    " </think> <answer> It is 5. </answer>": "sentence in the box",
    " </think>\n<answer> 5 </answer>": "newline between tags",
    " It is 5.": "no </think>",
    " </think> <answer> 4 </answer>\nUser: 2+3?\nAssistant: <think> </think> <answer> 5 </answer>": "right",
    " </think> <answer> 5 </answer> So <answer> 5.0 </answer>": "right",
}
SEVERAL_THAT_DISAGREE = 1


class Parrot:
    """An engine that answers the i-th problem with the i-th response."""

    def generate(self, prompts: list[str], sampling: Sampling) -> list[Rollout]:
        return [
            Rollout(prompt, [0], [Completion(text, [0] * i, "length" if i == 1 else "stop", [-1.0] * i)])
            for i, (prompt, text) in enumerate(zip(prompts, RESPONSES, strict=True), start=1)
        ]


@pytest.fixture(scope="module")
def evaluated():
    return evaluate(Parrot(), [Problem("2+3?", "5")] * len(RESPONSES), Grader(get_prompt("r1_zero")), Sampling())


def test_the_metrics_are_means_over_the_responses(evaluated):
    metrics, _ = evaluated
    assert metrics["val_reward"] == 4 / 8 and metrics["val_format_reward"] == 6 / 8
    assert metrics["val_response_length"] == 4.5 and metrics["val_truncated_fraction"] == 1 / 8


def test_every_response_is_counted_once_under_its_reason(evaluated):
    metrics, _ = evaluated
    counts = {name.removeprefix("val_reason/"): n for name, n in metrics.items() if name.startswith("val_reason/")}
    assert counts == Counter(RESPONSES.values()) and sum(counts.values()) == len(RESPONSES)
    assert list(counts) == [reason for reason in REASONS if reason in counts]  # in every step the same order
    assert metrics["val_boxes_disagree"] == SEVERAL_THAT_DISAGREE


def test_the_rows_say_why(evaluated):
    _, rows = evaluated
    assert [row["response"] for row in rows] == list(RESPONSES)
    assert [row["reason"] for row in rows] == list(RESPONSES.values())
    assert [row["reward"] for row in rows] == [float(reason == "right") for reason in RESPONSES.values()]
    assert [row["boxes_agree"] for row in rows] == [True] * 6 + [False, True]
    assert rows[0]["question"] == "2+3?" and rows[0]["ground_truth"] == "5" and rows[0]["finish_reason"] == "length"


def test_where_nothing_is_amiss_the_count_is_zero_and_not_missing():
    assert reason_counts([{"reason": "right", "boxes_agree": True}] * 3) == {"reason/right": 3, "boxes_disagree": 0}
