"""The benchmark of growth: exponents, what is refused, the report, its table and its picture; never how fast it is."""

import json
import math

import pytest

from rlhelpers import cli, paths
from rlhelpers.bench import conditions, growth, pictures, training_tables
from rlhelpers.bench.growth import Seconds, Size, exponent
from rlhelpers.models import load_policy
from rlhelpers.rollouts import TorchEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SWEEPS = {"responses": (4, 8, 16), "tokens": (2, 4, 8), "group_size": (2, 4, 8)}
SMALL = Size(responses=8, tokens=4, group_size=2)


@pytest.fixture(scope="module")
def tiny():
    return load_policy("tiny", "cpu")


def test_a_power_law_is_found_and_chance_widens_its_interval():
    values = [1, 2, 4, 8, 16]
    found = exponent(values, [3 * x**1.5 for x in values])
    assert found["exponent"] == pytest.approx(1.5) and found["scale"] == pytest.approx(3)
    assert found["low"] == pytest.approx(1.5) == found["high"]
    scattered = exponent(values, [3 * x**1.5 * f for x, f in zip(values, (1.1, 0.9, 1.0, 1.2, 0.9), strict=True)])
    assert scattered["low"] < 1.5 < scattered["high"]


def test_the_interval_by_hand():
    """Of the logarithms 0, 1, 3 at 0, 1, 2: slope 3/2, residuals 1/6, -1/3, 1/6, and Student's t with one degree of
    freedom, whose quantile of 97.5% is tan(0.475 pi)."""
    found = exponent([1, math.e, math.e**2], [1, math.e, math.e**3])
    half = math.tan(0.475 * math.pi) * math.sqrt((1 / 36 + 1 / 9 + 1 / 36) / 2)
    assert (found["low"], found["high"]) == (pytest.approx(1.5 - half), pytest.approx(1.5 + half))


def test_the_report_from_numbers():
    sizes = [Size(**{name: value}) for name, values in growth.SWEEPS.items() for value in values]
    measured = {
        s: [Seconds(s.responses * s.tokens, s.tokens), Seconds(1.1 * s.responses * s.tokens, 2.0)] for s in sizes
    }
    report = growth.report(
        conditions.conditions(), growth.SWEEPS, Size(), measured, {64: 2**28, 128: 2**28, 256: 2**28}
    )
    times = report["times"]
    assert times["responses"]["training"]["seconds"][0] == {
        "median": 1075.2,
        "low": 1024,
        "high": pytest.approx(1126.4),
    }
    assert times["responses"]["training"]["exponent"]["exponent"] == pytest.approx(1)
    assert times["group_size"]["training"]["exponent"]["exponent"] == pytest.approx(0)
    assert report["memory"]["exponent"]["exponent"] == 0 and report["rounds"] == 2
    text = training_tables.growth_text(report)
    assert "1.00 (1.00 to 1.00)" in text and "128 responses of 64 tokens in groups of 8" in text
    line = next(line for line in text.splitlines() if "MiB" in line)
    assert line.split() == ["responses", "64", "256", "training,", "MiB", "256", "256", "0.00", "(0.00", "to", "0.00)"]


def test_a_batch_is_what_its_size_says(tiny):
    policy, tokenizer = tiny
    batch = growth._batch(SMALL, policy)
    assert len(batch.rewards) == 8 and {len(response) for _, response in batch.token_ids} == {4}
    assert len({tuple(prompt) for prompt, _ in batch.token_ids}) == 4 and batch.tokens == 8 * (128 + 4)
    rollouts = growth._sample(SMALL, policy, tokenizer, 0)
    assert [len(c.token_ids) for rollout in rollouts for c in rollout.completions] == [4] * 8
    weights = [p.clone() for p in policy.parameters()]
    growth.check(SMALL, policy, tokenizer)
    assert all(p.equal(w) for p, w in zip(policy.parameters(), weights, strict=True))


def test_less_work_than_asked_is_refused(tiny, monkeypatch):
    class Lazy(TorchEngine):
        def generate(self, prompts, sampling):
            return super().generate(prompts[1:], sampling)

    monkeypatch.setattr(growth, "TorchEngine", Lazy)
    with pytest.raises(ValueError, match="no speeds, for torch gave 6 samples"):
        growth.check(SMALL, *tiny)
    monkeypatch.undo()
    unpaid = growth.make_batch(100, 4, 2, (3, 3), (4, 4), without_signal=1)
    monkeypatch.setattr(growth, "_batch", lambda size, policy: unpaid)
    with pytest.raises(ValueError, match=r"growth: no times, for Size.* was not trained on"):
        growth.check(SMALL, *tiny)


def test_the_command_writes_numbers_and_a_picture(monkeypatch, roots, tmp_path, capsys):
    """Memory is measured in processes of its own, which know nothing of a test."""
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    bench = growth.bench_growth
    small = {"sweeps": SWEEPS, "batches": (32, 64, 96), "size": SMALL, "rounds": 1}
    monkeypatch.setattr(growth, "bench_growth", lambda: bench(**small))
    assert cli.main(["bench", "growth"]) == 0
    assert "exponent" in capsys.readouterr().out
    report = json.loads((paths.RUNS / "bench" / "growth.json").read_text(encoding="utf-8"))
    assert (
        report["times"]["tokens"]["values"] == [2, 4, 8] and len(report["times"]["tokens"]["sampling"]["seconds"]) == 3
    )
    assert all(extra > 1e6 for extra in report["memory"]["extra_bytes"])
    assert (tmp_path / "figures" / "growth.png").stat().st_size > 10_000
    titles = [axes.get_title() for axes in pictures.growth(report).axes]
    assert titles[0] == "responses of 4 tokens, in groups of 2" and titles[3] == f"{titles[0]}, 32 rows at a time"
