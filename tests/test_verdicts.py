"""The reader's verdicts: kept at once, found again, never on another response."""

import json

import pandas as pd
import pytest

from rlhelpers.workbook.verdicts import CHOICES, Verdicts, browse

TABLE = pd.DataFrame(
    {
        "prompt": "r1_zero",
        "question": ["Eggs < hens?", "2+3?", "2+3?"],
        "ground_truth": ["5", "5", "5"],
        "response": [" 5 </think>\n<answer> <b>5</b> </answer>", "5", "6"],
        "category": "format 0, answer 0",
        "reason": ["newline between tags", "no </think>", "no </think>"],
    },
    index=[7, 3, 9],
)
FIRST, SECOND, THIRD = (row for _, row in TABLE.iterrows())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "verdicts.json"


def test_kept_and_found_again(path):
    verdicts = Verdicts(path)
    assert verdicts[FIRST] is None and not path.exists()
    verdicts[FIRST], verdicts[THIRD] = True, False
    again = Verdicts(path)
    assert again.of(TABLE).tolist() == [True, None, False]
    assert again.of(TABLE).index.tolist() == [7, 3, 9]
    assert again.of(TABLE[::-1]).tolist() == [False, None, True]


def test_the_file_can_be_read_by_itself(path):
    verdicts = Verdicts(path)
    verdicts[FIRST] = True
    (entry,) = json.loads(path.read_text(encoding="utf-8")).values()
    assert entry == {"right": True} | {n: FIRST[n] for n in ("prompt", "question", "ground_truth", "response")}


def test_a_verdict_is_on_this_prompt_question_and_response(path):
    verdicts = Verdicts(path)
    verdicts[SECOND] = True
    for name in ("prompt", "question", "response"):
        other = SECOND.copy()
        other[name] += "!"
        assert verdicts[other] is None


def test_taken_back_and_changed(path):
    verdicts = Verdicts(path)
    verdicts[FIRST] = True
    verdicts[FIRST] = False
    assert Verdicts(path)[FIRST] is False
    verdicts[FIRST] = None
    assert Verdicts(path)[FIRST] is None


def test_an_interrupted_save_leaves_the_old_file(path, monkeypatch):
    verdicts = Verdicts(path)
    verdicts[FIRST] = True

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verdicts[SECOND] = True
    assert Verdicts(path).of(TABLE).tolist() == [True, None, None]


@pytest.mark.parametrize("content", ["", "[]", "[1]", '{"a": {"right": 1}}', '{"a": {}}', '{"a": 3}'])
def test_a_file_of_something_else(path, content):
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"verdicts.json: not a file of verdicts"):
        Verdicts(path)
    assert path.read_text(encoding="utf-8") == content


def parts(widget):
    listed, shown, controls = widget.children
    return listed, shown, *controls.children


def test_browsing_and_ticking_without_a_browser(path):
    verdicts = Verdicts(path)
    verdicts[SECOND] = False
    listed, shown, back, forward, choice = parts(browse(TABLE, verdicts))
    assert [label[0] for label, _ in listed.options] == [" ", "✗", " "]
    assert "&lt;/think&gt;" in shown.value and "Eggs &lt; hens" in shown.value and "<b>5" not in shown.value
    assert choice.value == CHOICES[None]

    choice.value = CHOICES[True]
    assert Verdicts(path).of(TABLE).tolist() == [True, False, None]
    forward.click()
    assert (listed.value, choice.value) == (1, CHOICES[False])
    forward.click()
    assert (listed.value, choice.value) == (2, CHOICES[None])
    choice.value = CHOICES[False]
    assert listed.value == 2
    assert "6" in shown.value
    assert [label[0] for label, _ in listed.options] == ["✓", "✗", "✗"]
    forward.click()
    assert listed.value == 0
    back.click()
    back.click()
    choice.value = CHOICES[None]
    assert Verdicts(path).of(TABLE).tolist() == [True, None, False]
    assert listed.value == 1


def test_looking_alone_writes_nothing(path):
    listed, *_, forward, _ = parts(browse(TABLE, Verdicts(path)))
    forward.click()
    listed.value = 2
    assert not path.exists()
