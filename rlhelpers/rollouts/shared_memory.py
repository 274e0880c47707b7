"""Weights from the trainer to vLLM on the same machine's CPU: one safetensors file in shared memory per update.

Both sides of a vLLM weight transfer, registered by `vllm_plugin`: the same calls in the same order as its NCCL and IPC
transfers, so that what is tested on a CPU is what runs on GPUs.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import psutil
from safetensors import safe_open
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are, under the names of the checkpoint."""

    path: str


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side: loads the file that it is told."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the embeddings is not loaded itself, and on the CPU it computes with a packed copy.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass


@dataclass
class SharedMemoryInitInfo(TrainerInitInfo):
    """One trainer process, rank 0."""

    backend: ClassVar[str] = "shared_memory"


class SharedMemoryTrainer(TrainerWeightTransferEngine[SharedMemoryInitInfo]):
    """The trainer's side: writes the file, has it loaded, takes it away."""

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
    """Delete what trainers that were killed while they sent have left."""
    for folder in MEMORY.glob("rlhelpers-*-*") if MEMORY else ():
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
