"""What vLLM loads into each of its processes, the server's, the engine's and the workers': see pyproject.toml."""

import os
import threading
import time

import psutil

OWNER = "RLHELPERS_VLLM_OWNER"


def register() -> None:
    """Make the shared-memory weight transfer known to vLLM, and tie this process's life to its owner's."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    module = "rlhelpers.rollouts.shared_memory"
    for factory, name in (
        (WeightTransferEngineFactory, "SharedMemoryEngine"),
        (WeightTransferTrainerFactory, "SharedMemoryTrainer"),
    ):
        if "shared_memory" not in factory._registry:
            factory.register_engine("shared_memory", module, name)
    owner = os.environ.get(OWNER)
    if owner and int(owner.split()[0]) != os.getpid():
        threading.Thread(target=_end_with_owner, args=(owner,), daemon=True).start()


def owner_environment() -> dict[str, str]:
    """The environment variable that ties vLLM's processes to this one.

    A process that is killed cannot end its children, and vLLM's would keep a GPU's memory for ever.
    """
    return {OWNER: f"{os.getpid()} {psutil.Process().create_time()}"}


def _end_with_owner(owner: str) -> None:
    """End this process, at once and whatever it does, when the owner is gone.  The start time tells it from a later
    process with the same number."""
    pid, started = int(owner.split()[0]), float(owner.split()[1])
    while True:
        try:
            alive = psutil.Process(pid).create_time() == started
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            os._exit(1)
        time.sleep(1)
