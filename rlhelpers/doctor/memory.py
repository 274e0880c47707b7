"""Predict a run's memory from the model's architecture, before any weight is loaded."""

import inspect
import math
from dataclasses import dataclass
from typing import Self

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from rlhelpers.kernels import fused_logprobs
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
    """The sizes of a decoder-only model.  `key_values`: numbers per token and layer in the keys, and in the values."""

    parameters: int
    hidden: int
    layers: int
    intermediate: int
    key_values: int
    vocabulary: int
    context: int

    @classmethod
    def of(cls, model_config: PretrainedConfig) -> Self:
        with torch.device("meta"):  # where a tensor has a shape and no memory
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
    """What one place needs at the peak of one phase, in GiB.

    `place`: "GPU" (the policy's), "server's GPU" or "RAM".  `phase`: "training", "sampling" or "the run".
    """

    place: str
    phase: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def predict_memory(
    config: RunConfig, model: Architecture, on_gpu: bool, prompt_tokens: int = PROMPT_TOKENS
) -> list[Demand]:
    """The demands of a run, with `number` bytes per number: 2 (bf16) on a GPU, 4 (float32) on the CPU.

    Training: weights, gradients and AdamW's two moments, all in the policy's dtype, and one microbatch.
    Sampling: no gradients, which are freed after each update, but keys and values: `kv_cache_gib` beside a copy of the
    weights in vLLM, those of `max_rows` rows in the torch engine.  vLLM on the policy's GPU keeps its weights and cache
    there while training unless it sleeps; level 1 moves the weights to RAM.
    """
    number = 2 if on_gpu else 4
    weights = model.parameters * number / GIB
    longest = min(prompt_tokens + config.max_tokens, model.context)
    engine = {"vLLM's weights": weights, "vLLM's cache": config.kv_cache_gib} if config.engine != "torch" else {}
    sampling = {"weights": weights, "AdamW's moments": 2 * weights}
    training = sampling | {"gradients": weights} | _microbatch(config, model, number, longest)
    if config.engine == "torch":
        sampling |= _torch_sampling(config, model, number, longest)
    processes = {"processes": PROCESS_GIB + (ENGINE_PROCESS_GIB if engine else 0.0)}
    if not on_gpu:
        always = processes | engine
        return [Demand("RAM", "training", training | always), Demand("RAM", "sampling", sampling | always)]
    cuda, vllm, nccl = {"CUDA": CONTEXT_GIB}, {"vLLM": ENGINE_GIB}, {"NCCL's buffers": NCCL_GIB}
    asleep = awake = cuda
    server = []
    if config.engine == "vllm":
        asleep, awake = cuda | vllm, cuda | vllm | engine
    elif config.engine == "vllm-server":
        asleep = awake = cuda | nccl
        server = [Demand("server's GPU", "the run", engine | cuda | vllm | nccl)]
    copies = {"weights on their way": weights} | ({"sleeping weights": weights} if config.sleep_level == 1 else {})
    return [
        Demand("GPU", "training", training | (asleep if config.sleep_level else awake)),
        Demand("GPU", "sampling", sampling | awake),
        *server,
        Demand("RAM", "the run", processes | copies),
    ]


def _microbatch(config: RunConfig, model: Architecture, number: int, longest: int) -> dict[str, float]:
    """One microbatch of rows at their longest, in GiB."""
    rows, response = config.microbatch_size, min(config.max_tokens, longest - 1)
    seen, prompt = rows * (longest - 1), longest - 1 - response  # the last token is only ever a label
    if config.components == "mine":  # taken to be the step of notebook 03: whole rows and all logits
        parts = {"activations": activation_bytes(model, seen, number), "logits": logit_bytes(model, seen, number)}
    elif config.gradient_checkpointing:
        parts = checkpointed_bytes(model, number, rows * response, seen)
    else:
        # A baseline of the group prunes whole groups; others prune rows, and a microbatch may hold one of each group.
        whole_groups = config.estimator.baseline in ("mean", "leave_one_out")
        prompts = math.ceil(rows / config.group_size) if whole_groups else rows
        parts = step_bytes(model, number, rows * response, prompts * prompt, rows * prompt)
    return {name: size / GIB for name, size in parts.items()}


