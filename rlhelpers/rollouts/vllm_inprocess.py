"""vLLM through its `LLM` class: no server, no network; the engine's processes are children of this one.

They are separate processes because vLLM changes the one in which it loads a model: it patches transformers' classes,
seeds the global generators and pins threads.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlhelpers import paths
from rlhelpers.rollouts.engine import EngineDeadError, Rollout, Sampling, encode_prompts, end_of_text_ids
from rlhelpers.rollouts.processes import environment, output_to, with_timeout
from rlhelpers.rollouts.vllm_settings import (
    as_completion,
    check_temperature,
    launch_arguments,
    launch_environment,
    request_parameters,
    visible_device,
)

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
SECONDS = 300  # for all but sampling


class VLLMEngine:
    """A `RolloutEngine` on the policy's device; it starts with the first `sync_weights`.

    `model`: a directory or a Hugging Face name, for the architecture; the weights come from the policy.
    `temperature`: samples are drawn at this one, or at 0.  `sleep_level`: what `sleep` frees of a GPU's memory: 0
    nothing; 1 the cache, and the weights, which go to the CPU's memory; 2 both, and the weights are discarded.  `log`:
    where the engine's processes write.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        kv_cache_gib: float = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        sleep_level: int = 0,
        log: Path | None = None,
    ):
        self.model, self.tokenizer, self.temperature = model, tokenizer, temperature
        self.kv_cache_gib, self.seed, self.sleep_level = kv_cache_gib, seed, sleep_level
        self.log = log or paths.RUNS / "vllm.log"
        self.llm = self.weights = None
        self.asleep = False

    def sync_weights(self, policy: PreTrainedModel) -> None:
        """See `RolloutEngine.sync_weights`; starts or wakes the engine if need be."""
        if self.llm is None:
            self._start(policy)
        if self.asleep:
            torch.cuda.empty_cache()  # memory that the trainer has freed is the trainer's until then
            self._ask(lambda: self.llm.wake_up(tags=["weights"]))
        try:
            with engine_errors():
                self.weights.send(policy)
        except BaseException:
            self.close()  # nobody knows which weights it has now
            raise
        if self.asleep:
            self._ask(lambda: self.llm.wake_up(tags=["kv_cache"]))
            self.asleep = False
        if not self._ask(self.llm.reset_prefix_cache):
            raise EngineDeadError("the engine did not forget the keys and values of the old weights")
        self.eos_ids = end_of_text_ids(policy, self.tokenizer)

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """See `RolloutEngine.generate`.  Raises ValueError when a prompt and max_tokens exceed the context."""
        from vllm import SamplingParams

        check_temperature(sampling, self.temperature)
        if self.llm is None:
            raise RuntimeError("the engine is not running; call sync_weights(policy)")
        prompt_ids = encode_prompts(self.tokenizer, prompts, sampling.max_tokens, self.context)
        params = [SamplingParams(**request_parameters(sampling, i, self.eos_ids)) for i in range(len(prompts))]
        requests = [{"prompt_token_ids": ids} for ids in prompt_ids]
        try:
            answers = self._ask(lambda: self.llm.generate(requests, params, use_tqdm=False), seconds=math.inf)
        except KeyboardInterrupt:
            self.close()  # it would give the rows of this call to the next one
            raise
        rows = zip(prompts, prompt_ids, answers, strict=True)
        return [Rollout(prompt, ids, [_completion(o) for o in answer.outputs]) for prompt, ids, answer in rows]

    def sleep(self) -> None:
        if self.sleep_level and self.llm is not None and not self.asleep:
            self._ask(lambda: self.llm.sleep(level=self.sleep_level))
            self.asleep = True

    def restart(self) -> None:
        self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        llm, self.llm, self.weights, self.asleep = self.llm, None, None, False
        if llm is not None:
            with output_to(self.log):
                llm.llm_engine.engine_core.shutdown()

    def _ask(self, action: Callable[[], T], seconds: float = SECONDS) -> T:
        """Run the action with a time limit: vLLM waits for ever for an engine that was killed."""
        with engine_errors():
            return with_timeout(action, seconds, self._is_dead)

    def _call_workers(self, method: str, **given: Any) -> None:
        self.llm.collective_rpc(method, kwargs=given)

    def _is_dead(self) -> bool:
        return self.llm is None or self.llm.llm_engine.engine_core.resources.engine_dead

    def _start(self, policy: PreTrainedModel) -> None:
        device, on_cpu = policy.device, policy.device.type == "cpu"
        backend = "shared_memory" if on_cpu else "ipc"
        self.context = policy.config.max_position_embeddings
        arguments = launch_arguments(
            self.model,
            str(policy.dtype).removeprefix("torch."),
            on_cpu,
            self.context,
            backend,
            self.kv_cache_gib,
            self.temperature,
            self.seed,
        )
        variables = launch_environment(on_cpu, backend)
        if device.type == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = visible_device(device.index or 0)
            torch.cuda.empty_cache()
        print(f"vLLM starts; it writes to {self.log}", file=sys.stderr, flush=True)
        with environment(variables), output_to(self.log):
            from vllm import LLM

            from rlhelpers.rollouts.weight_sync import WeightSync

            atexit.register(self.close)  # before multiprocessing's own exit, which waits for the engine to end
            try:
                self.llm = LLM(**arguments, enable_sleep_mode=self.sleep_level > 0)
                self.weights = WeightSync(backend, self._call_workers, device, self._is_dead)
            except BaseException as error:
                self.close()
                if isinstance(error, Exception):
                    raise RuntimeError(f"vLLM did not start: {error}; see the end of {self.log}") from error
                raise


def _completion(output):
    log_probs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    return as_completion(output.text, output.token_ids, output.finish_reason, log_probs)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turn vLLM's EngineDeadError into ours."""
    from vllm.v1.engine import exceptions

    try:
        yield
    except exceptions.EngineDeadError as error:
        raise EngineDeadError(f"vLLM's engine process is gone: {error}") from error
