"""Log-probs and entropies over a large vocabulary, a chunk of words at a time (fused linear cross-entropy).

The logits of 8 x 512 tokens over 100,352 words are 1.6 GB in float32, and a plain log-softmax with entropy holds four
such tables at once.  Here no table is wider than a chunk.  The forward pass carries the largest logit and two sums per
token from chunk to chunk.  The backward pass finishes the gradient of a chunk's words before the next chunk.  It needs
the logits again: logit chunks are stashed in the still unused buffer of the weight's gradient, as far as there is room,
and the rest are recomputed.

liger-kernel 0.8.5 has the same function without a bias, `LigerFusedLinearScaledCrossEntropyFunction`.  It is not used:
except on Hopper cards it is a loop in torch like this one, and it sums the weight's gradient over chunks in bfloat16.
"""

import torch
from torch import Tensor

# Of float32 logits.  On a CPU a chunk should stay in the cache, and above 32 MB glibc asks the system for every table
# anew: with chunks of 64 MB the time outside the matrix products was half as long again in float32 and double in
# bfloat16.  A GPU wants fewer, longer kernels.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}
MIN_WORDS = 512  # in a chunk: narrower matrix products are slow


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p(label) and H(p) in nats, with p = softmax((hidden @ weight.T + bias) / temperature).

    hidden (tokens, d), weight (vocabulary, d), bias (vocabulary,) or None, labels (tokens,) int64.  Both results are
    (tokens,), float32 or, for float64, float64: half-precision logits are normalised in float32.  The log-probs have
    gradients to hidden, weight and bias; the entropy has none.  The log-prob of a label outside the vocabulary is NaN.
    """
    keep = torch.is_grad_enabled() and weight.requires_grad
    return _LogProbs.apply(hidden, weight, bias, labels, temperature, keep)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(context, hidden, weight, bias, labels, temperature, keep):
        precision = torch.promote_types(hidden.dtype, torch.float32)
        top = hidden.new_full((len(hidden),), torch.finfo(precision).min, dtype=precision)
        total, moment = top.new_zeros(2, len(hidden))
        label_logits = torch.full_like(total, torch.nan)
        room = _make_room(weight) if keep else None
        for words in _chunks(len(hidden), weight):
            logits = _logits(hidden, weight, bias, words)
            if (kept := _place(room, len(hidden), words)) is not None:
                kept.copy_(logits)
            logits = _soften(logits.to(precision), temperature)
            column, inside = _columns(labels, words)
            label_logits = torch.where(inside, logits.gather(1, column).squeeze(1), label_logits)
            top, total, moment = _add(logits, top, total, moment)
        normalizer, entropy = top + total.log(), total.log() - moment / total
        context.save_for_backward(hidden, weight, bias, labels, normalizer)
        context.temperature, context.room = temperature, room
        context.mark_non_differentiable(entropy)
        return label_logits - normalizer, entropy

    @staticmethod
    def backward(context, grad, _):
        """d log p(label) / d logits = onehot(label) - p."""
        hidden, weight, bias, labels, normalizer = context.saved_tensors
        room, context.room = context.room, None  # a second pass, after retain_graph, finds nothing kept
        needs_hidden, needs_weight, needs_bias, *_ = context.needs_input_grad
        # A token's own factor goes to its hidden state, which is smaller than its row of logits.
        factor = (-grad / context.temperature)[:, None]
        scaled = (hidden * factor).to(hidden.dtype)
        # Each row of grad_weight is written once; grad_hidden is a sum over chunks and so a float32.
        grad_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype) if needs_hidden else None
        grad_weight = _gradient_in(room, weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        for words in _writing_order(_chunks(len(hidden), weight), hidden):
            kept = _place(room, len(hidden), words)
            logits = _logits(hidden, weight, bias, words) if kept is None else kept.clone()
            logits = _soften(logits.to(normalizer.dtype), context.temperature)
            slope = _slope(logits, normalizer, labels, words)
            if grad_bias is not None:
                grad_bias[words] = factor.squeeze(1) @ slope
            slope = slope.to(hidden.dtype)
            if needs_hidden and grad_hidden.dtype == slope.dtype:
                grad_hidden.addmm_(slope, weight[words])
            elif needs_hidden:
                grad_hidden += slope @ weight[words]
            if needs_weight:
                torch.mm(slope.T, scaled, out=grad_weight[words])
        if needs_hidden:
            grad_hidden = grad_hidden.mul_(factor).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _chunks(tokens: int, weight: Tensor) -> list[slice]:
    """Words: every slice ends within the vocabulary."""
    size = max(MIN_WORDS, _chunk_bytes(weight) // (4 * max(tokens, 1)))
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


def _chunk_bytes(weight: Tensor) -> int:
    return CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, words: slice) -> Tensor:
    return torch.nn.functional.linear(hidden, weight[words], None if bias is None else bias[words])


def _soften(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits.div_(temperature)


def _columns(labels: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Where in a chunk the labels are: (tokens, 1), and whether they are there at all, (tokens,)."""
    column, last = labels - words.start, words.stop - words.start - 1
    return column.clamp(0, last)[:, None], (column >= 0) & (column <= last)


def _add(logits: Tensor, top: Tensor, total: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk more: `top`, the largest logit l so far, and the sums of exp(l - top) and of (l - top) exp(l - top),
    (tokens,) each.  Overwrites the logits."""
    higher = torch.maximum(top, logits.amax(dim=-1))
    below = logits.sub_(higher[:, None])
    weights = below.exp()
    shift = top - higher
    moment = shift.exp() * (moment + shift * total)
    # A word of probability 0 adds 0, also where its logit is -inf.
    moment += torch.linalg.vecdot(weights, below.clamp_(min=torch.finfo(below.dtype).min))
    return higher, shift.exp() * total + weights.sum(dim=-1), moment


def _slope(logits: Tensor, normalizer: Tensor, labels: Tensor, words: slice) -> Tensor:
    """p - onehot(label).  Overwrites the logits."""
    column, inside = _columns(labels, words)
    probabilities = logits.sub_(normalizer[:, None]).exp_()
    return probabilities.scatter_add_(1, column, -inside[:, None].to(logits.dtype))


def _make_room(weight: Tensor) -> Tensor:
    """For the gradient of the weight, (numbers,); at least a chunk's bytes."""
    return weight.new_empty(max(weight.numel(), _chunk_bytes(weight) // weight.element_size()))


def _gradient_in(room: Tensor | None, weight: Tensor) -> Tensor:
    return torch.empty_like(weight) if room is None else room[: weight.numel()].view_as(weight)


def _place(room: Tensor | None, tokens: int, words: slice) -> Tensor | None:
    """Of a chunk's logits, (tokens, words), where there is room for all of them."""
    if room is None or words.stop * tokens > len(room):
        return None
    return room[words.start * tokens : words.stop * tokens].view(tokens, words.stop - words.start)


def _writing_order(chunks: list[slice], hidden: Tensor) -> list[slice]:
    """A word has len(hidden) logits and d numbers of the weight's gradient.  Begun where the gradient is behind, it
    never overwrites logits that are still to be read."""
    tokens, d = hidden.shape
    return chunks if tokens >= d else chunks[::-1]
