"""How much memory a run will need, counted from the model's architecture before any weight is loaded."""

import inspect
import math
from dataclasses import dataclass
from typing import Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlhelpers.kernels import fused_logprobs as vocabulary
from rlhelpers.rollouts import TorchEngine
from rlhelpers.training.config import RunConfig

GIB = 2**30
PROMPT_TOKENS = 400  # the longest GSM8K question (985 characters) in the r1_zero prompt, at 3.6 characters per token
CONTEXT_GIB = 0.8  # a process on a GPU: CUDA's context, the workspaces of cuBLAS, what the allocator rounds up
ENGINE_GIB = 1.0  # vLLM on a GPU beside weights and cache: its activations, the sampler's logits, captured graphs
NCCL_GIB = 2.0  # on both sides: vLLM sends weights packed, through two buffers of 1 GiB
PROCESS_GIB = 0.5  # a process in RAM with torch, transformers and a task imported; 0.4 were measured
ENGINE_PROCESS_GIB = 1.5  # what vLLM adds in RAM: 0.3 measured in one process; a server is up to three of them


@dataclass(frozen=True)
class Architecture:
    """What the prediction needs to know of a decoder-only model.  `key_values`: numbers per token and layer in the
    keys, as many again in the values."""

    parameters: int
    hidden: int
    layers: int
    intermediate: int
    key_values: int
    vocabulary: int
    context: int

    @classmethod
    def of(cls, model_config: PretrainedConfig) -> Self:
        """Parameters are counted on torch's meta device, where a tensor has a shape and no memory."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=False)
        text = model_config.get_text_config()
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            hidden=text.hidden_size,
            layers=text.num_hidden_layers,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            key_values=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
            vocabulary=text.vocab_size,
            context=text.max_position_embeddings,
        )


@dataclass(frozen=True)
class Demand:
    """What one place needs at its fullest moment of one phase.  `place`: "GPU" (the policy's), "server's GPU" or
    "RAM"; `phase`: "training", "sampling" or "the run"; `parts` in GiB."""

    place: str
    phase: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def predict_memory(
    config: RunConfig, model: Architecture, on_gpu: bool, prompt_tokens: int = PROMPT_TOKENS
) -> list[Demand]:
    """The demands of a run, with b bytes per number: 2 (bf16) on a GPU, 4 (float32) on the CPU.

    Training: weights, gradients and the two moments of AdamW are b bytes per parameter each, since the optimizer keeps
    them in the policy's dtype; to them comes one microbatch, see `step_bytes`.

    Sampling: no gradients (they are freed after each update), but keys and values: in the vLLM engines
    `kv_cache_gib` beside a copy of the weights; in the torch engine 2 x layers x key_values x b bytes per token, one
    layer twice while rows leave, for up to `max_rows` rows at their longest, each with a prompt of its own, as in
    validation.

    vLLM on the policy's GPU keeps its weights and cache there while training unless it sleeps; level 1 moves the
    weights to RAM.  It is assumed that the trainer empties torch's cache of free blocks before the engine wakes.
    The longest row is the longest prompt and max_tokens, no more than the context.
    """
    number = 2 if on_gpu else 4
    weights = model.parameters * number / GIB
    tokens = min(prompt_tokens + config.max_tokens, model.context)
    engine = {"vLLM's weights": weights, "vLLM's cache": config.kv_cache_gib}
    state = {"weights": weights, "AdamW's moments": 2 * weights}
    training = state | {"gradients": weights} | _microbatch(config, model, number, tokens)
    sampling = dict(state)
    if config.engine == "torch":
        sampling |= _torch_sampling(config, model, number, tokens)
    if not on_gpu:
        process = PROCESS_GIB + (ENGINE_PROCESS_GIB if config.engine != "torch" else 0.0)
        always = {"processes": process} | (engine if config.engine != "torch" else {})
        return [Demand("RAM", "training", training | always), Demand("RAM", "sampling", sampling | always)]
    sleeping, awake = {"CUDA": CONTEXT_GIB}, {"CUDA": CONTEXT_GIB}
    if config.engine == "vllm-server":
        sleeping["NCCL's buffers"] = awake["NCCL's buffers"] = NCCL_GIB
    if config.engine == "vllm":
        sleeping["vLLM"] = awake["vLLM"] = ENGINE_GIB
        awake |= engine
    demands = [
        Demand("GPU", "training", training | (sleeping if config.sleep_level else awake)),
        Demand("GPU", "sampling", sampling | awake),
    ]
    if config.engine == "vllm-server":
        parts = engine | {"CUDA": CONTEXT_GIB, "vLLM": ENGINE_GIB, "NCCL's buffers": NCCL_GIB}
        demands.append(Demand("server's GPU", "the run", parts))
    processes = PROCESS_GIB + (ENGINE_PROCESS_GIB if config.engine != "torch" else 0.0)
    copies = {"weights on their way": weights} | ({"sleeping weights": weights} if config.sleep_level == 1 else {})
    return [*demands, Demand("RAM", "the run", {"processes": processes} | copies)]


def step_bytes(model: Architecture, number: int, responses: int, prompts: int = 0, copied: int = 0) -> dict[str, int]:
    """The fullest moment of a forward and a backward pass of the train step, beside weights and gradients.

    `responses` and `prompts`: tokens that are read of them, in all; the last token of a prompt is read with the
    response.  `copied`: tokens of prompts, once for each row that goes on from them.  Of a prompt the last layer gives
    keys and values alone.  Either the loss is computed, when all activations are there, and for each row a copy of its
    prompt's keys and values; or the backward pass is through with the responses, and their share of the gradient waits
    for that of the prompts: as large as the weights of the embedding and of all layers but the last.
    """
    of_prompts = prompts * (model.layers - 1) * _layer_bytes(model, number)
    activations = of_prompts + activation_bytes(model, responses, number)
    logits = chunk_bytes(model, responses, number)
    if not prompts:
        return {"activations": activations, "logits": logits}
    copies = 2 * copied * model.layers * model.key_values * number
    layer = model.hidden * (2 * model.hidden + 2 * model.key_values + 3 * model.intermediate)
    waiting = number * ((model.layers - 1) * layer + model.vocabulary * model.hidden)
    more = max(0, of_prompts + waiting - activations - logits - copies)
    return {"activations": activations, "logits": logits, "prompts' copies": copies, "responses' gradients": more}


def checkpointed_bytes(model: Architecture, number: int, responses: int, read: int) -> dict[str, int]:
    """As `step_bytes`, with gradient checkpointing: the input of every layer, and either the loss or all that one layer
    keeps and the gradient of its MLP's inner numbers.  `read`: tokens of whole rows, in all."""
    inputs = read * model.layers * model.hidden * number
    layer = read * (_layer_bytes(model, number) + model.intermediate * number)
    loss = chunk_bytes(model, responses, number) + read * _last_norm_bytes(model, number)
    return {"activations": inputs + layer, "logits": max(0, loss - layer)}


def activation_bytes(model: Architecture, tokens: int, number: int) -> int:
    """What an OLMo-2 model keeps of `tokens` tokens for the backward pass, in bytes; b = `number` bytes per number.

    A layer keeps, per token: the inputs of its four RMS norms in float32, before and after dividing by the root mean
    square (8 bytes for each number, of which one norm has key_values numbers and three have `hidden`); its input,
    the queries, the attention's output and the MLP's input (4 x hidden x b); keys and values (2 x key_values x b);
    gate, its SiLU, up, and their product (4 x intermediate x b).  Attention itself keeps no matrix (flash or sdpa).
    The last norm keeps as much as another of `hidden` numbers, with its input and output.  Models with fewer norms
    need less.
    """
    return tokens * (model.layers * _layer_bytes(model, number) + _last_norm_bytes(model, number))


def _layer_bytes(model: Architecture, number: int) -> int:
    norms = 8 * (3 * model.hidden + model.key_values)
    return norms + number * (4 * model.hidden + 2 * model.key_values + 4 * model.intermediate)


def _last_norm_bytes(model: Architecture, number: int) -> int:
    return model.hidden * (8 + 2 * number)


def chunk_bytes(model: Architecture, tokens: int, number: int) -> int:
    """The fullest moment of `log_probs_and_entropy` over so many tokens of responses, in float32 on the CPU or in bf16
    on a GPU, where a chunk is longer.

    From the forward pass to the end of the backward pass there is room for the head's gradient, at least as long as a
    chunk.  Forward, for every token and every word of a chunk: the logit, its exponential and their product, in
    float32.  Backward: the slope, in float32 and, where they are others, in b bytes, beside the hidden states times a
    factor, their gradient in float32 and what a chunk adds to it.
    """
    chunk = vocabulary.CHUNK_BYTES["cpu" if number == 4 else "cuda"]
    words = max(vocabulary.MIN_WORDS, chunk // (4 * max(tokens, 1)))
    entries = tokens * min(words, model.vocabulary)
    backward = (4 if number == 4 else 4 + number) * entries + tokens * model.hidden * (4 + 2 * number)
    return max(model.vocabulary * model.hidden * number, chunk) + max(12 * entries, backward)


def logit_bytes(model: Architecture, tokens: int, number: int) -> int:
    """As `chunk_bytes`, of a step that holds all logits: for every token read and every word of the vocabulary the
    model's logit (b bytes) and, in float32, its log-probability (which the backward pass needs), its probability and
    its share of the entropy (4 bytes each).  The backward pass needs no more."""
    return tokens * model.vocabulary * (number + 12)


def cache_gib(model: Architecture, rows: int, tokens: int, number: int) -> float:
    """Keys and values of `rows` sequences of `tokens` tokens."""
    return rows * tokens * 2 * model.layers * model.key_values * number / GIB


def _microbatch(config: RunConfig, model: Architecture, number: int, tokens: int) -> dict[str, float]:
    """In GiB; of rows at their longest.  Where prompts are shorter, more rows may be packed together, as many tokens
    in all: fewer of them are a prompt's, which is what the margin is for with which `doctor` judges.

    A baseline that is no mean leaves single rows of a group without an advantage, and a microbatch may come to hold
    one row of each group.  A reader's own step is taken to be that of notebook 03: whole rows and all logits.
    """
    rows, response = config.microbatch_size, min(config.max_tokens, tokens - 1)
    seen, prompt = rows * (tokens - 1), tokens - 1 - response  # the last token is only ever a label
    if config.components == "mine":
        parts = {"activations": activation_bytes(model, seen, number), "logits": logit_bytes(model, seen, number)}
    elif config.gradient_checkpointing:
        parts = checkpointed_bytes(model, number, rows * response, seen)
    else:
        prompts = math.ceil(rows / config.group_size) if config.estimator.baseline == "mean" else rows
        parts = step_bytes(model, number, rows * response, prompts * prompt, rows * prompt)
    return {name: size / GIB for name, size in parts.items()}


def _torch_sampling(config: RunConfig, model: Architecture, number: int, tokens: int) -> dict[str, float]:
    """`draw_tokens` holds, for every row and word, two float32 and two float64 numbers and with top_p four float64
    more, beside the model's own logit."""
    most = inspect.signature(TorchEngine).parameters["max_rows"].default
    rows = min(most, max(config.rollout_batch_size, config.n_val_examples))
    distribution = rows * model.vocabulary * (number + 24 + (32 if config.top_p < 1 else 0)) / GIB
    cache = cache_gib(model, rows, tokens, number) * (1 + 1 / model.layers)
    return {"keys and values": cache, "distributions": distribution}
