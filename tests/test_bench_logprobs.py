"""The benchmark of log-probs over a large vocabulary: its check, its arithmetic, its table; never how fast it is."""

import pytest
import torch

from rlhelpers import cli, paths
from rlhelpers.bench import logprobs
from rlhelpers.bench.logprobs import CONTESTANTS, Work
from rlhelpers.bench.measure import MIB, Spread
from rlhelpers.bench.report import Report, conditions

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"tokens": 12, "hidden": 8, "vocabulary": 40}


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(logprobs, "in_own_process", lambda function, *arguments: function(*arguments))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_compute_the_same(tmp_path, dtype):
    for name in CONTESTANTS:
        logprobs.measure(name, Work(dtype, **SIZES), tmp_path / name)
    results = [torch.load(tmp_path / name) for name in CONTESTANTS]
    assert results[0]["weight gradient"].shape == (40, 8)
    assert {x.dtype for name, x in results[0].items() if name.endswith("gradient")} == {getattr(torch, dtype)}
    differences = logprobs.compare(*results)
    assert list(differences) == ["log-probs", "entropies", "hidden gradient", "weight gradient"]
    logprobs.refuse_unless_same(differences, dtype)


@pytest.mark.slow
def test_a_process_of_its_own_measures_and_writes(tmp_path):
    measured = logprobs.in_own_process(logprobs.measure, "in chunks", Work("float32", **SIZES), tmp_path / "results")
    assert measured[0] > 0 and measured[1] >= 0
    assert torch.load(tmp_path / "results")["entropies"].shape == (12,)


@pytest.mark.parametrize("result", ["log-probs", "entropies", "hidden gradient", "weight gradient"])
def test_another_result_is_refused(monkeypatch, in_this_process, result):
    def broken(hidden, weight, labels):
        log_probs, entropy = logprobs.in_chunks(hidden, weight, labels)
        wrong = {"log-probs": log_probs, "entropies": entropy, "hidden gradient": hidden, "weight gradient": weight}
        if result.endswith("gradient"):
            wrong[result].register_hook(lambda grad: grad * 1.001)
        else:
            with torch.no_grad():
                wrong[result] += 0.001
        return log_probs, entropy

    monkeypatch.setitem(CONTESTANTS, "in chunks", broken)
    monkeypatch.setattr(logprobs, "WORKS", [Work("float32", **SIZES)])
    with pytest.raises(ValueError, match=f"logprobs: no speeds, for in float32 the {result} differ by"):
        logprobs.bench_logprobs(rounds=1)


def test_no_number_is_refused():
    nan = {"log-probs": torch.tensor([float("nan")])}
    with pytest.raises(ValueError, match="no speeds"):
        logprobs.refuse_unless_same(logprobs.compare({"log-probs": torch.ones(1)}, nan), "bfloat16")


def test_the_report_from_numbers():
    gradients = (12 + 40) * 8 * 2
    measured = {
        "all logits": [(s, gradients + extra) for s, extra in ((4.0, 900), (5.0, 1000), (8.0, 1000))],
        "in chunks": [(s, gradients + extra) for s, extra in ((2.0, 125), (5.0, 125), (6.0, 100))],
    }
    work = Work("bfloat16", **SIZES)
    report = logprobs.report(conditions(), [(work, {"log-probs": 1e-6}, measured)])
    plain, ours = report.rows
    assert ours["time_ratio"] == Spread(0.75, 0.5, 1.0) and report.settings["rounds"] == 3
    assert (
        ours["times_less_beyond"] == 8.0 and plain["times_less"] == 1.0 and plain["beyond_gradients_MiB"] == 1000 / MIB
    )
    assert work.gradient_bytes == gradients and ours["times_less"] == (gradients + 1000) / (gradients + 125)
    text = str(report)
    assert "0.750 (0.500 to 1.00)" in text and "log-probs 1.0e-06" in text and "vocabulary 40" in text


def test_the_command(monkeypatch, in_this_process, roots, capsys):
    assert [work.dtype for work in logprobs.WORKS] == ["float32", "bfloat16"]
    monkeypatch.setattr(logprobs, "WORKS", [Work("bfloat16", **SIZES)])
    assert cli.main(["bench", "logprobs"]) == 0
    assert "in chunks" in capsys.readouterr().out
    report = Report.read(paths.RUNS / "bench" / "logprobs.json")
    assert [(row["dtype"], row["log-probs"]) for row in report.rows] == [("bfloat16", name) for name in CONTESTANTS]
    assert report.settings["bfloat16"]["tokens"] == 12 and report.settings["rounds"] == 2
