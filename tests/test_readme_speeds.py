"""The README's tables of speeds are what the committed reports hold."""

import json

import pytest

from rlhelpers import paths
from rlhelpers.bench.rounds import Spread

BENCH = paths.ROOT / "data" / "results" / "bench"
README = (paths.ROOT / "README.md").read_text(encoding="utf-8")


def load(name):
    return json.loads((BENCH / f"{name}.json").read_text(encoding="utf-8"))


def row(begins):
    """The cells of the table's row that begins so."""
    [line] = [line for line in README.splitlines() if line.startswith(f"| {begins}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def rows_after(begins, count):
    lines = README.splitlines()
    [start] = [i for i, line in enumerate(lines) if line.startswith(f"| {begins}")]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines[start : start + count]]


@pytest.mark.parametrize(
    ("name", "begins", "others"),
    [
        ("step", "training step on the same", ["textbook", "TRL"]),
        ("whole-step", "sample, grade, train", ["plain loop", "TRL"]),
    ],
)
def test_the_step(name, begins, others):
    found = load(name)["contestants"]
    columns = [found[contestant] for contestant in ("rlhelpers", *others)]
    seconds, ratios, *rest = rows_after(begins, 5 if name == "step" else 3)
    assert seconds == [f"{column['seconds']['median']:.2f}" for column in columns]
    assert ratios == ["1", *(Spread(**column["ratio"]).show(1) for column in columns[1:])]
    memory = rest[1] if name == "step" else rest[0]
    assert memory == [f"{column['extra_bytes'] / 2**20:,.0f}" for column in columns]
    if name == "step":
        assert rest[0] == [f"{column['tokens_read']:,}" for column in columns]


@pytest.mark.parametrize(
    ("workload", "begins"), [("stop string", "to the stop string"), ("fixed length", "64 tokens each")]
)
def test_rollouts(workload, begins):
    found = load("rollouts")["workloads"][workload]["engines"]
    speeds, ratios = rows_after(begins, 2)
    assert speeds == [f"{found[name]['tokens_per_second']['median']:,.0f}" for name in ("torch", "generate")]
    assert ratios == [Spread(**found["torch"]["ratio"]).show(1), "1"]


@pytest.mark.parametrize(
    ("workload", "begins"),
    [
        ("fixed length", "16 prompts x 8, 64 tokens each"),
        ("stop string", "16 prompts x 8, to the stop string"),
        ("validation", "512 prompts x 1"),
    ],
)
def test_engines(workload, begins):
    found = load("engines")["workloads"][workload]["engines"]
    speeds, ratios = rows_after(begins, 2)
    assert speeds == [f"{found[name]['tokens_per_second']['median']:,.0f}" for name in ("torch", "vllm", "vllm-server")]
    assert ratios == ["1", *(Spread(**found[name]["ratio"]).show(2) for name in ("vllm", "vllm-server"))]


def test_log_probs():
    for work in load("logprobs")["works"]:
        for name, found in work["contestants"].items():
            seconds, ratio, memory, beyond = row(f"{work['dtype']}, {name}")
            assert seconds == f"{found['seconds']['median']:.1f}"
            extra = found["extra_bytes"]["median"]
            assert memory.startswith(f"{extra / 2**20:,.0f}")
            assert beyond.startswith(f"{(extra - work['gradient_bytes']) / 2**20:,.0f}")
            if name == "in chunks":
                assert ratio == Spread(**found["ratio"]).show(2)
                assert memory.endswith(f"{found['memory_ratio']:.1f} times less")
                assert beyond.endswith(f"{found['beyond_ratio']:.0f} times less")


def test_growth():
    report = load("growth")
    grows = {"responses": "responses, 16", "tokens": "tokens per response", "group_size": "responses per prompt"}
    for name, begins in grows.items():
        assert row(begins) == [show(report["times"][name][what]["exponent"]) for what in ("training", "sampling")]
    assert row("peak memory against")[0] == show(report["memory"]["exponent"])


def show(fit):
    return f"{fit['exponent']:.2f} ({fit['low']:.2f} to {fit['high']:.2f})"


def test_the_long_run():
    report = load("long")
    steps, memory, files = (
        [f"{reading[name]:,.0f}" for reading in report["readings"]] for name in ("step", "rss_mib", "open_files")
    )
    assert row("long run: steps in the log") == steps and report["lines"] == 2000 and report["each_step_once"]
    assert row("... memory, MiB") == memory
    assert row("... open files") == files
