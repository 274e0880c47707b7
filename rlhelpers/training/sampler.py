"""The sampler of a run: an engine that is checked against the policy's log-probs, and restarted when it dies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import torch

from rlhelpers import paths
from rlhelpers.kernels.logprobs import score_batch
from rlhelpers.kernels.tokens import pad_prompts_and_outputs, padding_id
from rlhelpers.rollouts import EngineDeadError, Rollout, RolloutEngine, Sampling, TorchEngine
from rlhelpers.rollouts.engine import PROBE, inspect_rollouts
from rlhelpers.training.config import RunConfig

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
MAX_RESTARTS = 3
# Mean |difference| in nats.  Measured in step: 1e-6 in float32; 0.02 in bf16, whose rounding steps are 2^16 larger.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


class NotInSyncError(RuntimeError):
    """The engine samples from other weights than the policy's."""


class Sampler:
    """The engine of one run.  `remark` takes a sentence that a reader of the results must know."""

    def __init__(
        self,
        engine: RolloutEngine,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        temperature: float,
        remark: Callable[[str], None],
    ):
        self.engine, self.policy, self.tokenizer = engine, policy, tokenizer
        self.temperature, self.remark, self.restarts = temperature, remark, 0
        self._background = ThreadPoolExecutor(1)

    def sync(self) -> None:
        """Give the engine the policy's weights, and check that it has them.  Raises NotInSyncError."""
        self._with_restart(self._sync, lambda: None)  # a restart syncs

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        """Sample.  Raises RuntimeError for rollouts that cannot be samples of the policy; see `inspect_rollouts`."""
        return self._with_restart(lambda: self._generate(prompts, sampling))

    def generate_async(self, prompts: Sequence[str], sampling: Sampling) -> Callable[[], list[Rollout]]:
        """Sample in the background.  Return a function that waits for the rollouts; where the engine died over them, it
        samples again, from the policy as it is by then."""
        under_way = self._background.submit(self._generate, prompts, sampling)
        return lambda: self._with_restart(under_way.result, lambda: self._generate(prompts, sampling))

    def sleep(self) -> None:
        """Let the engine give back memory: nothing is sampled before the next sync."""
        self._with_restart(self.engine.sleep)

    def close(self) -> None:
        self.engine.close()  # which ends what is under way
        self._background.shutdown()

    def _generate(self, prompts: Sequence[str], sampling: Sampling) -> list[Rollout]:
        rollouts = self.engine.generate(prompts, sampling)
        inspect_rollouts(rollouts, prompts, sampling, self.policy.get_input_embeddings().num_embeddings)
        return rollouts

    def _sync(self) -> None:
        self.engine.sync_weights(self.policy)
        if not isinstance(self.engine, TorchEngine):  # which samples with the policy itself
            check_in_sync(self.engine, self.policy, self.tokenizer, self.temperature)

    def _with_restart(self, action: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """Return action().  Where the engine dies over it, restart the engine, give it the weights, and return again()
        (default: the action), at most MAX_RESTARTS times in a run."""
        again = again or action
        while True:
            try:
                return action()
            except EngineDeadError as error:
                self.restarts += 1
                if self.restarts > MAX_RESTARTS:
                    raise
                reason, *_ = str(error).splitlines() or ["it did not say why"]
                self.remark(f"The engine died and was started again: {reason}")
                action = partial(self._restarted, again)

    def _restarted(self, action: Callable[[], T]) -> T:
        self.engine.restart()
        self._sync()
        return action()


class RolloutStream:
    """The rollouts of one training step after the other.  `request(step)` is what to ask the sampler for.

    With `ahead`, those of the next step are sampled while this step trains; after the step `last` none follows.
    """

    def __init__(self, sampler: Sampler, request: Callable[[int], tuple[list[str], Sampling]], last: int, ahead: bool):
        self.sampler, self.request, self.last, self.ahead = sampler, request, last, ahead
        self._next: Callable[[], list[Rollout]] | None = None

    def take(self, step: int) -> list[Rollout]:
        """Those of this step.  Without `ahead`, the engine then sleeps until the next sync."""
        if not self.ahead:
            rollouts = self.sampler.generate(*self.request(step))
            self.sampler.sleep()
            return rollouts
        under_way = self._next or self.sampler.generate_async(*self.request(step))
        rollouts = under_way()
        self._next = None if step == self.last else self.sampler.generate_async(*self.request(step + 1))
        return rollouts

    def settle(self) -> None:
        """Wait for what is under way: new weights must not change it half-way."""
        if self._next is not None:
            self.put_back(self._next())

    @property
    def finished(self) -> list[Rollout] | None:
        """What was sampled ahead and is not taken yet; None where nothing was."""
        return None if self._next is None else self._next()

    def put_back(self, rollouts: list[Rollout] | None) -> None:
        """Of a checkpoint."""
        self._next = None if rollouts is None else lambda: rollouts


def make_engine(
    config: RunConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, log: Path
) -> RolloutEngine:
    """The engine that the configuration names, not started yet.  `log`: what vLLM's processes print.

    Raises ValueError as `check_engine` does.
    """
    check_engine(config, policy.device)
    if config.engine == "torch":
        return TorchEngine(policy, tokenizer)
    model = str(paths.TINY) if config.model == "tiny" else config.model
    settings = {"kv_cache_gib": config.kv_cache_gib, "temperature": config.temperature, "seed": config.seed}
    if config.engine == "vllm":
        from rlhelpers.rollouts.vllm_inprocess import VLLMEngine

        return VLLMEngine(model, tokenizer, sleep_level=config.sleep_level, log=log, **settings)
    from rlhelpers.rollouts.vllm_server import VLLMServer

    gpu = server_gpu(config.engine_gpu, policy.device, torch.cuda.device_count())
    dtype, backend = str(policy.dtype).removeprefix("torch."), weight_backend(policy.device, gpu)
    return VLLMServer(model, gpu=gpu, tokenizer=tokenizer, dtype=dtype, weight_backend=backend, log=log, **settings)


def check_engine(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError where this machine cannot sample so for a policy on `device`; nothing is loaded for it.

    A configuration alone does not ask: it may be of a run on another machine.
    """
    if config.engine == "torch":
        return
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"engine: got {config.engine!r}, but vLLM is not installed here.  On a CPU, `make vllm` makes .venv-vllm, "
            "which has it; with a GPU, pip install --editable '.[gpu]'.  The engine torch needs neither"
        )
    if config.sleep_level and device.type == "cpu":
        raise ValueError(f"sleep_level: got {config.sleep_level}; vLLM on a CPU does not sleep, accepted is 0")
    if config.engine == "vllm-server":
        server_gpu(config.engine_gpu, device, torch.cuda.device_count())


def weight_backend(policy_device: torch.device, server_gpu: int | None) -> str:
    """The way from the policy to a server: NCCL needs two GPUs, CUDA IPC one, and files in shared memory none."""
    if policy_device.type == "cpu":
        return "shared_memory"
    return "ipc" if (policy_device.index or 0) == server_gpu else "nccl"


def server_gpu(wanted: int | None, policy_device: torch.device, gpus: int) -> int | None:
    """The server's GPU: the one that is wanted, else the one after the policy's; None where there is no GPU.

    Raises ValueError for one that is not there.
    """
    if wanted is None and gpus == 0:
        return None
    after = (policy_device.index or 0) + 1 if policy_device.type == "cuda" else 0
    gpu = after if wanted is None else wanted
    if gpu >= gpus:
        raise ValueError(
            f"engine_gpu: got {wanted}, and the server would need GPU {gpu}; this machine has {gpus} GPUs, numbered "
            "from 0.  To sample on the policy's GPU, take engine vllm, or name that GPU"
        )
    return gpu


def check_in_sync(
    engine: RolloutEngine, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float
) -> float:
    """The mean |log-prob of the engine - log-prob of the policy| in nats, over 4 short samples to a fixed prompt.

    Raises NotInSyncError above the limit of the policy's dtype, RuntimeError for samples that cannot be.  Within the
    limit, a small update that was missed can hide; the metric `mismatch_mean` of the run shows it as it grows.
    """
    context = policy.config.max_position_embeddings
    sampling = Sampling(n=4, temperature=temperature, max_tokens=min(16, context // 2), seed=0)
    rollouts = engine.generate([PROBE], sampling)
    inspect_rollouts(rollouts, [PROBE], sampling, policy.get_input_embeddings().num_embeddings)
    [rollout] = rollouts
    outputs = [completion.token_ids for completion in rollout.completions]
    prompts = [rollout.prompt_token_ids] * len(outputs)
    batch = pad_prompts_and_outputs(prompts, outputs, padding_id(tokenizer))
    scored = score_batch(policy, batch["input_ids"], batch["labels"], len(outputs), temperature)
    scored = scored.cpu()[batch["response_mask"]].tolist()
    sampled = [log_prob for completion in rollout.completions for log_prob in completion.log_probs]
    difference = fmean(abs(a - b) for a, b in zip(scored, sampled, strict=True))
    limit = LIMITS.get(policy.dtype, 1e-3)
    if not difference <= limit:
        raise NotInSyncError(
            "weights not in sync: on a fixed prompt the engine's log-probs differ from the policy's by "
            f"{difference:.4g} nats on average; the limit for {policy.dtype} is {limit}"
        )
    return difference
