"""What vLLM loads into each of its processes, the server's, the engine's and the workers': see pyproject.toml."""

import logging
import os
import threading
import time
from contextlib import suppress

import psutil

# torch looks for triton when vLLM is imported, and would say at each start that a CPU has none.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)

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
    if owner and int(owner) != os.getpid():
        threading.Thread(target=_end_with_owner, args=(int(owner),), daemon=True).start()


def owner_environment() -> dict[str, str]:
    """The environment variable that ties vLLM's processes to this one.

    A process that is killed cannot end its children, and vLLM's would keep a GPU's memory for ever.
    """
    return {OWNER: str(os.getpid())}


def _end_with_owner(pid: int) -> None:
    """End this process, at once and whatever it does, when the owner is gone.

    The owner is an ancestor, which no later process with its number is.  A dead one that nobody has asked for yet, a
    zombie, is gone too.
    """
    with suppress(psutil.NoSuchProcess):
        owner = next((process for process in psutil.Process().parents() if process.pid == pid), None)
        # is_running compares ticks since the machine started: the clock may be set while this runs.
        while owner is not None and owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    os._exit(1)
