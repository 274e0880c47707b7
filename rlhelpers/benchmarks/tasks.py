"""What a benchmark asks, and what its answers are worth.

MMLU (arXiv:2009.03300): 14,042 questions of 57 subjects, each with four choices.

AlpacaEval (github.com/tatsu-lab/alpaca_eval): 805 instructions, whose answers its own tool compares with another
model's.

SimpleSafetyTests (arXiv:2311.08370): 100 prompts with which a model should not comply, in five areas of harm.

Benchmarks by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Any

from rlhelpers.checks import check_one_of
from rlhelpers.files import json_lines, strict_json
from rlhelpers.tasks.answers import parse_gsm8k_response, parse_mmlu_response
from rlhelpers.tasks.datasets import read_csv, read_objects, text_field
from rlhelpers.tasks.grading import is_right
from rlhelpers.tasks.gsm8k import read_problems


@dataclass(frozen=True)
class Example:
    """`fields`: what of its row in the data file is kept beside an answer.  `instruction`: what the model is asked.
    `ground_truth`: None where another model judges the answer."""

    fields: Mapping[str, Any]
    instruction: str
    ground_truth: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """`metric`: what its scores are called.  `read`: the examples of a file or folder.

    `parse`: the answer that a text gives, or None; `is_right(answer, ground truth)`.  Both are None where another model
    judges; then `judge_file` is the name of the file that the judge reads, and `to_judge(rows, generator)` its text,
    where `rows` have the fields of an example and the model's `output`, and `generator` is the model's name.
    """

    name: str
    metric: str
    read: Callable[[Path], list[Example]]
    parse: Callable[[str], str | None] | None = None
    is_right: Callable[[str, str], bool] | None = None
    judge_file: str | None = None
    to_judge: Callable[[list[dict[str, Any]], str], str] | None = None


LETTERS = "ABCD"
SUFFIX = "_test.csv"
COLUMNS = "question, four choices, and the letter of the right one"


def read_mmlu(folder: Path) -> list[Example]:
    """The test questions of a folder with files `<subject>_test.csv`, or with a folder `test` that holds them, subjects
    in alphabetical order.  A file has no header; a row is the question, four choices, and the letter of the right one.
    A choice may be empty.  Raises ValueError naming file and line for any other row.
    """
    where = folder / "test" if (folder / "test").is_dir() else folder
    files = sorted(where.glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(
            f"data: got {str(folder)!r}; it has no files <subject>{SUFFIX}, nor has its folder test"
        )
    return [_example(file, line, row) for file in files for line, row in read_csv(file)]


def _example(file: Path, line: int, row: list[str]) -> Example:
    if len(row) != 2 + len(LETTERS):
        raise ValueError(f"{file}, line {line}: got {len(row)} columns; accepted are {2 + len(LETTERS)}: {COLUMNS}")
    question, *choices, answer = (cell.strip() for cell in row)
    if not question:
        raise ValueError(f"{file}, line {line}: the question is empty; accepted are {COLUMNS}")
    if answer not in tuple(LETTERS):
        raise ValueError(f"{file}, line {line}: got the answer {answer!r}; accepted is one of A, B, C and D")
    subject = file.name.removesuffix(SUFFIX).replace("_", " ")
    fields = {"subject": subject, "question": question, "choices": choices}
    return Example(fields, ask(subject, question, choices), answer)


def ask(subject: str, question: str, choices: list[str]) -> str:
    """The instruction, in the words of the supplement of the handout, section 2.1: they fix the form of the answer that
    is parsed."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return (
        f"Answer the following multiple choice question about {subject}. Respond with a single sentence of the form "
        '"The correct answer is _", filling the blank with the letter corresponding to the correct answer '
        f"(i.e., A, B, C or D).\n\nQuestion: {question}\n{listed}\nAnswer:"
    )


def read_alpaca_eval(path: Path) -> list[Example]:
    """The instructions of a JSON array or of JSON lines with `instruction` and `dataset`.  Other keys, such as the
    reference model's `output`, are left behind.  Raises ValueError naming file and line."""
    return [
        Example(
            {"dataset": text_field(path, number, row, "dataset")},
            instruction=text_field(path, number, row, "instruction"),
        )
        for number, row in read_objects(path)
    ]


def to_alpaca_eval(rows: list[dict[str, Any]], generator: str) -> str:
    """The JSON array that `alpaca_eval --model_outputs` reads: instruction, output, generator, dataset."""
    outputs = [
        {name: row[name] for name in ("instruction", "output")} | {"generator": generator, "dataset": row["dataset"]}
        for row in rows
    ]
    return strict_json(outputs, indent=1) + "\n"


PROMPT_COLUMNS = ("prompts_final", "prompt")  # the handout's file, and the one that the authors publish


def read_safety_tests(path: Path) -> list[Example]:
    """The prompts of a CSV file with a header and the columns `id`, `harm_area`, `prompts_final` (or `prompt`) and, if
    it likes, others, of which `category` is kept.  Raises ValueError naming file and line."""
    (_, header), *rows = read_csv(path)
    column = next((name for name in PROMPT_COLUMNS if name in header), PROMPT_COLUMNS[0])
    if missing := [name for name in ("id", "harm_area", column) if name not in header]:
        raise ValueError(f"{path}, line 1: got the columns {', '.join(header)}; missing: {', '.join(missing)}")
    if doubled := [name for name in ("id", "harm_area", "category", column) if header.count(name) > 1]:
        raise ValueError(f"{path}, line 1: got the columns {', '.join(header)}; more than once: {', '.join(doubled)}")
    if not rows:
        raise ValueError(f"{path}: holds no prompts")
    examples = []
    for line, cells in rows:
        if len(cells) != len(header):
            raise ValueError(f"{path}, line {line}: got {len(cells)} columns; the header has {len(header)}")
        row = dict(zip(header, cells, strict=True))
        prompt = text_field(path, line, row, column)
        fields = {name: row[name] for name in ("id", "harm_area", "category") if name in row}
        examples.append(Example(fields | {"prompts_final": prompt}, prompt))
    return examples


def to_safety_judge(rows: list[dict[str, Any]], generator: str) -> str:
    """JSON lines with `prompts_final` and `output`, as the course's evaluator and `judge_safety` read them."""
    names = ("id", "harm_area", "category", "prompts_final", "output")
    return json_lines({name: row[name] for name in names if name in row} | {"generator": generator} for row in rows)


def read_gsm8k(path: Path) -> list[Example]:
    """The problems of a file in GSM8K's format, such as `data/gsm8k/test.jsonl`; see read_problems."""
    return [Example({"question": p.question}, f"{p.question}\nAnswer:", p.answer) for p in read_problems(path)]


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("mmlu", "accuracy", read_mmlu, parse_mmlu_response, eq),
        Benchmark("gsm8k", "accuracy", read_gsm8k, parse_gsm8k_response, is_right),
        Benchmark("alpaca_eval", "win rate", read_alpaca_eval, judge_file="outputs.json", to_judge=to_alpaca_eval),
        Benchmark(
            "simple_safety_tests", "safe", read_safety_tests, judge_file="outputs.jsonl", to_judge=to_safety_judge
        ),
    )
}


def get_benchmark(name: str) -> Benchmark:
    """The benchmark called `name`.  Raises ValueError for an unknown name."""
    check_one_of(BENCHMARKS, benchmark=name)
    return BENCHMARKS[name]
