"""The trainer's side of vLLM's weight transfer: which weights go, and by what way."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rlhelpers.rollouts.engine import EngineDeadError
from rlhelpers.rollouts.server_process import free_port
from rlhelpers.rollouts.vllm_plugin import register

SECONDS = 300  # longer than any transfer takes; after it the engine counts as dead


class WeightSync:
    """One open way from this trainer to one vLLM engine.

    `backend`: "nccl" between two GPUs, "ipc" on one, "shared_memory" on the CPU.  `client` carries the calls to the
    engine.  `device`: the policy's.  Raises EngineDeadError when the other side does not answer in time.
    """

    def __init__(self, backend: str, client: VLLMWeightSyncClient, device: torch.device | str):
        register()
        self.source, self.device = PolicyWeights(), torch.device(device)
        info = _init_info(backend)
        self.trainer = self._bounded(
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)
        )

    def send(self, policy: PreTrainedModel) -> None:
        """All of the policy's weights; when this returns the engine has them."""
        self.source.policy = policy
        try:
            self._bounded(self.trainer.send_weights)
        finally:
            self.source.policy = None  # the engine does not keep a policy alive

    def close(self) -> None:
        with suppress(EngineDeadError):  # as is to be expected of one that is closed after a death
            self._bounded(self.trainer.shutdown)

    def _bounded(self, action: Callable[[], Any]) -> Any:
        """The action's result.  A transfer whose other side has died blocks for ever, so it has a thread of its own."""
        outcome = {}

        def run():
            try:
                on_gpu = self.device.type == "cuda"
                with torch.cuda.device(self.device) if on_gpu else nullcontext():
                    outcome["result"] = action()
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SECONDS)
        if not outcome:
            raise EngineDeadError(f"the engine did not take the weights within {SECONDS} s")
        if "error" in outcome:
            raise EngineDeadError(f"the engine did not take the weights: {outcome['error']}") from outcome["error"]
        return outcome["result"]


class PolicyWeights(WeightSource):
    """The policy's parameters under the checkpoint's names, in the policy's dtype; vLLM casts them to its own.

    Tied weights are one parameter and go once: an engine whose configuration ties them knows no second name.
    """

    policy: PreTrainedModel | None = None

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.policy.named_parameters():
            yield name, weight.detach()


def _init_info(backend: str) -> TrainerInitInfo:
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        # This trainer and one worker.
        return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=2, rank=0)
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(packed=True, rank=0)
    from rlhelpers.rollouts.shared_memory import SharedMemoryInitInfo

    return SharedMemoryInitInfo(rank=0)
