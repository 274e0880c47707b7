"""GSM8K's files: found, read, checked."""

import hashlib
import json
from pathlib import Path

import pytest

from rlhelpers import paths
from rlhelpers.tasks import gsm8k, load_task, r1_zero_reward_fn
from rlhelpers.tasks.gsm8k import FILES, check_file, fetch_gsm8k, final_answer, jsonl_text, read_problems

REAL = Path(__file__).parents[2] / "shared/data/gsm8k"
needs_real = pytest.mark.skipif(not REAL.exists(), reason="the real GSM8K is not at hand")
ROWS = [{"question": " How many é? ", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}]


def write(folder, rows=ROWS):
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(jsonl_text(rows), encoding="utf-8")


def test_the_ground_truth_is_what_follows_the_mark(tmp_path):
    write(tmp_path)
    (problem,) = read_problems(tmp_path / "train.jsonl")
    assert (problem.question, problem.answer) == ("How many é?", "1,004")


@pytest.mark.parametrize("answer", ["no mark", "#### ", "5 ####", "#### $", "#### " + "9" * 5000])
def test_a_row_without_an_answer_is_named(tmp_path, answer):
    write(tmp_path, [*ROWS, {"question": "q", "answer": answer}])
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        read_problems(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    "line", ["not json", "[1]", '{"question": "q"}', '{"question": 3, "answer": "#### 1"}', '{"question": ' * 200_000]
)
def test_a_broken_line_is_named(tmp_path, line):
    file = tmp_path / "broken.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 1"):
        read_problems(file)


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="holds no objects"):
        read_problems(tmp_path / "empty.jsonl")


@pytest.mark.field_report("A13")
def test_the_last_mark_counts():
    assert final_answer("Ann has 3.\n#### 1,080") == "1,080"
    assert final_answer("#### 1\n#### 2") == "2"


def test_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "GSM8K", tmp_path / "own")
    monkeypatch.delenv("RLHELPERS_GSM8K", raising=False)
    with pytest.raises(FileNotFoundError, match="rlhelpers fetch gsm8k"):
        load_task("gsm8k", 1, 1)
    write(tmp_path / "named", [ROWS[0] | {"answer": "#### 7"}])
    monkeypatch.setenv("RLHELPERS_GSM8K", str(tmp_path / "named"))
    assert load_task("gsm8k", 1, 1).train[0].answer == "7"
    write(tmp_path / "own")
    assert load_task("gsm8k", 1, 1).train[0].answer == "1,004"


def test_fetching_verifies_before_it_writes(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: ROWS)
    with pytest.raises(ValueError, match="gsm8k train: got 1 rows"):
        fetch_gsm8k(tmp_path / "gsm8k")
    assert not (tmp_path / "gsm8k").exists()
    text = jsonl_text(ROWS)
    monkeypatch.setattr(gsm8k, "FILES", dict.fromkeys(FILES, (1, hashlib.sha256(text.encode("utf-8")).hexdigest())))
    fetch_gsm8k(tmp_path / "gsm8k")
    assert (tmp_path / "gsm8k/test.jsonl").read_text(encoding="utf-8") == text


@needs_real
def test_the_real_files(monkeypatch):
    monkeypatch.setattr(paths, "GSM8K", REAL)
    task = load_task("gsm8k", 7473, 1319)
    assert task.train[0].answer == "72" and task.validation[0].answer == "18"
    assert "Janet’s ducks" in task.validation[0].question
    for split in FILES:
        check_file(split, (REAL / f"{split}.jsonl").read_text(encoding="utf-8"))
    assert all(problem.answer for problem in task.train + task.validation)
    with pytest.raises(ValueError, match="n_train_examples: got 7474; task 'gsm8k' has 7473"):
        load_task("gsm8k", 7474, 1)


def test_a_byte_order_mark_is_read_and_other_encodings_named(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + jsonl_text(ROWS).encode("utf-8") + b"\r\n\n")
    assert len(read_problems(file)) == 1
    file.write_bytes('{"question": "é", "answer": "#### 1"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1: .* must be UTF-8"):
        read_problems(file)


def test_without_the_hub_a_folder_can_take_its_place(tmp_path, monkeypatch):
    pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ConnectionError, match="on the Hub; RLHELPERS_GSM8K can name a folder"):
        fetch_gsm8k(tmp_path / "gsm8k")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.field_report("A15")
@pytest.mark.parametrize("truth", ["", "   ", None, r"\boxed{", "#### "])
def test_an_unreadable_truth_pays_nobody(truth, tmp_path):
    for answer in ("anything", "", str(truth)):
        with pytest.raises(ValueError, match="ground_truth"):
            r1_zero_reward_fn(f"x </think> <answer> {answer} </answer>", truth)
    file = tmp_path / "train.jsonl"
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "1+1?", "answer": truth and f"#### {truth}"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        read_problems(file)


@pytest.mark.field_report("A37")
@pytest.mark.parametrize("truth", ["\x0crac12", "\tfrac12", "3\x0crac12"])
def test_a_command_without_its_backslash_is_not_loaded(truth, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": f"#### {truth}"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1.*ground_truth.*control character"):
        read_problems(file)
