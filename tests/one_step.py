"""One train step on rows (prompt, response, reward), and the weights before and after."""

import torch

from rlhelpers.kernels import grpo_train_step


def graded(response, ground_truth):
    """The ground truth is the reward, so that a test can give any."""
    return {"reward": float(ground_truth), "format_reward": 1.0}


def step(model, tokenizer, rows, group_size=4, *, cuts=1, max_grad_norm=None, optimizer=None, **arguments):
    prompts, responses, rewards = zip(*rows, strict=True)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    truths = [str(reward) for reward in rewards]
    return grpo_train_step(
        model, tokenizer, optimizer, cuts, max_grad_norm, graded, prompts, responses, truths, group_size, **arguments
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
