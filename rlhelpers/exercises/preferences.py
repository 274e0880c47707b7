"""Exercises of notebook 08: the loss of DPO, and which tokens are summed."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhelpers.exercises.exercise import Exercise
from rlhelpers.kernels.tokens import pad_prompts_and_outputs


def _pairs(*rows: tuple[float, float, float, float], beta: float = 0.5) -> dict:
    names = ("chosen", "rejected", "chosen_ref", "rejected_ref")
    return dict(zip(names, torch.tensor(rows).unbind(dim=1), strict=True)) | {"beta": beta}


REFERENCE = ("chosen_ref", "rejected_ref")


def _margin(chosen: Tensor, rejected: Tensor, chosen_ref: Tensor, rejected_ref: Tensor, beta: float) -> Tensor:
    return beta * ((chosen - chosen_ref) - (rejected - rejected_ref))


def _loss(chosen: Tensor, rejected: Tensor, chosen_ref: Tensor, rejected_ref: Tensor, beta: float) -> Tensor:
    return -logsigmoid(_margin(chosen, rejected, chosen_ref, rejected_ref, beta))


dpo_loss = Exercise(
    "dpo_loss",
    _loss,
    {
        "-log sigma of the margin of each pair, of shape (pairs,)": [
            _pairs((-1.0, -1.0, -1.0, -1.0)),
            _pairs((-1.0, -3.0, -2.0, -2.0)),
            _pairs((-4.0, -3.0, -2.0, -2.0), beta=0.1),
            _pairs((-9.0, -3.0, -2.0, -6.5), (-1.0, -3.0, -2.0, -2.0), (-30.0, -20.0, -25.0, -25.0), beta=2.0),
        ],
        "finite where a margin is huge": [
            _pairs((-2000.0, 0.0, 0.0, 0.0), beta=0.1),
            _pairs((0.0, -2000.0, 0.0, 0.0), (-5000.0, -1.0, -1.0, -1.0), beta=1.0),
        ],
    },
    {
        "the rejected response preferred": lambda chosen, rejected, chosen_ref, rejected_ref, beta: _loss(
            rejected, chosen, rejected_ref, chosen_ref, beta
        ),
        "without the reference": lambda **given: _loss(**given | dict.fromkeys(REFERENCE, 0.0)),
        "without beta": lambda **given: _loss(**given | {"beta": 1.0}),
        "the mean over the pairs": lambda **given: _loss(**given).mean(),
        "the logarithm of a sigmoid, which becomes 0": lambda **given: -torch.sigmoid(_margin(**given)).log(),
    },
)


def _rows(*rows: tuple[list[int], list[int]], pad_id: int) -> dict:
    prompts, responses = zip(*rows, strict=True)
    labels = pad_prompts_and_outputs(prompts, responses, pad_id)["labels"]
    return {
        "log_probs": -torch.arange(1.0, labels.numel() + 1).view(labels.shape),
        "labels": labels,
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
        "response_lengths": torch.tensor([len(response) for response in responses]),
        "pad_id": pad_id,
    }


def _response_sums(
    log_probs: Tensor, labels: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, pad_id: int
) -> Tensor:
    position = torch.arange(1, labels.shape[1] + 1)  # of the label in its row
    start = prompt_lengths[:, None]
    return torch.where((position >= start) & (position < start + response_lengths[:, None]), log_probs, 0.0).sum(dim=1)


response_sums = Exercise(
    "response_sums",
    _response_sums,
    {
        "over the tokens of the response, and none of the prompt": [
            _rows(([5], [6, 7]), pad_id=0),
            _rows(([5, 5, 8], [6, 7, 9]), pad_id=0),
        ],
        "not over padding": [_rows(([5], [6, 7]), ([5, 5], [6, 7, 8]), pad_id=0)],
        "over the end of the text too, also where the tokenizer pads with it": [
            _rows(([5], [6, 1]), pad_id=1),
            _rows(([5], [6, 1]), ([5, 8], [6, 7, 7, 1]), pad_id=1),
        ],
    },
    {
        "the prompt in the sum": lambda log_probs, labels, pad_id, **_: torch.where(
            labels != pad_id, log_probs, 0.0
        ).sum(dim=1),
        "a mean instead of a sum": lambda **given: _response_sums(**given) / given["response_lengths"],
        "a mask that is one place late": lambda **given: _response_sums(
            **given | {"prompt_lengths": given["prompt_lengths"] + 1}
        ),
    },
)
