"""Intervals: their width, what they promise, and that the line of three says when it does not hold."""

import math

import numpy as np
import pytest
import torch
from bad_input import NOT_A_NUMBER, NOT_A_TENSOR, NOT_WHOLE, SOMETHING_ELSE, Nothing, Row, check_refusal, name_of

from rlhelpers.theory.montecarlo import (
    DisagreementError,
    Estimate,
    draw,
    mean_interval,
    three_ways,
    variance_interval,
)


def test_mean_interval_against_the_formula():
    samples = torch.tensor([1.0, 2.0, 3.0, 6.0])
    interval = mean_interval(samples, level=0.95)
    assert interval.mean == 3
    assert interval.half_width == pytest.approx(3.182446 * samples.std().item() / 2, rel=1e-6)  # t(3) at 97.5%
    assert interval.covers(3 + 0.99 * interval.half_width) and not interval.covers(3 + 1.01 * interval.half_width)


def test_intervals_cover_as_often_as_they_promise():
    generator = np.random.default_rng(0)
    draws = generator.normal(2, 3, size=(2000, 50))
    assert np.mean([mean_interval(row, 0.9).covers(2) for row in draws]) == pytest.approx(0.9, abs=0.02)
    large = generator.normal(2, 3, size=(1000, 500))
    assert np.mean([variance_interval(row, 0.9).covers(9) for row in large]) == pytest.approx(0.9, abs=0.03)


def test_variance_interval_is_centred_on_the_unbiased_variance():
    samples = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert variance_interval(samples).mean == pytest.approx(samples.var(dim=0).sum().item(), rel=1e-12)
    assert variance_interval(samples[:, 0]).mean == pytest.approx(samples[:, 0].var().item(), rel=1e-12)


def test_where_nothing_varies_the_interval_is_a_point():
    interval = variance_interval(torch.full((10,), 0.1, dtype=torch.float64))
    assert interval.half_width == pytest.approx(0, abs=1e-15)
    assert interval.covers(0)
    assert not interval.covers(1e-6)


def test_draw_is_seeded_and_follows_the_probabilities():
    chances = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    drawn = draw(chances, (10_000, 2), seed=3)
    assert drawn.dtype == torch.int64 and drawn.shape == (10_000, 2)
    assert torch.equal(drawn, draw(chances, (10_000, 2), seed=3))
    assert not torch.equal(drawn, draw(chances, (10_000, 2), seed=4))
    assert (drawn.flatten().bincount() / drawn.numel()).tolist() == pytest.approx([0.1, 0.6, 0.3], abs=0.015)


def test_three_ways_prints_one_line(capsys):
    three_ways("variance", 0.0025, 0.0025 + 1e-14, Estimate(0.00251, 0.0001))
    assert capsys.readouterr().out == (
        "variance: closed 0.0025  enumerated 0.0025 (exact to 1e-12)  Monte Carlo 0.00251 +- 0.0001 (inside)\n"
    )


@pytest.mark.parametrize(
    ("closed", "enumerated", "message"),
    [
        (1.0, 1.0 + 1e-9, r"\(DIFFERS\) .*\(inside\)"),
        (2.0, 2.0, r"\(exact to 1e-12\) .*\(OUTSIDE\)"),
        (math.nan, 1.0, r"\(DIFFERS\) .*\(OUTSIDE\)"),
    ],
)
def test_three_ways_says_when_they_disagree(capsys, closed, enumerated, message):
    with pytest.raises(DisagreementError, match=message):
        three_ways("mean", closed, enumerated, Estimate(1.0, 0.5))
    assert capsys.readouterr().out == ""


def test_the_printed_line_does_not_depend_on_the_last_bits(capsys):
    for nearly in (0.0091125 * (1 - 1e-15), 0.0091125, 0.0091125 * (1 + 1e-15)):
        three_ways("tie", nearly, nearly, Estimate(nearly, 1))
    for zero in (-1e-17, 0.0, 1e-34):
        three_ways("zero", zero, zero, Estimate(zero, 1))
    assert len(set(capsys.readouterr().out.splitlines())) == 2


# ---- bad input is refused by name; a new case is a row of ROWS

CHANCES = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
SAMPLES = np.arange(5.0)
GOOD = {
    "draw": (draw, {"probabilities": CHANCES, "shape": 3, "seed": 0}),
    "mean_interval": (mean_interval, {"samples": SAMPLES, "level": 0.9}),
    "variance_interval": (variance_interval, {"samples": SAMPLES, "level": 0.9}),
    "three_ways": (three_ways, {"name": "mean", "closed": 1.0, "enumerated": 1.0, "sampled": Estimate(1.0, 0.5)}),
}
NO_CHANCES = [-CHANCES, 2 * CHANCES, CHANCES[:2]]
NO_SAMPLES = [None, "text", [], [1.0], 3, ["a", "b"], [1.0, math.nan], [1.0, math.inf], [Nothing(), Nothing()]]
ROWS = [
    Row("draw", "probabilities", NOT_A_TENSOR),
    Row("draw", "probabilities", NO_CHANCES, "probabilities: one is below 0, or their sum is not 1"),
    Row("draw", "probabilities", [CHANCES * math.nan], "probabilities: not all of its numbers are finite"),
    Row("draw", "shape", [*NOT_WHOLE, (3, -1), (3, 0.5)]),
    Row("draw", "seed", NOT_WHOLE),
    Row("mean_interval", "samples", [*NO_SAMPLES, np.ones((3, 2))]),
    Row("mean_interval", "level", [*NOT_A_NUMBER, 0, 1, -1, math.inf]),
    Row("variance_interval", "samples", NO_SAMPLES),
    Row("variance_interval", "level", [*NOT_A_NUMBER, 0, 1]),
    Row("three_ways", "closed", [None, "text", [], Nothing()]),
    Row("three_ways", "enumerated", [None, "text", [], Nothing()]),
    Row("three_ways", "sampled", SOMETHING_ELSE),
]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_bad_input_is_refused_by_name(row):
    check_refusal(GOOD, row)
