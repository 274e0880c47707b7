"""The command `rlhelpers`: a few lines over the modules."""

import argparse
import ast
import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlhelpers import paths
from rlhelpers.bench.commands import add_benches, positive_count


def doctor(options: argparse.Namespace) -> int:
    from rlhelpers.doctor.machine import look_at_machine
    from rlhelpers.doctor.report import as_table, examine
    from rlhelpers.training.config import make_config

    config = make_config(**{"preset": options.preset} | _settings(options.settings))
    findings = examine(look_at_machine(config), config)
    print(as_table(findings))
    return int(any(finding.status == "problem" for finding in findings))


def _settings(texts: Sequence[str]) -> dict[str, object]:
    pairs = [_setting(text) for text in texts]
    _only_once([name for name, _ in pairs], "with one value")
    return dict(pairs)


def _setting(text: str) -> tuple[str, object]:
    """name=value, the value as papermill's -p reads it: a number, True, False or None where it is one, else text."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ValueError(f"settings: got {text!r}; accepted is name=value, such as max_tokens=512")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


def fetch(options: argparse.Namespace) -> None:
    from rlhelpers.tasks.gsm8k import fetch_gsm8k

    fetch_gsm8k()
    print(f"GSM8K is in {paths.GSM8K}")


def tiny(options: argparse.Namespace) -> None:
    from rlhelpers.tiny.model import make_tiny

    make_tiny(options.folder)


def sweep(options: argparse.Namespace) -> int:
    import joblib
    import torch

    from rlhelpers.sweep import grid, plan, workers

    pairs = [_values(text) for text in options.parameters]
    pairs += [] if options.seeds is None else [("seed", options.seeds)]
    _only_once([name for name, _ in pairs], "with commas between the values")
    if options.gpus_per_run is not None and options.engine != "ray":
        raise ValueError("gpus_per_run: only with --engine ray, which gives every run GPUs of its own")
    runs, remarks = plan.make_plan(grid.read(Path(options.what), dict(pairs)), options.resume)
    if options.dry_run:
        print("\n".join([*workers.as_lines(runs), *remarks, workers.counts(runs)]))
        return 0
    print(workers.counts(runs), flush=True)
    if options.engine == "ray":
        some = workers.on_ray(options.jobs, options.gpus_per_run or 0)
    else:  # on a GPU one after the other: nobody knows whether two fit
        some = workers.on_this_machine(options.jobs or (1 if torch.cuda.is_available() else joblib.cpu_count()))
    return workers.sweep(runs, some, options.resume)


def _only_once(names: Sequence[str], how: str) -> None:
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise ValueError(f"{', '.join(twice)}: given twice; accepted is once, {how}")


def _values(text: str) -> tuple[str, str]:
    name, sign, values = text.partition("=")
    if not sign:
        raise ValueError(
            f"-p: got {text!r}; accepted is name=value or name=value,value, such as learning_rate=1e-4,3e-4"
        )
    return name, values


def _folder(text: str) -> str:
    """An empty text, as of a shell variable that is not set, would be the working directory, or data/tiny itself."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted is the name of a folder")
    return text


