"""What a person sees of many runs: a table that is kept up to date in a terminal, else a line for each change."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

SECONDS = 1.0  # between two looks
COLOURS = {"complete": "green", "running": "cyan", "failed": "red", "killed": "red", "busy elsewhere": "yellow"}
QUIET = ("complete", "waiting")  # hidden first where the terminal is too low


class Row(NamedTuple):
    name: str
    state: str
    detail: str


@contextmanager
def show(rows: Callable[[], Sequence[Row]]) -> Iterator[None]:
    """While this is open, what `rows` returns is shown, asked for every second."""
    console = Console()
    if console.is_terminal:
        with Live(
            get_renderable=lambda: as_table(rows(), console.height - 4),
            console=console,
            refresh_per_second=1 / SECONDS,
            transient=True,
        ):
            yield
    else:
        with _lines(rows):
            yield


@contextmanager
def _lines(rows: Callable[[], Sequence[Row]]) -> Iterator[None]:
    seen = {row.name: row.state for row in rows()}
    ended = threading.Event()

    def watch():
        while True:
            is_last = ended.wait(SECONDS)
            for row in rows():
                if seen[row.name] != row.state:
                    seen[row.name] = row.state
                    print(f"{row.state:10} {row.name}  {row.detail}".rstrip(), flush=True)
            if is_last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def as_table(rows: Sequence[Row], height: int) -> Table:
    """At most `height` rows: those that are complete or wait give way to the others."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].state in QUIET)
    shown = sorted(order[: max(1, height)])
    table = Table(caption=counts(rows), box=None, caption_justify="left", pad_edge=False)
    for heading in ("run", "state", ""):
        table.add_column(heading, overflow="fold" if heading == "run" else "ellipsis", no_wrap=heading != "run")
    for row in (rows[i] for i in shown):
        state = Text(row.state, style=COLOURS.get(row.state, ""))
        table.add_row(Text(row.name), state, Text(row.detail))
    return table


def counts(rows: Sequence[Row]) -> str:
    return ", ".join(f"{n} {state}" for state, n in Counter(row.state for row in rows).items())


def as_lines(rows: Sequence[Row]) -> str:
    """The plan, or what became of it."""
    width = max((len(row.state) for row in rows), default=0)
    return "\n".join(f"{row.state:{width}}  {row.name}  {row.detail}".rstrip() for row in rows)


def summary(rows: Sequence[Row]) -> str:
    """A line for each run that is not complete, and the counts."""
    unfinished = [row for row in rows if row.state != "complete"]
    return "\n".join([*([as_lines(unfinished)] if unfinished else []), counts(rows)])
