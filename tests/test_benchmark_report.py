"""What a report counts, and whose word it takes."""

import json

import pytest

from rlhelpers.benchmarks.report import annotation_scores, read_report


@pytest.fixture
def write(tmp_path):
    """A folder with these scores and predictions."""

    def evaluation(scores, predictions=None, **facts):
        about = {"benchmark": "mmlu", "metric": "accuracy", "model": "m", "seconds": 2.0} | facts
        (tmp_path / "evaluation.json").write_text(json.dumps(about), encoding="utf-8")
        rows = [
            {"n": i, "score": s, "prediction": p, "output": "x" * i, "finish_reason": "length" if i == 1 else "stop"}
            for i, (s, p) in enumerate(zip(scores, predictions or ["A"] * len(scores), strict=True))
        ]
        write_lines(tmp_path / "responses.jsonl", [row | {"tokens": 10} for row in rows])
        return tmp_path

    return evaluation


def write_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_it_counts(write):
    report = read_report(write([1.0, 0.0, 0.0, 1.0, 1.0], ["A", None, "B", "C", "D"]))
    assert (report.examples, report.unparsed, report.empty, report.truncated) == (5, 1, 1, 1)
    assert report.interval.mean == 0.6 and report.examples_per_second == 2.5 and report.tokens_per_second == 25
    assert sorted(row["n"] for row in report.errors) == [1, 2]
    assert str(report) == (
        "m on mmlu: accuracy 0.600 [0.231, 0.882], 5 examples\n"
        "1 of 5 unparsed, 1 empty, 1 cut at max_tokens\n"
        "2.0 s: 2.50 examples/s, 25 tokens/s"
    )


def test_ten_errors_are_drawn_by_the_seed(write):
    folder = write([0.0, 1.0] * 30)
    drawn = [tuple(row["n"] for row in read_report(folder, seed).errors) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 10
    assert all(n % 2 == 0 for n in drawn[0])


def test_before_a_judge_has_spoken_there_is_no_metric(write):
    report = read_report(write([None] * 3, [None] * 3, benchmark="alpaca_eval", metric="win rate"))
    assert report.interval is None and report.errors == [] and report.unparsed == 0
    assert str(report).startswith("m on alpaca_eval: no scores\n")


def test_an_unreadable_verdict_is_left_out_of_the_metric(write):
    folder = write([None] * 4, [None] * 4, benchmark="simple_safety_tests", metric="safe")
    write_lines(folder / "judged.jsonl", [{"id": i, "score": s} for i, s in enumerate([1.0, None, 0.0, 1.0])])
    report = read_report(folder)
    assert (report.interval.mean, report.interval.n, report.unparsed) == (pytest.approx(2 / 3), 3, 1)
    assert [row["id"] for row in report.errors] == [2]


def test_annotations_of_alpaca_eval_count_the_second_output(write):
    folder = write([None] * 5, [None] * 5, benchmark="alpaca_eval", metric="win rate")
    preferences = [1.0, 2.0, None, 1.25, 1.5]
    annotations = [{"instruction": str(p), "preference": p} for p in preferences]
    write_lines(folder / "judge" / "annotations.json", annotations)
    scores = [row["score"] for row in annotation_scores(folder / "judge" / "annotations.json")]
    assert scores == [0.0, 1.0, None, 0.25, 0.5]
    report = read_report(folder)
    assert report.interval.mean == pytest.approx(1.75 / 4) and report.unparsed == 1
    assert {row["instruction"] for row in report.errors} == {"1.0", "1.25"}  # not the draw
    write_lines(folder / "another" / "annotations.json", annotations)
    with pytest.raises(ValueError, match=r"has 2 annotations\.json, of several annotators; accepted is one"):
        read_report(folder)


@pytest.mark.parametrize("preference", [True, 0, 3, "1", [1]])
def test_a_preference_that_is_none_is_named(tmp_path, preference):
    write_lines(tmp_path / "annotations.json", [{"preference": 1}, {"preference": preference}])
    with pytest.raises(ValueError, match=r"annotation 2: preference: got .*; accepted are 1 to 2 and null"):
        annotation_scores(tmp_path / "annotations.json")


def test_a_folder_without_an_evaluation(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"responses\.jsonl.*there is no such file"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("evaluation.json", "{}", "KeyError.*accepted is what an evaluation wrote"),
        ("evaluation.json", "[]", "TypeError.*accepted is what an evaluation wrote"),
        ("evaluation.json", "{", "JSONDecodeError.*accepted is what an evaluation wrote"),
        ("evaluation.json", '{"benchmark": "", "model": "", "metric": "", "seconds": 0}', "seconds: got 0"),
        ("responses.jsonl", '{"score": 1.0}', "line 1: output, finish_reason, tokens, prediction: missing"),
        ("judged.jsonl", '{"id": 1}', "line 1: score: missing"),
        ("judged.jsonl", '{"score": "1"}', "line 1: score: got '1'; accepted are 0 to 1 and null"),
        ("judged.jsonl", '{"score": true}', "line 1: score: got True; accepted are 0 to 1 and null"),
        ("judged.jsonl", '{"score": NaN}', "line 1: score: got nan; accepted are 0 to 1 and null"),
    ],
)
def test_what_no_evaluation_wrote_is_named(write, file, content, message):
    folder = write([1.0])
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        read_report(folder)
