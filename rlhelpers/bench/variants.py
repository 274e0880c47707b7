"""The training step with and without each thing that makes it fast.

The package finds out from model and batch what it can do; a variant without it is told that it cannot.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlhelpers.bench.flops import Read, microbatches
from rlhelpers.bench.made_up import MadeUpBatch, train
from rlhelpers.doctor.memory import Architecture, activation_bytes, checkpointed_bytes, logit_bytes, step_bytes
from rlhelpers.kernels import logprobs
from rlhelpers.kernels.estimators import group_mean

BACKEND = "inductor"


@dataclass(frozen=True)
class Variant:
    """`chunked`: log-probs of the responses alone, over the vocabulary in chunks; else all logits are held.  `shared`:
    a prompt is read once for its group.  `pruned`: rows without an advantage are not read.  `compiled`: after
    `compile_parts`, which cannot be taken back."""

    name: str
    chunked: bool = False
    shared: bool = False
    pruned: bool = False
    attention: str = "sdpa"
    checkpointed: bool = False
    compiled: bool = False

    def train(
        self, model: PreTrainedModel, optimizer: Optimizer, batch: MadeUpBatch, microbatch_size: int
    ) -> tuple[Tensor, dict[str, Tensor | float | None]]:
        """A step; see made_up.train."""
        with self._applied(model):
            return train(model, optimizer, batch, microbatch_size, "mean" if self.pruned else almost_mean)

    def scored_tokens(self, batch: MadeUpBatch, reads: Sequence[Read]) -> int:
        """At how many tokens the head is applied."""
        if not self.chunked:
            return sum(read.tokens for read in reads)
        rows = enumerate(response for _, response in batch.token_ids)
        return sum(len(response) for i, response in rows if batch.has_signal(i) or not self.pruned)

    def predicted_bytes(self, model: Architecture, number: int, reads: Sequence[Read]) -> int:
        """Of the largest microbatch, beside weights, gradients and optimizer, counted as `rlhelpers doctor` does before
        a run; `number` bytes per number."""
        return max(self._predicted(model, number, microbatch) for microbatch in microbatches(reads))

    def _predicted(self, model: Architecture, number: int, reads: Sequence[Read]) -> int:
        tokens = sum(read.tokens for read in reads)
        if not self.chunked:
            return activation_bytes(model, tokens, number) + logit_bytes(model, tokens, number)
        if self.checkpointed:
            return sum(checkpointed_bytes(model, number, tokens, tokens).values())
        last = [read for read in reads if read.past == reads[-1].past]  # the responses, after all of their prompts
        responses = sum(read.tokens for read in last)
        copied = sum(read.rows * read.past for read in last)
        return sum(step_bytes(model, number, responses, tokens - responses, copied).values())

    @contextmanager
    def _applied(self, model: PreTrainedModel) -> Iterator[None]:
        model.set_attn_implementation(self.attention)
        with ExitStack() as stack:
            if not self.chunked:
                stack.enter_context(patch.object(logprobs, "head_is_linear", return_value=False))
            if not self.shared:
                stack.enter_context(patch.object(logprobs, "can_share", return_value=False))
            if self.checkpointed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                stack.callback(model.gradient_checkpointing_disable)
            yield


def ladder(on_gpu: bool) -> list[Variant]:
    """Each has what those before it have, and one thing more; but for checkpointing, which shares no prompts, and is
    taken off again."""
    plain = Variant("plain")
    chunked = replace(plain, name="+ chunked log-probs", chunked=True)
    shared = replace(chunked, name="+ shared prompts", shared=True)
    pruned = replace(shared, name="+ pruning", pruned=True)
    variants = [plain, chunked, shared, pruned]
    if on_gpu and importlib.util.find_spec("flash_attn"):
        variants.append(replace(pruned, name="+ flash-attention", attention="flash_attention_2"))
    fastest = variants[-1]
    checkpointed = replace(fastest, name="checkpointed, prompts not shared", shared=False, checkpointed=True)
    return [*variants, checkpointed, replace(fastest, name="+ torch.compile of norms and MLPs", compiled=True)]


def almost_mean(rewards: Tensor) -> Tensor:
    """A baseline that leaves a response of a group without rewards an advantage above 0, and too small to matter."""
    return group_mean(rewards) - 1e-30


def compile_parts(model: PreTrainedModel) -> None:
    """Norms and MLPs of an OLMo-2 model: what is in all layers the same, is compiled once, and knows no cache."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(backend=BACKEND, dynamic=True)


class GradientKeeper:
    """In an optimizer's place: keeps the gradient and leaves the weights alone."""

    def __init__(self, model: PreTrainedModel):
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self) -> None:
        self.gradients = [p.grad.detach().clone() for p in self.param_groups[0]["params"]]


def difference(gradients: list[Tensor], expected: list[Tensor]) -> float:
    """|g - g'| / |g'|, in the Euclidean norm over all parameters."""
    pairs = zip(gradients, expected, strict=True)
    off = torch.stack([torch.linalg.vector_norm(g - e, dtype=torch.float32) for g, e in pairs])
    size = torch.stack([torch.linalg.vector_norm(e, dtype=torch.float32) for e in expected])
    return (off.norm() / size.norm()).item()
