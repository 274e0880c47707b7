"""The benchmark of growth: exponents, what is refused, the report, its table and its picture; never how fast it is."""

import math

import pytest

from rlhelpers import cli, paths
from rlhelpers.bench import growth
from rlhelpers.bench.growth import Size, exponent
from rlhelpers.bench.measure import Spread
from rlhelpers.bench.report import Report, conditions
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
    measured = {s: [(s.responses * s.tokens, s.tokens), (1.1 * s.responses * s.tokens, 2.0)] for s in sizes}
    extra = {64: 2**28, 128: 2**28, 256: 2**28}
    report = growth.report(conditions(), measured, extra)
    rows = {(row["grows"], row["measured"]): row for row in report.rows}
    training = rows["responses", growth.TRAINING]
    assert training["results"][0] == Spread(pytest.approx(1075.2), 1024, pytest.approx(1126.4))
    assert training["at_first"] == training["results"][0].median and (training["from"], training["to"]) == (16, 256)
    assert training["exponent"] == pytest.approx(1) and training["values"] == [16, 32, 64, 128, 256]
    assert rows["group_size", growth.TRAINING]["exponent"] == pytest.approx(0)
    memory = rows["responses", growth.MEMORY]
    assert memory["exponent"] == 0 and memory["at_first"] == memory["at_last"] == 256 and memory["to"] == 256
    assert report.settings["rounds"] == 2 and "responses: 128\ntokens: 64\ngroup size: 8" in str(report)


def test_a_batch_is_what_its_size_says(tiny):
    policy, tokenizer = tiny
    rows = growth._rows(SMALL, policy)
    assert len(rows.rewards) == 8 and {len(response) for _, response in rows.token_ids} == {4}
    assert len({tuple(prompt) for prompt, _ in rows.token_ids}) == 4 and rows.tokens == 8 * (128 + 4)
    rollouts = TorchEngine(policy, tokenizer).generate(*growth._requests(SMALL, 0))
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
    unpaid = growth.make_up_rows(100, 4, 2, (3, 3), (4, 4), without_signal=1)
    monkeypatch.setattr(growth, "_rows", lambda size, policy: unpaid)
    with pytest.raises(ValueError, match=r"growth: no times, for Size.* was not trained on"):
        growth.check(SMALL, *tiny)


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own():
    assert growth.in_own_process(growth.extra_bytes, SMALL) > 1e6


@pytest.mark.slow
def test_the_command_writes_numbers_and_a_picture(monkeypatch, roots, tmp_path, capsys):
    monkeypatch.setattr(paths, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(growth, "in_own_process", lambda function, size: 2**20 * (100 + size.responses))
    for name, value in {"SWEEPS": SWEEPS, "BATCHES": (32, 64, 96), "SIZE": SMALL, "ROUNDS": 1}.items():
        monkeypatch.setattr(growth, name, value)
    assert cli.main(["bench", "growth"]) == 0
    assert "exponent" in capsys.readouterr().out
    report = Report.read(paths.RUNS / "bench" / "growth.json")
    rows = {(row["grows"], row["measured"]): row for row in report.rows}
    assert len(rows) == 7 and rows["tokens", growth.SAMPLING]["values"] == [2, 4, 8]
    assert len(rows["tokens", growth.SAMPLING]["results"]) == 3
    assert rows["responses", growth.MEMORY]["results"][0] == Spread(132.0, 132.0, 132.0)
    assert (tmp_path / "figures" / "growth.png").stat().st_size > 10_000
    titles = [axes.get_title() for axes in growth.draw(report).axes]
    assert titles[0] == "responses of 4 tokens, in groups of 2" and titles[3] == f"{titles[0]}, 32 rows at a time"