def _gpus(text: str) -> float:
    """Ray divides a GPU, and gives several only whole."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 <= number <= 1 or (number > 1 and number.is_integer()):
            return number
    raise argparse.ArgumentTypeError(f"got {text!r}; accepted are numbers from 0, above 1 whole ones")


def collect(options: argparse.Namespace) -> None:
    from rlhelpers.evidence.statistics import counted
    from rlhelpers.evidence.tables import collect

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always", UserWarning)
        try:
            made, left = collect(*options.experiments)
        finally:
            for text in dict.fromkeys(f"{remark.message}" for remark in remarks):
                print(f"rlhelpers: {text}", file=sys.stderr)
    print(f"{counted(len(made), 'run')} more in data/results; {len(left)} were there already")


def writeup(options: argparse.Namespace) -> None:
    from rlhelpers.workbook.writeup import export

    for line in export():
        print(line)


def evaluate(options: argparse.Namespace) -> None:
    from rlhelpers.benchmarks.ask import evaluate_benchmark
    from rlhelpers.benchmarks.report import read_report
    from rlhelpers.training.config import make_config

    settings = {"model": options.model, "engine": options.engine, "max_tokens": options.max_tokens}
    config = make_config(**settings | _settings(options.settings))
    folder = evaluate_benchmark(options.benchmark, options.data, config)
    print(f"{read_report(folder)}\n{folder}")


def judge(options: argparse.Namespace) -> None:
    from rlhelpers.benchmarks.judge import Judge, judge_safety
    from rlhelpers.benchmarks.report import read_report

    judge_safety(options.folder, Judge(options.url, options.model))
    print(read_report(options.folder))


def exercises(options: argparse.Namespace) -> None:
    from rlhelpers.workbook.edition import write_exercises

    files = write_exercises(options.folder)
    print(f"{len(files)} notebooks without solutions are in {options.folder}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not how everything is used."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; {self.prog} --help says more\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  Returns 0; 2 after saying what is wrong with the arguments, a line for each, or that a file
    which they name is not there; 1 after saying in one line why it failed, and when doctor finds a problem."""
    parser = _Parser(prog="rlhelpers", description="Tools beside the notebooks of the workbook.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("doctor", help="say before a run whether this machine can do it, and what is missing")
    command.add_argument("--preset", default="tiny", help="tiny, cpu-vllm, course, single-gpu or two-gpu")
    command.add_argument("settings", nargs="*", metavar="name=value", help="what differs, as in papermill's -p")
    command.set_defaults(run=doctor)
    command = commands.add_parser("fetch", help="download a data set into data/, with its checksum verified")
    command.add_argument("dataset", choices=["gsm8k"])
    command.set_defaults(run=fetch)
    command = commands.add_parser("tiny", help="make the tiny base model and its problems again, from nothing")
    command.add_argument("--folder", type=_folder, help="where to write them (default: data/tiny)")
    command.set_defaults(run=tiny)
    command = commands.add_parser("bench", help="measure on this machine, side by side")
    add_benches(command.add_subparsers(required=True, metavar="what"))
    command = commands.add_parser("collect", help="copy the metrics of finished runs to data/results, to be committed")
    command.add_argument("experiments", nargs="*", help="default: those that data/results has")
    command.set_defaults(run=collect)
    command = commands.add_parser("writeup", help="notebook 09 as a page without code, and as PDF where Chromium is")
    command.set_defaults(run=writeup)
    command = commands.add_parser("sweep", help="execute a notebook for the product of some values, in parallel")
    command.add_argument("what", help="a notebook, or a YAML file of several, such as data/experiments.yaml")
    command.add_argument("--seeds", metavar="0-3", help="whole numbers, with commas, or from-to")
    command.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="name=value,value", help="may be repeated"
    )
    command.add_argument("--engine", choices=["local", "ray"], default="local", help="this machine, or a Ray cluster")
    command.add_argument(
        "--jobs", type=positive_count, help="runs at once (default: cores; one on a GPU; all that Ray has room for)"
    )
    command.add_argument("--gpus-per-run", type=_gpus, metavar="N", help="with --engine ray; it may be a fraction")
    command.add_argument("--resume", action="store_true", help="go on with unfinished runs, from their checkpoints")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.set_defaults(run=sweep)
    command = commands.add_parser("evaluate", help="ask a model a benchmark, greedily and without examples")
    command.add_argument("benchmark", help="mmlu, gsm8k, alpaca_eval or simple_safety_tests")
    command.add_argument("--data", type=Path, required=True, help="the benchmark's file; of MMLU its folder")
    command.add_argument("--model", default="tiny", help="tiny, a Hugging Face name, or a directory")
    command.add_argument("--engine", default="torch", help="torch, vllm or vllm-server")
    command.add_argument("--max-tokens", type=positive_count, default=512, help="longest generation (default: 512)")
    command.add_argument(
        "-p", dest="settings", action="append", default=[], metavar="name=value", help="others, such as kv_cache_gib=20"
    )
    command.set_defaults(run=evaluate)
    command = commands.add_parser("judge", help="let a model say which answers to simple_safety_tests are safe")
    command.add_argument("folder", type=Path, help="what `evaluate simple_safety_tests` has written")
    command.add_argument("--url", required=True, help="of an OpenAI-compatible API, such as http://127.0.0.1:8000/v1")
    command.add_argument("--model", required=True, help="the judge's name there")
    command.set_defaults(run=judge)
    command = commands.add_parser("exercises", help="write the notebooks without their solutions, by nbgrader")
    command.add_argument("folder", type=_folder, help="where to write them")
    command.set_defaults(run=exercises)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(f"rlhelpers: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError | IsADirectoryError | FileExistsError) else 1


if __name__ == "__main__":
    sys.exit(main())
