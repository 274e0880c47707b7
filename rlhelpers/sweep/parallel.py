"""Where the runs of a sweep are worked off: on this machine, or on a Ray cluster; joblib spreads the workers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import joblib


class Workers(Protocol):
    def __call__(self, work: Callable[[Sequence], None], tasks: Sequence) -> None:
        """Call work(tasks) in every worker, at most one for each task, and wait for them.

        Every one gets all tasks and takes of them what no other has taken yet: Ray's pool hands tasks to its workers in
        turns, also to one that is busy for hours while others idle."""


def on_this_machine(jobs: int) -> Workers:
    """`jobs` workers.  joblib gives them, and so their runs, an equal share of the cores as OMP_NUM_THREADS, where that
    is not set."""

    def spread(work: Callable, tasks: Sequence) -> None:
        number = min(jobs, len(tasks))
        joblib.Parallel(n_jobs=number, backend="loky", batch_size=1)(joblib.delayed(work)(tasks) for _ in range(number))

    return spread


def on_ray(jobs: int | None, gpus_per_run: float) -> Workers:
    """Workers on the cluster that RAY_ADDRESS or Ray's own record names, else on a Ray that is started here.

    Each has `gpus_per_run` GPUs of its own, which Ray names in CUDA_VISIBLE_DEVICES; `jobs` of them, or as many as
    there is room for.  Raises ModuleNotFoundError without Ray, ValueError where the cluster is too small.
    """
    try:
        import ray
        from ray.util.joblib import register_ray
        from ray.util.multiprocessing import Pool
    except ModuleNotFoundError:
        raise ModuleNotFoundError("engine: Ray is not installed here; pip install --editable '.[ray]'") from None
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    register_ray()
    room = sum(_room(node["Resources"], gpus_per_run) for node in ray.nodes() if node["Alive"])
    if not room:
        raise ValueError(f"gpus_per_run: got {gpus_per_run:g}; no machine of this cluster has as many GPUs")
    needs = {"num_cpus": 1, "num_gpus": gpus_per_run}

    def spread(work: Callable, tasks: Sequence) -> None:
        number = min(jobs or room, room, len(tasks))
        if number == 1:  # which joblib would do in this process, on this machine
            with Pool(1, ray_remote_args=needs) as pool:
                pool.apply(work, (tasks,))
            return
        parallel = joblib.Parallel(n_jobs=number, backend="ray", batch_size=1, ray_remote_args=needs)
        parallel(joblib.delayed(work)(tasks) for _ in range(number))

    return spread


def _room(resources: dict[str, Any], gpus_per_run: float) -> int:
    """How many runs one machine takes."""
    cores = int(resources.get("CPU", 0))
    return min(cores, int(resources.get("GPU", 0) / gpus_per_run)) if gpus_per_run else cores
