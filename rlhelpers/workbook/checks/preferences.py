"""The exercise of notebook 08: the loss of DPO."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhelpers.workbook.checks.exercise import Exercise, Property


def _pairs(*rows: tuple[float, float, float, float], beta: float = 0.5) -> dict:
    names = ("chosen", "rejected", "chosen_ref", "rejected_ref")
    return dict(zip(names, torch.tensor(rows).unbind(dim=1), strict=True)) | {"beta": beta}


def _ordinary() -> Iterator[dict]:
    yield _pairs((-1.0, -1.0, -1.0, -1.0))
    yield _pairs((-1.0, -3.0, -2.0, -2.0))
    yield _pairs((-4.0, -3.0, -2.0, -2.0), beta=0.1)
    yield _pairs((-9.0, -3.0, -2.0, -6.5), (-1.0, -3.0, -2.0, -2.0), (-30.0, -20.0, -25.0, -25.0), beta=2.0)


def _far() -> Iterator[dict]:
    yield _pairs((-2000.0, 0.0, 0.0, 0.0), beta=0.1)
    yield _pairs((0.0, -2000.0, 0.0, 0.0), (-5000.0, -1.0, -1.0, -1.0), beta=1.0)


def _loss(chosen: Tensor, rejected: Tensor, chosen_ref: Tensor, rejected_ref: Tensor, beta: float) -> Tensor:
    return -logsigmoid(beta * ((chosen - chosen_ref) - (rejected - rejected_ref)))


dpo_loss = Exercise(
    "dpo_loss",
    _loss,
    (
        Property("-log sigma of the margin of each pair, of shape (pairs,)", _ordinary),
        Property("finite where a margin is huge", _far),
    ),
    {
        "the rejected response preferred": lambda chosen, rejected, chosen_ref, rejected_ref, beta: _loss(
            rejected, chosen, rejected_ref, chosen_ref, beta
        ),
        "without the reference": lambda chosen, rejected, chosen_ref, rejected_ref, beta: (
            -logsigmoid(beta * (chosen - rejected))
        ),
        "without beta": lambda chosen, rejected, chosen_ref, rejected_ref, beta: _loss(
            chosen, rejected, chosen_ref, rejected_ref, 1.0
        ),
        "the mean over the pairs": lambda **given: _loss(**given).mean(),
        "the logarithm of a sigmoid, which becomes 0": lambda chosen, rejected, chosen_ref, rejected_ref, beta: (
            -torch.sigmoid(beta * ((chosen - chosen_ref) - (rejected - rejected_ref))).log()
        ),
    },
)
