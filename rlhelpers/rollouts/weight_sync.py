"""Weights from the trainer to vLLM, over vLLM's own weight transfer: by NCCL between two GPUs, by CUDA IPC on one.

On a CPU, which vLLM has no way for, each update is one safetensors file in shared memory.  The calls and their order
are the same for all three, so that what is tested on a CPU is what runs on GPUs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.clients import _json_safe_update_payload
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rlhelpers.rollouts.processes import end_with_owner, environment, free_port, with_timeout
from rlhelpers.rollouts.vllm_settings import loopback_environment

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

SECONDS = 300  # longer than any transfer takes; after it the engine counts as dead
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


class WeightSync:
    """The connection from this trainer to one vLLM engine.

    `backend`: "nccl" between two GPUs, "ipc" on one, "shared_memory" on the CPU.  `call_workers`: calls a method of the
    engine's workers by its name, with named arguments.  `device`: the policy's.  Raises EngineDeadError when the engine
    does not answer in time, or `is_dead`.
    """

    def __init__(
        self, backend: str, call_workers: Callable[..., None], device: torch.device | str, is_dead: Callable[[], bool]
    ):
        register_shared_memory()
        self.source, self.device, client = PolicyWeights(), torch.device(device), _Client(call_workers)
        self.is_dead = lambda: client.is_refused() or is_dead()
        info = _init_info(backend)
        with environment(loopback_environment()):
            self.trainer = self._ask(
                lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)
            )

    def send(self, policy: PreTrainedModel) -> None:
        """Send all weights of the policy; the engine has them when this returns."""
        self.source.policy = policy
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the transfer's own streams do not wait for the optimizer's last step
        try:
            self._ask(self.trainer.send_weights)
        finally:
            self.source.policy = None  # the engine does not keep a policy alive

    def close(self) -> None:
        with suppress(Exception):  # to be expected after a death
            self._ask(self.trainer.shutdown)

    def _ask(self, action: Callable[[], Any]) -> Any:
        """Run the action with a time limit: a transfer blocks for ever when its other side has died."""

        def on_the_policys_device():
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                return action()

        return with_timeout(on_the_policys_device, SECONDS, self.is_dead)


class _Client:
    """vLLM's four calls.  Records a failed handshake, so that we fail now and not after the rendezvous timeout.

    vLLM's trainer asks the engine in a side thread, and waits minutes for a rendezvous before it looks at the answer.
    """

    def __init__(self, call_workers: Callable[..., None]):
        self._call, self._refusal = call_workers, None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._call("init_weight_transfer_engine", init_info=init_info)
        except Exception as error:
            self._refusal = error
            raise

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info=_json_safe_update_payload(update_info))  # CUDA's handles are no JSON

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def is_refused(self) -> bool:
        """Return False, or raise the refusal."""
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
    return SharedMemoryInitInfo(rank=0)


# Shared memory, for a CPU: both sides of a vLLM weight transfer.


@dataclass
class SharedMemoryInitInfo(TrainerInitInfo):
    """One trainer process, rank 0."""

    backend: ClassVar[str] = "shared_memory"


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryInitInfo]):
    """The trainer's side: writes the file, has it loaded, deletes it."""

    init_info_cls = SharedMemoryInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        remove_left_overs()
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        with tempfile.TemporaryDirectory(prefix=f"rlhelpers-{os.getpid()}-", dir=MEMORY) as folder:
            path = Path(folder) / "policy.safetensors"
            save_file({name: weight.detach().cpu().contiguous() for name, weight in self.source}, path)
            self.client.start_weight_update()
            self.client.update_weights({"path": str(path)})
            self.client.finish_weight_update()


def remove_left_overs() -> None:
    """Delete the files of trainers that were killed while they sent."""
    for folder in MEMORY.glob("rlhelpers-*-*") if MEMORY else ():
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the file is; its names are the checkpoint's."""

    path: str


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side: loads the file."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload  # only a worker needs it

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the embeddings is not loaded itself, and on the CPU it computes with a packed copy.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


def register_shared_memory() -> None:
    """Make the shared-memory transfer known to vLLM.  Safe to call twice."""
    for factory, side in (
        (WeightTransferEngineFactory, SharedMemoryEngine),
        (WeightTransferTrainerFactory, SharedMemoryTrainer),
    ):
        if "shared_memory" not in factory._registry:
            factory.register_engine("shared_memory", side)


def register() -> None:
    """Prepare one of vLLM's processes: vLLM calls it in each, by the entry point in pyproject.toml."""
    register_shared_memory()
    end_with_owner()
