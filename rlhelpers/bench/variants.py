"""The training step with and without each thing that makes it fast, and the arithmetic in it.

The package's own step has all that model and batch allow.  Without some of it, the textbook's loop runs over the
package's log-probs.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rlhelpers.bench.case import Rows, package_step
from rlhelpers.bench.measure import Read
from rlhelpers.bench.textbook import LogProbs, textbook_step
from rlhelpers.doctor.memory import Architecture, activation_bytes, checkpointed_bytes, logit_bytes, step_bytes
from rlhelpers.kernels.fused_logprobs import log_probs_and_entropy
from rlhelpers.kernels.logprobs import get_response_log_probs

BACKEND = "inductor"


def microbatches(reads: Sequence[Read]) -> list[list[Read]]:
    """Cut the forward passes into microbatches, each of which begins without a cache."""
    found: list[list[Read]] = []
    for read in reads:
        if not read.past:
            found.append([])
        found[-1].append(read)
    return found


def training_flops(model: Architecture, reads: Sequence[Read], scored: int) -> int:
    """Return the floating-point operations of the matrix products, forward and backward, nothing computed twice.

    Forward 2 for each weight and token; backward as many for the gradient to the input, and for that to the weight.
    The same for attention's two products, whose masked half counts too, as in the usual definition of model FLOPs
    (arXiv:2204.02311, appendix B).  `scored`: at how many tokens there were logits.
    """
    layer = model.hidden * (2 * model.hidden + 2 * model.key_values + 3 * model.intermediate)
    weights = sum(read.tokens for read in reads) * model.layers * layer + scored * model.hidden * model.vocabulary
    attention = sum(2 * read.tokens * (read.past + read.width) for read in reads) * model.layers * model.hidden
    return 3 * 2 * (weights + attention)


def all_at_once(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, response_mask: Tensor) -> Tensor:
    """All logits are held, with the entropies that a step reports."""
    return get_response_log_probs(model, input_ids, labels, return_token_entropy=True)["log_probs"]


def in_chunks(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, response_mask: Tensor) -> Tensor:
    """Rows are read whole; logits are computed at responses alone, a chunk of words at a time."""
    states = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[response_mask]
    head = model.get_output_embeddings()
    log_probs, _ = log_probs_and_entropy(states, head.weight, head.bias, labels[response_mask])
    return log_probs.new_zeros(labels.shape).masked_scatter(response_mask, log_probs)


def shared(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, response_mask: Tensor) -> Tensor:
    """As the package's step does it: a prompt is read once for its rows."""
    return get_response_log_probs(model, input_ids, labels, True, response_mask=response_mask)["log_probs"]


@dataclass(frozen=True)
class Variant:
    """`log_probs`: those of the textbook's loop; None for the package's own step, which reads no row without an
    advantage, and shares no prompts where it is `checkpointed`.  `compiled`: after `compile_parts`, which cannot be
    taken back."""

    name: str
    log_probs: LogProbs | None = None
    attention: str = "sdpa"
    checkpointed: bool = False
    compiled: bool = False

    def train(self, model: PreTrainedModel, optimizer: Optimizer, rows: Rows, size: int) -> tuple[Tensor, dict]:
        """Take a step in microbatches of `size` rows; see case.Step for what it returns."""
        step = package_step if self.log_probs is None else partial(textbook_step, log_probs=self.log_probs)
        model.set_attn_implementation(self.attention)
        if self.checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            return step(model, 0, optimizer, rows, size, None)
        finally:
            model.gradient_checkpointing_disable()

    def scored_tokens(self, rows: Rows, reads: Sequence[Read]) -> int:
        """Return at how many tokens the head is applied."""
        if self.log_probs is all_at_once:
            return sum(read.tokens for read in reads)
        responses = enumerate(response for _, response in rows.token_ids)
        return sum(len(response) for i, response in responses if self.log_probs or rows.has_signal(i))

    def predicted_bytes(self, model: Architecture, number: int, reads: Sequence[Read]) -> int:
        """Return those of the largest microbatch, beside weights, gradients and optimizer, as `rlhelpers doctor` counts
        them before a run; `number` bytes per number."""
        return max(self._predicted(model, number, microbatch) for microbatch in microbatches(reads))

    def _predicted(self, model: Architecture, number: int, reads: Sequence[Read]) -> int:
        tokens = sum(read.tokens for read in reads)
        if self.log_probs is all_at_once:
            return activation_bytes(model, tokens, number) + logit_bytes(model, tokens, number)
        if self.checkpointed:
            return sum(checkpointed_bytes(model, number, tokens, tokens).values())
        last = [read for read in reads if read.past == reads[-1].past]  # the responses, after all of their prompts
        responses = sum(read.tokens for read in last)
        copied = sum(read.rows * read.past for read in last)
        return sum(step_bytes(model, number, responses, tokens - responses, copied).values())


def ladder(on_gpu: bool) -> list[Variant]:
    """Return variants of which each has what those before it have, and one thing more; but for checkpointing, which is
    taken off again."""
    variants = [
        Variant("plain", all_at_once),
        Variant("+ chunked log-probs", in_chunks),
        Variant("+ shared prompts", shared),
        package := Variant("+ pruning"),
    ]
    if on_gpu and importlib.util.find_spec("flash_attn"):
        variants.append(package := replace(package, name="+ flash-attention", attention="flash_attention_2"))
    checkpointed = replace(package, name="checkpointed, prompts not shared", checkpointed=True)
    return [*variants, checkpointed, replace(package, name="+ torch.compile of norms and MLPs", compiled=True)]


def compile_parts(model: PreTrainedModel) -> None:
    """Compile norms and MLPs of an OLMo-2 model: they are the same in all layers, so that each is compiled once."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.compile(backend=BACKEND, dynamic=True)


class GradientKeeper:
    """In an optimizer's place: keeps the gradient and leaves the weights alone."""

    def __init__(self, model: PreTrainedModel):
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self) -> None:
        self.gradients = [p.grad.detach().clone() for p in self.param_groups[0]["params"]]
