"""Dropout off for a while, also where gradients are checkpointed."""

from collections.abc import Callable, Iterator
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


@contextmanager
def checkpointing_in_eval_mode(model: Module | Callable) -> Iterator[None]:
    """Forward passes inside keep the gradient checkpoints that the model was told to keep, also in eval mode, in which
    transformers would keep everything.

    It decides by the `training` of a layer that is called.  So the layer says that it is in training until it begins
    to compute, and everything in it is in eval mode, as it is when the backward pass computes it again.
    """
    modules = model.modules() if isinstance(model, Module) else ()  # a function that gives logits has none
    layers = [m for m in modules if getattr(m, "gradient_checkpointing", False) and not m.training]
    hooks = [layer.register_forward_pre_hook(_begin_in_eval_mode) for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, hook in zip(layers, hooks, strict=True):
            layer.training = False
            hook.remove()


def _begin_in_eval_mode(layer: Module, _) -> None:
    layer.training = False
