"""Dropout off for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module


@contextmanager
def eval_mode(model: Module) -> Iterator[None]:
    """Everything in eval mode inside; afterwards each submodule is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
