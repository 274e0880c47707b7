"""Zero-shot evaluation: the prompt, what is asked, how it is scored, and the folder that it leaves."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlhelpers import cli
from rlhelpers.benchmarks import ask as zero_shot
from rlhelpers.benchmarks.ask import QUERY_ANSWER, ZeroShotPrompt, answer, evaluate_benchmark, save
from rlhelpers.benchmarks.report import read_report, read_rows
from rlhelpers.benchmarks.tasks import BENCHMARKS
from rlhelpers.files import NotWrittenError
from rlhelpers.kernels.tokens import beginning
from rlhelpers.rollouts import Completion, Rollout
from rlhelpers.training.config import make_config

DATA = Path(__file__).with_name("data")
FILES = {
    "mmlu": DATA / "mmlu",
    "gsm8k": DATA / "gsm8k.jsonl",
    "alpaca_eval": DATA / "alpaca_eval.json",
    "simple_safety_tests": DATA / "simple_safety_tests.csv",
}


def test_the_instruction_stands_in_fences():
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


def test_a_plain_prompt_keeps_all_but_white_space():
    prompt = ZeroShotPrompt("plain", "Q: {question}\nA:", stop=None)
    assert prompt("2+2?") == "Q: 2+2?\nA:" and prompt.answer(" 4\n```\n# Query: 5 ") == "4\n```\n# Query: 5"


class Parrot:
    """An engine that answers the i-th prompt with the i-th text, and remembers what it was asked."""

    def __init__(self, *texts):
        self.texts = texts

    def generate(self, prompts, sampling):
        self.prompts, self.sampling = prompts, sampling
        texts = zip(prompts, self.texts, strict=True)
        return [Rollout(prompt, [0], [Completion(text, [1] * 4, "stop", [-1.0] * 4)]) for prompt, text in texts]


def ask(name, tokenizer, *texts, prompt=QUERY_ANSWER):
    engine = Parrot(*texts)
    examples = BENCHMARKS[name].read(FILES[name])
    return engine, answer(BENCHMARKS[name], examples, engine, tokenizer, 16, prompt)[0]


def test_the_engine_is_asked_greedily_up_to_the_next_query(tokenizer):
    engine, _ = ask("gsm8k", tokenizer, "1", "2")
    assert engine.prompts[1] == QUERY_ANSWER("Two cups hold 3 pens each. How many pens are there?\nAnswer:")
    sampling = engine.sampling
    assert (sampling.n, sampling.temperature, sampling.max_tokens, sampling.stop) == (1, 0, 16, "# Query:")


def test_many_examples_are_asked_some_at_a_time(tokenizer, monkeypatch):
    asked = []

    class Counter:
        def generate(self, prompts, sampling):
            asked.append(len(prompts))
            return [Rollout(p, [0], [Completion(p[-30:], [1], "stop", [-1.0])]) for p in prompts]

    monkeypatch.setattr(zero_shot, "AT_ONCE", 2)
    examples = BENCHMARKS["mmlu"].read(FILES["mmlu"])
    rows, _ = answer(BENCHMARKS["mmlu"], examples, Counter(), tokenizer, 16)
    assert asked == [2, 2, 1]
    assert [row["generation"] for row in rows] == [QUERY_ANSWER(example.instruction)[-30:] for example in examples]


def test_what_cannot_be_parsed_is_wrong(tokenizer):
    generations = ["The correct answer is A.\n```\n\n# Query:", "B", "I do not know.", "The answer is (C)", ""]
    _, rows = ask("mmlu", tokenizer, *generations)
    assert [row["prediction"] for row in rows] == ["A", "B", None, "C", None]
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert rows[0]["generation"] == generations[0] and rows[0]["output"] == "The correct answer is A."


def test_a_made_up_next_query_does_not_count(tokenizer):
    _, rows = ask("gsm8k", tokenizer, "It is 1,234.\n```\n\n# Query:\n```And 7?```\n# Answer:\n```\n7", "7\n# Query: 6")
    assert [(row["prediction"], row["score"]) for row in rows] == [("1234", 1.0), ("7", 0.0)]


def test_another_prompt_may_be_used(tokenizer):
    engine, rows = ask(
        "gsm8k", tokenizer, "1,234 ", "6\n# Query: 5", prompt=ZeroShotPrompt("plain", "Q: {question}", None)
    )
    assert engine.prompts[0].startswith("Q: A shelf") and engine.sampling.stop is None
    assert [row["prediction"] for row in rows] == ["1234", "5"]


def test_nothing_to_ask_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="examples: got none; accepted is at least one"):
        answer(BENCHMARKS["mmlu"], [], Parrot(), tokenizer, 16)


def test_a_prompt_begins_with_the_tokenizers_first_token(tokenizer):
    assert beginning(tokenizer) == ""  # it has no such token
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    named = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<eos>")
    assert beginning(named) == ""  # it has one, and does not use it
    backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    llama = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<eos>")
    engine, _ = ask("gsm8k", llama, "1", "2")
    assert all(prompt.startswith("<eos># Instruction") for prompt in engine.prompts)
    assert llama.encode(beginning(llama) + "a b", add_special_tokens=False) == llama.encode("a b")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_tiny_model_end_to_end(name, roots, one_thread):
    benchmark, config = BENCHMARKS[name], make_config(max_tokens=12, device="cpu")
    folder = evaluate_benchmark(name, FILES[name], config)
    assert folder == roots[0] / "zero_shot" / name / "tiny"
    rows, report = read_rows(folder), read_report(folder)
    assert [row["instruction"] for row in rows] == [e.instruction for e in benchmark.read(FILES[name])]
    assert all(row["generation"] and 1 <= row["tokens"] <= 12 for row in rows)
    assert report.examples == len(rows) and report.truncated == sum(row["tokens"] == 12 for row in rows)
    assert report.examples_per_second == pytest.approx(len(rows) / report.seconds) and report.seconds > 0
    about = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert about["model"] == "tiny" and about["prompt"]["name"] == "query_answer" and about["versions"]["torch"]
    if benchmark.parse is None:
        assert report.interval is None and not report.errors
        judged = (folder / benchmark.judge_file).read_text(encoding="utf-8")
        assert judged == benchmark.to_judge(rows, "tiny")
    else:
        assert report.interval.mean == sum(row["score"] for row in rows) / len(rows)
        assert report.unparsed == sum(row["prediction"] is None for row in rows)
        assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "responses.jsonl"]


def test_an_earlier_evaluation_is_moved_aside(tmp_path, tokenizer):
    folder = tmp_path / "mmlu" / "tiny"
    for letter in "AB":
        _, rows = ask("mmlu", tokenizer, *[letter] * 5)
        assert save(folder, BENCHMARKS["mmlu"], rows, "tiny", 1.0, {}) == folder
    assert {row["output"] for row in read_rows(folder)} == {"B"}
    assert {row["output"] for row in read_rows(tmp_path / "mmlu" / "tiny.earlier-1")} == {"A"}


def test_an_unwritten_evaluation_leaves_the_earlier_one(tmp_path, tokenizer):
    folder = tmp_path / "mmlu" / "tiny"
    _, rows = ask("mmlu", tokenizer, *"AAAAA")
    save(folder, BENCHMARKS["mmlu"], rows, "tiny", 1.0, {})
    with pytest.raises(NotWrittenError, match="what was there before is whole"):
        save(folder, BENCHMARKS["mmlu"], [*rows, {"output": "\ud800"}], "tiny", 1.0, {})
    assert read_rows(folder) == rows and [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_an_example_that_does_not_fit_is_named_first(tmp_path, roots, monkeypatch):
    monkeypatch.setattr(zero_shot, "AT_ONCE", 2)
    monkeypatch.setattr(zero_shot, "make_engine", pytest.fail)
    questions = ["Why?", "How?", "When?", "Where? " * 2000]
    text = "".join(json.dumps({"question": question, "answer": "#### 1"}) + "\n" for question in questions)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompts: prompt 3 has .* it must fit the model's context"):
        evaluate_benchmark("gsm8k", tmp_path / "rows.jsonl", make_config(device="cpu"))


def test_the_command(roots, capsys, one_thread):
    arguments = ["evaluate", "gsm8k", "--data", str(FILES["gsm8k"]), "--max-tokens", "4", "-p", "device=cpu"]
    assert cli.main(arguments) == 0
    assert "tiny on gsm8k: accuracy 0.000 [0.000, 0.658], 2 examples" in capsys.readouterr().out
    assert {row["tokens"] for row in read_rows(roots[0] / "zero_shot" / "gsm8k" / "tiny")} == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mmlu", "--data", "absent"], "data: got 'absent'; it has no files <subject>_test.csv"),
        (["squad", "--data", "absent"], "benchmark: got 'squad'; accepted are mmlu"),
        (["gsm8k", "--data", "absent"], "data: got 'absent'; there is no such file"),
        (["gsm8k", "--data", str(FILES["gsm8k"]), "--engine", "tgi"], "engine: got 'tgi'"),
        (["gsm8k", "--data", "absent", "-p", "seed=1", "-p", "seed=2"], "seed: given twice"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(arguments, message, roots, capsys, monkeypatch):
    monkeypatch.setattr("rlhelpers.benchmarks.ask.load_policy", None)
    assert cli.main(["evaluate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"rlhelpers: {message}") and not roots[0].exists()
