"""Benchmarks by name."""

from operator import eq
from pathlib import Path

from rlhelpers.checks import check_one_of
from rlhelpers.tasks.alpaca_eval import read_alpaca_eval, to_alpaca_eval
from rlhelpers.tasks.example import Benchmark, Example
from rlhelpers.tasks.gsm8k import read_problems
from rlhelpers.tasks.judging import is_equal
from rlhelpers.tasks.mmlu import read_mmlu
from rlhelpers.tasks.parsers import parse_gsm8k_response, parse_mmlu_response
from rlhelpers.tasks.safety_tests import read_safety_tests, to_safety_judge


def read_gsm8k(path: Path) -> list[Example]:
    """The problems of a file in GSM8K's format, such as `data/gsm8k/test.jsonl`; see read_problems."""
    return [Example({"question": p.question}, f"{p.question}\nAnswer:", p.answer) for p in read_problems(path)]


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("mmlu", "accuracy", read_mmlu, parse_mmlu_response, eq),
        Benchmark("gsm8k", "accuracy", read_gsm8k, parse_gsm8k_response, is_equal),
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
