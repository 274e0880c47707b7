"""The command `rlhelpers`: a few lines over the modules."""

import argparse
import sys
from collections.abc import Sequence

from rlhelpers import paths


def fetch(options: argparse.Namespace) -> None:
    from rlhelpers.tasks.gsm8k import fetch_gsm8k

    fetch_gsm8k()
    print(f"GSM8K is in {paths.GSM8K}")


def tiny(options: argparse.Namespace) -> None:
    from rlhelpers.training.tiny_model import make_tiny

    make_tiny(options.folder)


def exercises(options: argparse.Namespace) -> None:
    from rlhelpers.workbook.exercises import write_exercises

    files = write_exercises(options.folder)
    print(f"{len(files)} notebooks without solutions are in {options.folder}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.  Returns 0, or 1 after saying in one line what is wrong."""
    parser = argparse.ArgumentParser(prog="rlhelpers", description="Tools beside the notebooks of the workbook.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("fetch", help="download a data set into data/, with its checksum verified")
    command.add_argument("dataset", choices=["gsm8k"])
    command.set_defaults(run=fetch)
    command = commands.add_parser("tiny", help="make the tiny base model and its problems again, from nothing")
    command.add_argument("--folder", help="where to write them (default: data/tiny)")
    command.set_defaults(run=tiny)
    command = commands.add_parser("exercises", help="write the notebooks without their solutions, by nbgrader")
    command.add_argument("folder", help="where to write them")
    command.set_defaults(run=exercises)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        print(f"rlhelpers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
