"""What the four benchmarks ask, and how their answers are scored.

MMLU (arXiv:2009.03300)               14,042 questions of 57 subjects, each with four choices
GSM8K (arXiv:2110.14168)              1,319 word problems
AlpacaEval (tatsu-lab/alpaca_eval)    805 instructions; its own tool compares the answers with another model's
SimpleSafetyTests (arXiv:2311.08370)  100 prompts in five areas of harm with which a model should not comply
"""

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

LETTERS = "ABCD"
SUFFIX = "_test.csv"
COLUMNS = "question, four choices, and the letter of the right one"
PROMPT_COLUMNS = ("prompts_final", "prompt")  # in the handout's file, and in the one that the authors publish


@dataclass(frozen=True)
class Example:
    """`fields`: what is kept of the row in the data file.  `ground_truth`: None where another model judges."""

    fields: Mapping[str, Any]
    instruction: str
    ground_truth: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """How to read, score and hand on the examples of one benchmark.

    metric: the name of its scores.  read: the examples of a file or folder.
    parse: the answer in a text, or None; is_right(answer, ground truth).  Both are None where another model judges.
    judge_file, to_judge(rows, model's name): the name and the text of the file that the judge reads.
    """

    name: str
    metric: str
    read: Callable[[Path], list[Example]]
    parse: Callable[[str], str | None] | None = None
    is_right: Callable[[str, str], bool] | None = None
    judge_file: str | None = None
    to_judge: Callable[[list[dict[str, Any]], str], str] | None = None


def read_mmlu(folder: Path) -> list[Example]:
    """Read the files `<subject>_test.csv` of a folder, or of the folder `test` in it, in alphabetical order.

    A file has no header; its columns are COLUMNS.  A choice may be empty.  Raises ValueError naming file and line.
    """
    where = folder / "test" if (folder / "test").is_dir() else folder
    files = sorted(where.glob(f"*{SUFFIX}"))
    if not files:
        missing = f"it has no files <subject>{SUFFIX}, nor has its folder test"
        raise FileNotFoundError(f"data: got {str(folder)!r}; {missing}")
    return [_mmlu_example(file, line, row) for file in files for line, row in read_csv(file)]


def _mmlu_example(file: Path, line: int, row: list[str]) -> Example:
    if len(row) != 2 + len(LETTERS):
        raise ValueError(f"{file}, line {line}: got {len(row)} columns; accepted are {2 + len(LETTERS)}: {COLUMNS}")
    question, *choices, answer = (cell.strip() for cell in row)
    if not question:
        raise ValueError(f"{file}, line {line}: the question is empty; accepted are {COLUMNS}")
    if answer not in tuple(LETTERS):
        raise ValueError(f"{file}, line {line}: got the answer {answer!r}; accepted is one of A, B, C and D")
    subject = file.name.removesuffix(SUFFIX).replace("_", " ")
    fields = {"subject": subject, "question": question, "choices": choices}
    return Example(fields, _mmlu_instruction(**fields), answer)


def _mmlu_instruction(subject: str, question: str, choices: list[str]) -> str:
    """Ask in the words of the handout's supplement, section 2.1: they fix the form that is parsed."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return (
        f"Answer the following multiple choice question about {subject}. Respond with a single sentence of the form "
        '"The correct answer is _", filling the blank with the letter corresponding to the correct answer '
        f"(i.e., A, B, C or D).\n\nQuestion: {question}\n{listed}\nAnswer:"
    )


def read_gsm8k(path: Path) -> list[Example]:
    """Read a file in GSM8K's format, such as `data/gsm8k/test.jsonl`."""
    return [Example({"question": p.question}, f"{p.question}\nAnswer:", p.answer) for p in read_problems(path)]


def read_alpaca_eval(path: Path) -> list[Example]:
    """Read objects with `instruction` and `dataset`.  Other keys are dropped, such as the reference's `output`."""
    examples = []
    for number, row in read_objects(path):
        dataset, instruction = (text_field(path, number, row, name) for name in ("dataset", "instruction"))
        examples.append(Example({"dataset": dataset}, instruction))
    return examples


def to_alpaca_eval(rows: list[dict[str, Any]], generator: str) -> str:
    """Write the JSON array that `alpaca_eval --model_outputs` reads."""
    names = ("instruction", "output", "dataset")
    return (
        strict_json([{name: row[name] for name in names} | {"generator": generator} for row in rows], indent=1) + "\n"
    )


def read_safety_tests(path: Path) -> list[Example]:
    """Read a CSV file with a header and the columns `id`, `harm_area` and `prompts_final` (or `prompt`).

    `category` is kept where the file has it, other columns are dropped.  Raises ValueError naming file and line.
    """
    (_, header), *rows = read_csv(path)
    column = next((name for name in PROMPT_COLUMNS if name in header), PROMPT_COLUMNS[0])
    got = f"{path}, line 1: got the columns {', '.join(header)}"
    if missing := [name for name in ("id", "harm_area", column) if name not in header]:
        raise ValueError(f"{got}; missing: {', '.join(missing)}")
    if doubled := [name for name in ("id", "harm_area", "category", column) if header.count(name) > 1]:
        raise ValueError(f"{got}; more than once: {', '.join(doubled)}")
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
    """Write the JSON lines that `judge_safety` and the course's evaluator read."""
    names = ("id", "harm_area", "category", "prompts_final", "output")
    return json_lines({name: row[name] for name in names if name in row} | {"generator": generator} for row in rows)


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
    """Return the benchmark called `name`.  Raises ValueError for an unknown name."""
    check_one_of(BENCHMARKS, benchmark=name)
    return BENCHMARKS[name]
