"""The commands `rlhelpers bench ...`: each measures, keeps the report and shows it."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any


def add_benches(benches: Any) -> None:
    """Each as a parser of its own, whose `run` takes the options.  benches: what `add_subparsers` returned."""
    command = benches.add_parser("engines", help="speed, start-up, sync and mismatch of the rollout engines")
    command.add_argument("--engines", nargs="+", choices=["torch", "vllm", "vllm-server"], help="default: those here")
    command.set_defaults(run=engines)
    command = benches.add_parser("ahead", help="runs with and without rollouts one step ahead; needs vLLM")
    command.set_defaults(run=ahead)
    command = benches.add_parser("grader", help="speed and agreement of our grader and of math-verify alone")
    command.add_argument("responses", nargs="?", help="a file, .jsonl or .jsonl.gz (default: invented responses)")
    command.add_argument("--course", metavar="FILE", help="measure another grader too: python, with r1_zero_reward_fn")
    command.set_defaults(run=grader)
    command = benches.add_parser("rollouts", help="the in-process engine against transformers' generate")
    command.set_defaults(run=rollouts)
    command = benches.add_parser("step", help="the training step against the textbook's and TRL's")
    command.set_defaults(run=step)
    command = benches.add_parser("whole-step", help="sample, grade and train, against a plain loop and TRL")
    command.set_defaults(run=whole_step)
    command = benches.add_parser("logprobs", help="log-probs over a large vocabulary, in chunks and all at once")
    command.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    command.add_argument("--tokens", type=positive_count, default=4096, help="8 x 512, unless told otherwise")
    command.add_argument("--rounds", type=positive_count, default=2)
    command.set_defaults(run=logprobs)
    command = benches.add_parser("imports", help="seconds until the package is imported")
    command.set_defaults(run=imports)
    command = benches.add_parser("growth", help="how time and memory grow with responses, their length and group size")
    command.set_defaults(run=growth)
    command = benches.add_parser("long", help="whether memory or open files grow over 2,000 small steps")
    command.add_argument("--steps", type=positive_count, default=2000)
    command.set_defaults(run=long)
    command = benches.add_parser(
        "gpu", help="the training step of the course's model with random weights, part by part"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    command.add_argument("--size", choices=["1b", "small"], help="default: 1b on a GPU, small on the CPU")
    command.set_defaults(run=gpu)


def positive_count(text: str) -> int:
    """For argparse: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted are whole numbers from 1")
    return int(text)


def _keep_and_show(name: str, report: Mapping[str, Any], as_text: Callable[[Mapping[str, Any]], str]) -> None:
    from rlhelpers.bench.conditions import write_report

    file = write_report(name, report)
    print(as_text(report))
    print(f"The numbers are in {file}")


def engines(options: argparse.Namespace) -> None:
    from rlhelpers.bench import engines, tables

    report = engines.bench_engines(options.engines)
    _keep_and_show("engines", report, tables.engines_text)


def ahead(options: argparse.Namespace) -> None:
    from rlhelpers.bench import ahead, tables

    report = ahead.bench_ahead()
    _keep_and_show("ahead", report, tables.ahead_text)


def growth(options: argparse.Namespace) -> None:
    from rlhelpers.bench import growth, pictures, training_tables
    from rlhelpers.evidence.figures import save_for_writeup

    report = growth.bench_growth()
    _keep_and_show("growth", report, training_tables.growth_text)
    print(f"The picture is in {save_for_writeup(pictures.growth(report), 'growth')}")


def long(options: argparse.Namespace) -> None:
    from rlhelpers.bench import long_run, tables

    report = long_run.bench_long(options.steps)
    _keep_and_show("long", report, tables.long_text)


def gpu(options: argparse.Namespace) -> None:
    from rlhelpers.bench import gpu, training_tables

    report = gpu.bench_gpu(options.device, options.size)
    _keep_and_show("gpu", report, training_tables.gpu_text)


def grader(options: argparse.Namespace) -> None:
    from rlhelpers.bench import grader, tables

    report = grader.bench_grader(options.responses, options.course)
    _keep_and_show("grader", report, tables.grader_text)


def rollouts(options: argparse.Namespace) -> None:
    from rlhelpers.bench import rollouts, tables

    report = rollouts.bench_rollouts()
    _keep_and_show("rollouts", report, tables.rollouts_text)


def step(options: argparse.Namespace) -> None:
    from rlhelpers.bench import step, training_tables

    report = step.bench_step()
    _keep_and_show("step", report, training_tables.step_text)


def whole_step(options: argparse.Namespace) -> None:
    from rlhelpers.bench import training_tables, whole_step

    report = whole_step.bench_whole_step()
    _keep_and_show("whole-step", report, training_tables.whole_step_text)


def logprobs(options: argparse.Namespace) -> None:
    from rlhelpers.bench import logprobs, training_tables

    report = logprobs.bench_logprobs(options.dtype, options.tokens, options.rounds)
    _keep_and_show("logprobs", report, training_tables.logprobs_text)


def imports(options: argparse.Namespace) -> None:
    from rlhelpers.bench import imports, tables

    report = imports.bench_imports()
    _keep_and_show("imports", report, tables.imports_text)