def _torch_sampling(config: RunConfig, model: Architecture, number: int, longest: int) -> dict[str, float]:
    most = inspect.signature(TorchEngine).parameters["max_rows"].default
    rows = min(most, max(config.rollout_batch_size, config.n_val_examples))
    # For each row and word: the logit, two float32 and two float64 numbers, and four float64 more with top_p.
    distributions = rows * model.vocabulary * (number + 24 + (32 if config.top_p < 1 else 0)) / GIB
    # One layer stands there twice while rows leave.
    cache = cache_gib(model, rows, longest, number) * (1 + 1 / model.layers)
    return {"keys and values": cache, "distributions": distributions}


def cache_gib(model: Architecture, rows: int, tokens: int, number: int) -> float:
    """Keys and values of `rows` sequences of `tokens` tokens."""
    return rows * tokens * 2 * model.layers * model.key_values * number / GIB


# ---- The peak of a microbatch's forward and backward pass, in bytes, beside weights and gradients.


def step_bytes(model: Architecture, number: int, responses: int, prompts: int = 0, copied: int = 0) -> dict[str, int]:
    """With shared prompts.  `responses`, `prompts`: tokens that are read of them; `copied`: of prompts, once per row.

    The peak is at one of two moments.  When the loss is computed, all activations are there, and a copy of its prompt's
    keys and values for each row.  When the backward pass is through with the responses, their share of the gradient
    waits for that of the prompts: as large as the embedding and all layers but the last.
    """
    of_prompts = prompts * (model.layers - 1) * _layer_bytes(model, number)  # the last gives keys and values alone
    activations = of_prompts + activation_bytes(model, responses, number)
    logits = _chunk_bytes(model, responses, number)
    if not prompts:
        return {"activations": activations, "logits": logits}
    copies = 2 * copied * model.layers * model.key_values * number
    layer = model.hidden * (2 * model.hidden + 2 * model.key_values + 3 * model.intermediate)
    waiting = number * ((model.layers - 1) * layer + model.vocabulary * model.hidden)
    more = max(0, of_prompts + waiting - activations - logits - copies)
    return {"activations": activations, "logits": logits, "prompts' copies": copies, "responses' gradients": more}


def checkpointed_bytes(model: Architecture, number: int, responses: int, read: int) -> dict[str, int]:
    """With gradient checkpointing: every layer's input, and either the loss or one layer with its MLP's gradient.

    `read`: tokens of whole rows.
    """
    layer = read * (_layer_bytes(model, number) + model.intermediate * number)
    loss = _chunk_bytes(model, responses, number) + read * _last_norm_bytes(model, number)
    return {"activations": read * model.layers * model.hidden * number + layer, "logits": max(0, loss - layer)}


def activation_bytes(model: Architecture, tokens: int, number: int) -> int:
    """What an OLMo-2 model keeps of `tokens` tokens for the backward pass; models with fewer norms keep less."""
    return tokens * (model.layers * _layer_bytes(model, number) + _last_norm_bytes(model, number))


def _layer_bytes(model: Architecture, number: int) -> int:
    """Per token.  Attention itself keeps no matrix (flash or sdpa)."""
    norms = 8 * (3 * model.hidden + model.key_values)  # float32, before and after dividing by the root mean square
    of_hidden = 4 * model.hidden  # the layer's input, the queries, the attention's output, the MLP's input
    of_mlp = 4 * model.intermediate  # gate, its SiLU, up, and their product
    return norms + number * (of_hidden + 2 * model.key_values + of_mlp)


def _last_norm_bytes(model: Architecture, number: int) -> int:
    return model.hidden * (8 + 2 * number)


def _chunk_bytes(model: Architecture, tokens: int, number: int) -> int:
    """The peak of `log_probs_and_entropy` over the tokens of responses."""
    chunk = fused_logprobs.CHUNK_BYTES["cpu" if number == 4 else "cuda"]
    words = max(fused_logprobs.MIN_WORDS, chunk // (4 * max(tokens, 1)))
    entries = tokens * min(words, model.vocabulary)
    forward = 12 * entries  # the logit, its exponential and their product, in float32
    # The slope, in float32 and in the model's dtype; hidden states times a factor, their gradient, a chunk's share.
    backward = (4 if number == 4 else 4 + number) * entries + tokens * model.hidden * (4 + 2 * number)
    return max(model.vocabulary * model.hidden * number, chunk) + max(forward, backward)  # the head's gradient first


def logit_bytes(model: Architecture, tokens: int, number: int) -> int:
    """The same for a step that holds all logits: the logit, and float32 log-probability, probability, entropy share."""
    return tokens * model.vocabulary * (number + 12)
