"""vLLM's arguments, environment and requests: the same for the engine in this process and for the server."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhelpers.models import revision
from rlhelpers.rollouts.engine import Completion, Sampling
from rlhelpers.rollouts.processes import owner_environment

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

LOOPBACK = ("127.0.0.1", "localhost")
# Ours to vLLM's.  vLLM's other formats open pickles, and so does its "auto" where a folder has no safetensors.
LOAD_FORMATS = {"auto": "safetensors", "safetensors": "safetensors", "dummy": "dummy"}


def check_address(host: str, port: int | None, launch_server: bool) -> None:
    """Raise ValueError unless host and port are those of a server that only this machine reaches."""
    if host not in LOOPBACK:
        raise ValueError(f"host: got {host!r}; accepted are {' and '.join(LOOPBACK)}, which no other machine reaches")
    if not launch_server and port is None:
        raise ValueError("port: got None; accepted is the port of the server to join")
    if port is not None and not (isinstance(port, int) and 0 < port < 2**16):
        raise ValueError(f"port: got {port!r}; accepted is None or a whole number from 1 to 65535")


def read_model(model_id: str, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[PreTrainedTokenizerBase, int]:
    """Return a model's tokenizer, unless it is given, and its context in tokens.  Raises ValueError naming model_id."""
    from transformers import AutoConfig, AutoTokenizer

    options = {"revision": revision(model_id), "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(model_id, **options)
        return tokenizer or AutoTokenizer.from_pretrained(model_id, **options), config.max_position_embeddings
    except Exception as error:  # each kind of broken folder has its own kind of error
        raise ValueError(
            f"model_id: got {model_id!r}; accepted is a directory with a model and its tokenizer, or a name on the "
            f"Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def launch_arguments(
    model: str,
    dtype: str,
    on_cpu: bool,
    context: int,
    weight_backend: str,
    kv_cache_gib: float | None,
    temperature: float,
    seed: int,
    load_format: str = "safetensors",
) -> dict[str, Any]:
    """Return keyword arguments of `vllm.LLM`; `as_flags` turns them into the server's flags.

    `context` in tokens.  `kv_cache_gib`: None leaves the size to vLLM, and is 1.0 on a CPU.  `temperature`: see
    `check_temperature`.  Raises ValueError for a `load_format` that is not in LOAD_FORMATS.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format: got {load_format!r}; accepted are {', '.join(LOAD_FORMATS)}")
    if on_cpu and kv_cache_gib is None:
        kv_cache_gib = 1.0  # vLLM would take nine tenths of the memory
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": context,
        **dict.fromkeys(("revision", "tokenizer_revision"), revision(model)),
        "load_format": LOAD_FORMATS[load_format],
        "generation_config": "vllm",  # only the request decides how it is sampled
        "logprobs_mode": "raw_logprobs" if temperature == 1 else "processed_logprobs",
        "weight_transfer_config": {"backend": weight_backend},
    }
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        # vLLM refuses to start unless this share of the card is free, even where the size of its cache is given.
        arguments["gpu_memory_utilization"] = 0.01
    if on_cpu:
        # Compilation costs a minute on a CPU and gains nothing for a small model.  vLLM 0.32's CPU engine dies of
        # requests with their own seed when a prompt is read in several chunks.
        arguments |= {"enforce_eager": True, "enable_chunked_prefill": False}
        arguments["max_num_batched_tokens"] = max(context, 4096)
    return arguments


def launch_environment(on_cpu: bool, weight_backend: str) -> dict[str, str]:
    """Return the environment variables of vLLM's processes."""
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environment |= {**owner_environment(), **loopback_environment()}
    if on_cpu:
        environment |= {"TORCHDYNAMO_DISABLE": "1"}
    if weight_backend == "ipc":  # its handles travel as pickles, between processes of one machine
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return environment


def server_environment(on_cpu: bool, weight_backend: str, gpu: int | None) -> dict[str, str]:
    """Return those of a server on this process's GPU `gpu`."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", **launch_environment(on_cpu, weight_backend)}
    if not on_cpu and gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible_device(gpu)
    return environment


def loopback_environment() -> dict[str, str]:
    """Return what keeps Gloo and NCCL on the loopback: by default they use an address that others may reach."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if sys.platform == "linux" else {}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments as flags of the server's command line."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def request_parameters(sampling: Sampling, prompt: int, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's sampling parameters for the `prompt`-th prompt of a call."""
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": [] if sampling.stop is None else [sampling.stop],
        "include_stop_str_in_output": True,
        "stop_token_ids": list(stop_token_ids),
        "seed": prompt_seed(sampling.seed, prompt),
        "logprobs": 0,  # only the sampled token's
    }


# What a caller of the course's generate_completions may set; the rest is the server's.
SAMPLING_NAMES = {"n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids"}
SAMPLING_NAMES |= {"include_stop_str_in_output", "ignore_eos", "seed", "repetition_penalty", "presence_penalty"}
SAMPLING_NAMES |= {"frequency_penalty", "bad_words", "logit_bias", "skip_special_tokens"}


def check_sampling_params(sampling_params: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no mapping, and for names outside SAMPLING_NAMES, which vLLM would ignore."""
    if not isinstance(sampling_params, Mapping):
        kind = type(sampling_params).__name__
        raise ValueError(f"sampling_params: got {kind}; accepted is a dict of names and values")
    if unknown := sorted(set(sampling_params) - SAMPLING_NAMES):
        raise ValueError(f"sampling_params: got {', '.join(unknown)}; accepted are {', '.join(sorted(SAMPLING_NAMES))}")
    for name in ("n", "max_tokens"):
        value = sampling_params.get(name, 1)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"sampling_params: {name} is {value!r}; accepted is a whole number of at least 1")


def check_temperature(sampling: Sampling, temperature: float) -> None:
    """Raise ValueError where a vLLM engine started for `temperature` cannot give the log-probs of `Completion`.

    vLLM has log-probs from before temperature, top_p and min_tokens, or from after all three.
    """
    if sampling.temperature not in (0, temperature):
        raise ValueError(f"temperature: got {sampling.temperature}; this engine was started for {temperature} and 0")
    if temperature != 1 and (sampling.top_p < 1 or sampling.min_tokens > 0):
        given = f"{sampling.top_p} and {sampling.min_tokens}"
        raise ValueError(f"top_p and min_tokens: got {given}; vLLM at temperature {temperature} accepts 1 and 0")


def prompt_seed(seed: int | str, prompt: int) -> int:
    """Return the seed of one prompt.  vLLM adds the sample's number to it, so that no two rows share a seed.

    With one seed for a whole call, all groups would share their random numbers.
    """
    return random.Random(f"{seed}/{prompt}").getrandbits(62)


def visible_device(index: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child that sees only this process's GPU `index`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if visible == [""]:
        return str(index)
    if index >= len(visible):
        raise ValueError(f"engine_gpu: got {index}; CUDA_VISIBLE_DEVICES shows {len(visible)} GPUs, numbered from 0")
    return visible[index]


def as_completion(text: str, token_ids: Sequence[int], finish_reason: str, log_probs: Sequence[float]) -> Completion:
    """Return vLLM's answer as a Completion.  Raises RuntimeError unless it ended by "stop" or "length"."""
    if finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with finish_reason {finish_reason!r}")
    if len(token_ids) != len(log_probs):
        raise RuntimeError(f"vLLM gave {len(log_probs)} log-probs for {len(token_ids)} tokens")
    return Completion(text, list(token_ids), finish_reason, list(log_probs))
