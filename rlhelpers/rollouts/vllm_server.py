"""vLLM as a server: the course's set-up, with the policy on one GPU and the server on another; or both on the CPU."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rlhelpers import paths
from rlhelpers.checks import check_whole
from rlhelpers.rollouts.engine import PROBE, Completion, Rollout, Sampling, encode_prompts, end_of_text_ids
from rlhelpers.rollouts.processes import ServerProcess, free_port, output_to, wait_for_port
from rlhelpers.rollouts.vllm_client import REQUESTS_AT_A_TIME, VLLMClient
from rlhelpers.rollouts.vllm_settings import (
    as_flags,
    check_address,
    check_sampling_params,
    check_temperature,
    launch_arguments,
    prompt_seed,
    read_model,
    request_parameters,
    server_environment,
)

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

VLLMCompletion = Completion  # the course's name


class VLLMServer:
    """A `RolloutEngine` with the course's interface too.

    It is a context manager, which may be entered again inside: the outermost exit ends the server.

    `host`: "localhost" or "127.0.0.1"; no other machine may reach a server to which everybody can give weights.
    `port`: None takes a free one.  `gpu`: the server's, where there are GPUs.  `load_format`: "auto" is "safetensors"
    (pickles are not opened); "dummy" starts with random weights.  `dtype`: "auto" is vLLM's choice, half precision for
    a float32 model.  `kv_cache_gib`: None gives vLLM `gpu_memory_utilization` of the card.  `launch_server`: False
    joins a server that is already running, and never ends it; it must serve this model with the same tokenizer, and
    its context counts where that is shorter.  `startup_timeout` in seconds.  `weight_backend`: None is "nccl" between
    GPUs and "shared_memory" on the CPU.  `temperature`: see `check_temperature`; it binds `generate`, not
    `generate_completions`.  `log`: where the server writes.
    """

    def __init__(
        self,
        model_id: str,
        host: str = "127.0.0.1",
        port: int | None = None,
        gpu: int | None = 1,
        seed: int = 0,
        load_format: str = "auto",
        gpu_memory_utilization: float = 0.9,
        launch_server: bool = True,
        startup_timeout: float = 600,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str = "auto",
        kv_cache_gib: float | None = None,
        weight_backend: str | None = None,
        temperature: float = 1.0,
        log: Path | None = None,
    ):
        check_address(host, port, launch_server)
        self.model_id, self.host, self.seed = model_id, "127.0.0.1", seed
        self.startup_timeout, self.temperature = startup_timeout, temperature
        self.tokenizer, self.context = read_model(model_id, tokenizer)
        self.log = log or paths.RUNS / "vllm_server.log"
        self._wanted_port, self._launch = port, launch_server
        on_cpu = not torch.cuda.is_available()
        self.weight_backend = weight_backend or ("shared_memory" if on_cpu else "nccl")
        self._arguments = {"gpu_memory_utilization": gpu_memory_utilization} | launch_arguments(
            model_id, dtype, on_cpu, self.context, self.weight_backend, kv_cache_gib, temperature, seed, load_format
        )
        self._environment = server_environment(on_cpu, self.weight_backend, gpu)
        self.eos_ids = [i for i in [self.tokenizer.eos_token_id] if i is not None]
        self._process: ServerProcess | None = None
        self._client: VLLMClient | None = None
        self._weights = None
        self._entered = self._calls = 0

    # The server's life.

    def start(self) -> Self:
        """Start the server and wait until it answers.

        Raises ValueError for a port that is taken and for another model's server, RuntimeError with the end of its log
        when it fails.
        """
        if self._client is not None:
            return self
        name = self.model_id
        self.port = self._wanted_port or free_port(self.host)
        where = f"{self.host}:{self.port}"
        if self._launch:
            # A made-up name: only our own child can answer to it.
            name = f"rlhelpers-{uuid.uuid4().hex[:12]}"
            wait_for_port(self.host, self.port)
            listen = {"host": self.host, "port": self.port, "served_model_name": name}
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_flags(self._arguments | listen)]
            self._process = ServerProcess(command, self._environment, self.log)
        self._client = VLLMClient(f"http://{where}", self._last_words)
        try:
            self._wait_until_ready(where)
            self._meet(name)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and all its processes, if we started it.  Safe to call twice."""
        process, weights, client = self._process, self._weights, self._client
        self._process = self._weights = self._client = None
        if process is not None:
            process.stop()
        if weights is not None:
            weights.close()
        if client is not None:
            client.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()

    def sleep(self) -> None:
        """Do nothing: the server has a device, or cores, of its own."""

    def __enter__(self) -> Self:
        self.start()
        self._entered += 1
        return self

    def __exit__(self, *error) -> None:
        self._entered -= 1
        if self._entered == 0:
            self.stop()

    def _wait_until_ready(self, where: str) -> None:
        writes = f"; it writes to {self.log}" if self._launch else ""
        message = f"Waiting for the vLLM server at {where}, at most {self.startup_timeout} s{writes}"
        print(message, file=sys.stderr, flush=True)
        deadline = time.monotonic() + self.startup_timeout
        while not self._client.is_ready(seconds=max(0.1, min(5, deadline - time.monotonic()))):
            if self._is_dead():
                raise RuntimeError(f"the vLLM server ended with status {self._process.exit_status}{self._last_words()}")
            if time.monotonic() > deadline:
                limit = f"startup_timeout={self.startup_timeout}"
                raise RuntimeError(f"no vLLM server answered at {where} within {limit} s{self._last_words()}")
            time.sleep(0.2)

    def _meet(self, name: str) -> None:
        """Find the name by which the server serves this model; check the tokenizer and context of one that was joined.

        Its weights are not checked here, because the trainer has not sent any yet.
        """
        models = self._client.served_models()
        known = [served for served, model in models.items() if name in (served, model.get("root"))]
        if not known:
            raise ValueError(f"port: another server answers at {self.port}; it serves {list(models)}")
        self.served_model = known[0]
        if self._launch:
            return
        self.context = min(self.context, models[self.served_model].get("max_model_len") or self.context)
        if self._client.tokenize(self.served_model, PROBE) != self.tokenizer.encode(PROBE, add_special_tokens=False):
            raise ValueError(f"port: the server at {self.port} serves {known[0]!r} with another tokenizer")

    def _last_words(self) -> str:
        return f"\nThe last lines of {self.log}:\n{self._process.tail()}" if self._process is not None else ""

    def _is_dead(self) -> bool:
        return self._process is not None and self._process.exit_status is not None

    def _running(self) -> VLLMClient:
        if self._client is None:
            raise RuntimeError("the server is not running; call start()")
        return self._client

    # Weights.

    def init_weight_sync(self, policy_device: torch.device | str) -> None:
        """Open the connection for weights of a policy on this device.  Raises EngineDeadError when that fails."""
        with output_to(self.log):  # vLLM prints in this process too
            from rlhelpers.rollouts.weight_sync import WeightSync

            self._weights = WeightSync(self.weight_backend, self._running().call_workers, policy_device, self._is_dead)

    def sync_policy_weights(self, policy: PreTrainedModel) -> None:
        """Sample from these weights from now on; forget keys and values of the old ones."""
        if self._weights is None:
            raise RuntimeError("call init_weight_sync(policy_device) before sync_policy_weights(policy)")
        try:
            self._weights.send(policy)
            self._running().reset_prefix_cache()
        except BaseException:
            self.stop()  # nobody knows which weights it has now
            raise
        self.eos_ids = end_of_text_ids(policy, self.tokenizer)

    def sync_weights(self, policy: PreTrainedModel) -> None:
        """See `RolloutEngine.sync_weights`; starts the server if need be."""
        self.start()
        if self._weights is None:
            self.init_weight_sync(policy.device)
        self.sync_policy_weights(policy)

    # Samples.

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`.  Raises ValueError when a prompt and max_tokens exceed the context."""
        check_temperature(sampling, self.temperature)
        prompt_ids = encode_prompts(self.tokenizer, prompts, sampling.max_tokens, self.context)
        requests = [request_parameters(sampling, i, self.eos_ids) for i in range(len(prompts))]
        groups = self._running().complete(self.served_model, prompt_ids, requests)
        return [Rollout(*row) for row in zip(prompts, prompt_ids, groups, strict=True)]

    def generate_completions(
        self, prompts: Sequence[str], sampling_params: Mapping[str, Any], batch_size: int | None = None
    ) -> list[VLLMCompletion]:
        """Return the samples of all prompts in order, those of one prompt side by side.

        `sampling_params`: names and values of vLLM's completions endpoint (n, temperature, top_p, max_tokens, stop,
        include_stop_str_in_output, seed, ...).  The text keeps the stop string by default, so that a response can end
        in </answer>.  Each prompt gets its own seed, derived from `seed`; without one, from the server's seed and the
        number of this call.  `batch_size`: the largest number of prompts under way at a time.
        """
        check_sampling_params(sampling_params)
        if batch_size is not None:
            check_whole(1, batch_size=batch_size)
        request = dict(sampling_params)
        max_tokens = request.setdefault("max_tokens", 16)
        prompt_ids = encode_prompts(self.tokenizer, prompts, max_tokens, self.context)
        self._calls += 1
        seed = request.pop("seed", None)
        seed = f"{self.seed}/{self._calls}" if seed is None else seed
        request = {"stop_token_ids": self.eos_ids, "include_stop_str_in_output": True} | request
        requests = [request | {"seed": prompt_seed(seed, i), "logprobs": 0} for i in range(len(prompts))]
        groups = self._running().complete(self.served_model, prompt_ids, requests, batch_size or REQUESTS_AT_A_TIME)
        return [completion for group in groups for completion in group]
