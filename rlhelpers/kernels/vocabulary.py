"""Log-probs and entropies over a large vocabulary, a chunk of tokens at a time.

The logits of 8 x 512 tokens over 100,352 words are 1.6 GB in float32, and a plain log-softmax with entropy holds
several such tables at once.  Here no table is longer than a chunk: the forward pass keeps one number a token, the log
of the normaliser, and the backward pass computes the chunk's logits again.
"""

import torch
from torch import Tensor

CHUNK_BYTES = 128 * 2**20  # of float32 logits; larger chunks are no faster


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(label) and H(p) in nats, with p = softmax((hidden @ weight.T + bias) / temperature).

    hidden (tokens, d), weight (vocabulary, d), bias (vocabulary,) or None, labels (tokens,) int64.  Both results are
    (tokens,), float32 or, for float64, float64: half-precision logits are normalised in float32.  The log-probs have
    gradients to hidden, weight and bias; the entropy has none.
    """
    return _LogProbs.apply(hidden, weight, bias, labels, temperature)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """In at least float32, and not shared with anything: what follows may write into it."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, weight, bias, labels, temperature):
        precision = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropy, normalizers = hidden.new_empty(3, len(hidden), dtype=precision)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], weight, bias, temperature)
            normalizers[rows] = logits.logsumexp(dim=-1)
            log_distribution = logits.sub_(normalizers[rows, None])
            log_probs[rows] = log_distribution.gather(-1, labels[rows, None]).squeeze(-1)
            # A word of probability 0 adds 0, also where its logit is -inf.
            probabilities = log_distribution.exp()
            entropy[rows] = -torch.linalg.vecdot(probabilities, log_distribution.clamp_(min=torch.finfo(precision).min))
        context.save_for_backward(hidden, weight, bias, labels, normalizers)
        context.temperature = temperature
        context.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(context, grad, _):
        """d log p(label) / d logits = onehot(label) - p."""
        hidden, weight, bias, labels, normalizers = context.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = context.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        for rows in _chunks(len(hidden), len(weight)):
            slope = _logits(hidden[rows], weight, bias, context.temperature).sub_(normalizers[rows, None]).exp_()
            slope.mul_(-grad[rows, None])
            slope[torch.arange(len(slope)), labels[rows]] += grad[rows]
            slope = slope.div_(context.temperature).to(hidden.dtype)
            if needs_hidden:
                torch.mm(slope, weight, out=grad_hidden[rows])
            if needs_weight:
                grad_weight.addmm_(slope.T, hidden[rows])
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None
