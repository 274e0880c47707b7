"""The trainer's side of vLLM's weight transfer: which weights go, and by what way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rlhelpers.rollouts.processes import bounded, free_port
from rlhelpers.rollouts.vllm_inprocess import environment
from rlhelpers.rollouts.vllm_plugin import register
from rlhelpers.rollouts.vllm_settings import loopback_environment

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

SECONDS = 300  # longer than any transfer takes; after it the engine counts as dead


class WeightSync:
    """One open way from this trainer to one vLLM engine.

    `backend`: "nccl" between two GPUs, "ipc" on one, "shared_memory" on the CPU.  `client` carries the calls to the
    engine.  `device`: the policy's.  Raises EngineDeadError when the other side does not answer in time, or `is_dead`.
    """

    def __init__(
        self, backend: str, client: VLLMWeightSyncClient, device: torch.device | str, is_dead: Callable[[], bool]
    ):
        register()
        self.source, self.device, client = PolicyWeights(), torch.device(device), _Client(client)
        self.is_dead = lambda: client.is_refused() or is_dead()
        info = _init_info(backend)
        with environment(loopback_environment()):
            self.trainer = self._bounded(
                lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)
            )

    def send(self, policy: PreTrainedModel) -> None:
        """All of the policy's weights; when this returns the engine has them."""
        self.source.policy = policy
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the transfer's own streams do not wait for the optimizer's last step
        try:
            self._bounded(self.trainer.send_weights)
        finally:
            self.source.policy = None  # the engine does not keep a policy alive

    def close(self) -> None:
        with suppress(Exception):  # as is to be expected of one that is closed after a death
            self._bounded(self.trainer.shutdown)

    def _bounded(self, action: Callable[[], Any]) -> Any:
        """A transfer whose other side has died would block for ever."""

        def on_the_policys_device():
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                return action()

        return bounded(on_the_policys_device, SECONDS, self.is_dead)


class _Client:
    """Remembers that the engine refused to open the way: vLLM's trainer asks it in a side thread, and waits minutes for
    a meeting before it looks at the answer."""

    def __init__(self, client: VLLMWeightSyncClient):
        self._client, self._refusal = client, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._client.init_weight_transfer_engine(init_info)
        except Exception as error:
            self._refusal = error
            raise

    def is_refused(self) -> bool:
        """False, or raises the refusal."""
        if self._refusal is not None:
            raise self._refusal
        return False


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

        return IPCTrainerInitInfo(rank=0)
    from rlhelpers.rollouts.shared_memory import SharedMemoryInitInfo

    return SharedMemoryInitInfo(rank=0)
