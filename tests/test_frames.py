"""The frame around an instruction, and what of a generation answers."""

import pytest

from rlhelpers.benchmarks.ask import QUERY_ANSWER, Frame


def test_the_instruction_stands_between_query_and_answer_in_fences():
    prompt = QUERY_ANSWER("Add {2} and {question}.")
    assert prompt.startswith("# Instruction\nBelow is a list of conversations")
    assert prompt.endswith("\n\n# Query:\n```Add {2} and {question}.```\n\n# Answer:\n```\n")
    assert QUERY_ANSWER.stop == "# Query:"


@pytest.mark.parametrize(
    ("generation", "answer"),
    [
        ("Four.\n```\n\n# Query:", "Four."),
        ("Four.```", "Four."),
        ("  Four. ", "Four."),
        ("Four.\n```\n\n# Query:\n```More?```\n\n# Answer:\n```\nFive.", "Four."),
        ("Run\n```\nls\n```\nand look.\n```\n\n# Query:", "Run\n```\nls\n```\nand look."),
        ("Run\n```\nls\n```\n```\n\n# Query:", "Run\n```\nls\n```"),
        ("# Query:", ""),
        ("```", ""),
        ("", ""),
        ("# Query", "# Query"),
    ],
)
def test_an_answer_ends_at_the_stop_string_and_its_fence(generation, answer):
    assert QUERY_ANSWER.answer(generation) == answer


def test_a_frame_without_stop_and_fence_keeps_all_but_white_space():
    frame = Frame("plain", "Q: {question}\nA:", stop=None)
    assert frame("2+2?") == "Q: 2+2?\nA:" and frame.answer(" 4\n```\n# Query: 5 ") == "4\n```\n# Query: 5"
