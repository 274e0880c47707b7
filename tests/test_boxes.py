"""Where an answer stands in a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhelpers.tasks.answers import MAX_CHARS, Boxes, find_boxes, find_tags


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("", Boxes(False, (), 0, None)),
        ("so </think> <answer> 5 </answer>", Boxes(True, (" 5 ",), 1, " 5 ")),
        ("so </think> <answer></answer>", Boxes(True, ("",), 1, "")),
        ("so </think> <answer>5</answer><|endoftext|>", Boxes(True, ("5",), 1, "5")),
        ("a\nb </think> <answer>5\n6</answer>\n", Boxes(True, ("5\n6",), 1, "5\n6")),
        # Without the format: what stands between tags is still told.
        ("so </think>\n<answer>5</answer>", Boxes(False, ("5",), 1, "5")),
        ("so <answer>5</answer>", Boxes(False, ("5",), 1, "5")),
        ("</answer></think> <answer> 5", Boxes(False, (), 1, None)),
        ("so </think> <answer> 5", Boxes(False, (), 1, None)),
        ("so </think> 5</answer>", Boxes(False, (), 0, None)),
        ("so </THINK> <ANSWER>5</ANSWER>", Boxes(False, (), 0, None)),
        ("so </think> <answer >5</answer>", Boxes(False, (), 0, None)),
        # Several: the last counts, also where it is not closed, or where only an earlier one has the format.
        ("</think> <answer>4</answer> <answer>5</answer>", Boxes(True, ("4", "5"), 2, "5")),
        ("<answer>4</answer> </think> <answer>5</answer>", Boxes(True, ("4", "5"), 2, "5")),
        ("</think> <answer>4</answer> </think> <answer>5", Boxes(True, ("4",), 2, None)),
        ("</think> <answer>4 <answer>5</answer>", Boxes(True, ("5",), 2, "5")),
        ("</think> <answer>5</answer></answer>", Boxes(True, ("5",), 1, "5")),
    ],
)
def test_tags(response, found):
    assert find_tags(response) == found


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("", Boxes(False, (), 0, None)),
        ("The answer is 8.", Boxes(False, (), 0, None)),
        (r"so \boxed{8}.", Boxes(True, ("8",), 1, "8")),
        (r"\boxed{}", Boxes(True, ("",), 1, "")),
        (r"\boxed {8}", Boxes(True, ("8",), 1, "8")),
        ("\\boxed\n{8}", Boxes(True, ("8",), 1, "8")),
        (r"\boxed{8}<|endoftext|>", Boxes(True, ("8",), 1, "8")),
        (r"\boxed{3} so \boxed{8}", Boxes(True, ("3", "8"), 2, "8")),
        # Braces are balanced; `\{` and `\}` are none, but after the line break `\\` they are.
        (r"\boxed{\frac{1}{\sqrt{2}}}", Boxes(True, (r"\frac{1}{\sqrt{2}}",), 1, r"\frac{1}{\sqrt{2}}")),
        (r"\boxed{\left\{x\right\}}", Boxes(True, (r"\left\{x\right\}",), 1, r"\left\{x\right\}")),
        (r"\boxed{\{8}", Boxes(True, (r"\{8",), 1, r"\{8")),
        (r"\boxed{a\\{b}}", Boxes(True, (r"a\\{b}",), 1, r"a\\{b}")),
        (r"{x}}} \boxed{8}", Boxes(True, ("8",), 1, "8")),
        (r"{{ \boxed{8}", Boxes(True, ("8",), 1, "8")),
        # A box in a box: the inner one begins last.
        (r"\boxed{\boxed{8}}", Boxes(True, (r"\boxed{8}", "8"), 2, "8")),
        (r"\boxed{3 \boxed{8} 4}", Boxes(True, (r"3 \boxed{8} 4", "8"), 2, "8")),
        # Not closed.
        (r"\boxed{8", Boxes(False, (), 1, None)),
        (r"\boxed{8} and \boxed{", Boxes(False, ("8",), 2, None)),
        (r"\boxed{3 \boxed{8}", Boxes(True, ("8",), 2, "8")),
        # No boxes.
        (r"\boxed 8", Boxes(False, (), 0, None)),
        (r"\boxed{8}, as \boxed asks", Boxes(True, ("8",), 1, "8")),
        (r"\fbox{8}", Boxes(False, (), 0, None)),
        ("boxed{8}", Boxes(False, (), 0, None)),
    ],
)
def test_boxes(response, found):
    assert find_boxes(response) == found


@pytest.mark.parametrize(("find", "form"), [(find_tags, "</think> <answer>{}</answer>"), (find_boxes, r"\boxed{{{}}}")])
def test_of_a_long_box_only_the_last_is_kept_whole(find, form):
    long = "5" * (2 * MAX_CHARS)
    found = find(form.format(long) + form.format(long + "6"))
    assert found.contents == (long[:MAX_CHARS],) * 2
    assert found.last == long + "6"


PIECES = st.sampled_from(["</think>", " ", "<answer>", "</answer>", r"\boxed", "{", "}", "\\", r"\{", "5", "\n"])


@given(st.lists(PIECES, max_size=20).map("".join))
def test_what_holds_of_all_responses(response):
    for found in (find_tags(response), find_boxes(response)):
        assert len(found.contents) <= found.opened
        assert found.last is None or found.last in found.contents
        assert found.opened or not found.has_format
    assert (find_boxes(response).last is not None) == find_boxes(response).has_format
