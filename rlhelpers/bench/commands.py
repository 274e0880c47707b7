"""The commands `rlhelpers bench ...`, as a table.  Nothing heavy is imported before one is run."""

import argparse
from functools import partial
from importlib import import_module
from typing import Any


def positive_count(text: str) -> int:
    """For argparse: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted are whole numbers from 1")
    return int(text)


ENGINES = ("torch", "vllm", "vllm-server")
# Name: module and function, which takes the options as keywords and returns a Report.
BENCHES = {
    "engines": ("engines.bench_engines", "speed, start-up, sync and mismatch of the rollout engines"),
    "ahead": ("runs.bench_ahead", "runs with and without rollouts one step ahead; needs vLLM"),
    "grader": ("grader.bench_grader", "speed and agreement of our grader and of math-verify alone"),
    "rollouts": ("engines.bench_rollouts", "the in-process engine against transformers' generate"),
    "step": ("step.bench_step", "the training step against the textbook's and TRL's"),
    "whole-step": ("step.bench_whole_step", "sample, grade and train, against a plain loop and TRL"),
    "contention": ("contention.bench_contention", "a step of the default run, quiet and beside a busy process"),
    "logprobs": ("logprobs.bench_logprobs", "log-probs over a large vocabulary, in chunks and all at once"),
    "imports": ("imports.bench_imports", "seconds until the package is imported"),
    "growth": ("growth.bench_growth", "how time and memory grow with responses, their length and group size"),
    "long": ("runs.bench_long", "whether memory or open files grow over 2,000 small steps"),
    "gpu": ("gpu.bench_gpu", "the training step of the course's model, part by part; a small one on the CPU"),
}
OPTIONS = {
    "engines": {"--engines": {"nargs": "+", "choices": ENGINES, "help": "default: those here"}},
    "grader": {
        "responses": {"nargs": "?", "help": "a file, .jsonl or .jsonl.gz (default: invented responses)"},
        "--course": {"metavar": "FILE", "help": "measure another grader too: python, with r1_zero_reward_fn"},
    },
    "long": {"--steps": {"type": positive_count, "default": 2000}},
    "gpu": {"--device": {"default": "auto", "help": "auto, cpu, cuda or cuda:1"}},
}


def add_benches(benches: Any) -> None:
    """Add a parser for each bench, and for `readme`, whose `run` takes the options.

    benches: what `add_subparsers` returned.
    """
    for name, (_, help) in BENCHES.items():
        command = benches.add_parser(name, help=help)
        for option, settings in OPTIONS.get(name, {}).items():
            command.add_argument(option, **settings)
        command.set_defaults(run=partial(measure, name))
    benches.add_parser("readme", help="write README's tables again, from data/results/bench").set_defaults(run=readme)


def measure(name: str, options: argparse.Namespace) -> None:
    """Measure, keep the report, and show it; of a module that has `draw`, draw the picture too."""
    module, _, function = BENCHES[name][0].partition(".")
    module = import_module(f"rlhelpers.bench.{module}")
    given = [option.lstrip("-") for option in OPTIONS.get(name, {})]
    report = getattr(module, function)(**{option: getattr(options, option) for option in given})
    print(f"{report}\nThe numbers are in {report.write()}")
    if hasattr(module, "draw"):
        from rlhelpers.evidence.figures import save_for_writeup

        print(f"The picture is in {save_for_writeup(module.draw(report), name)}")


def readme(options: argparse.Namespace) -> None:
    """Bring the tables of README.md up to date with the committed reports."""
    from rlhelpers import paths
    from rlhelpers.bench.report import with_tables
    from rlhelpers.files import write_atomically

    file = paths.ROOT / "README.md"
    write_atomically(file, with_tables(file.read_text(encoding="utf-8")))
    print(f"The tables are in {file}")
