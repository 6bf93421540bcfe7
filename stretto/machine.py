"""Which cores and devices each side owns, and what a process must set so that its numbers repeat."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any, Literal

from stretto.config import Config
from stretto.types import ConfigError

ENVIRONMENT = {
    # A second OpenMP thread that spins on a busy core made steps up to ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray keeps a record of the last 100,000 calls for a dashboard that is off here: 40 MiB per 100 updates.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default of 15 makes training give way to whatever else runs on the machine.
    "RAY_worker_niceness": "0",
}
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Share:
    """What one process of a side owns: ``cores`` to be pinned to (empty: not pinned), and torch ``threads`` (0: torch's
    own choice)."""

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Placement:
    """Cores (empty: not pinned, on a cluster) of each side and of its processes, and the device of both.

    ``ranks``: one share a data-parallel actor rank. ``replicas``: one an engine replica, of ``engine_gpus`` GPUs each.
    ``pairs``: Ray's placement group whose bundle i is the GPU that rank i and replica i share; None where each has its
    own. ``note`` says why ``auto`` chose the CPU.
    """

    actor_cores: tuple[int, ...]
    rollout_cores: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    ranks: tuple[Share, ...] = ()
    replicas: tuple[Share, ...] = ()
    note: str = ""
    engine_gpus: int = 1
    pairs: Any = None


def placement(config: Config) -> Placement:
    """Resolve ``cluster.*``. Sides without named cores share out, half and half, what is left of this machine's.

    Raises:
        ConfigError: ``device = "cuda"`` where actor ranks and engine replicas cannot have a GPU each.
    """
    cluster = config.cluster
    ranks, replicas = config.actor.data_parallel, config.rollout.replicas
    device, note = _device(config)
    if cluster.address:
        actor, rollout = cluster.actor_cores, cluster.rollout_cores
    else:
        named = set(cluster.actor_cores) | set(cluster.rollout_cores)
        free = sorted(os.sched_getaffinity(0) - named)
        half = (len(free) + 1) // 2
        actor = cluster.actor_cores or tuple(free[:half] if not cluster.rollout_cores else free)
        rollout = cluster.rollout_cores or tuple(free[half:] if not cluster.actor_cores else free)
    each = engine_gpus(config) // replicas
    return Placement(actor, rollout, device, shares(actor, ranks), shares(rollout, replicas), note, engine_gpus=each)


def shares(cores: tuple[int, ...], parts: int) -> tuple[Share, ...]:
    """Cut ``cores`` into ``parts`` runs of one length: the number of threads changes the last bits of a product, so all
    parts have the same, and cores that are left over stay with the side's other threads. Where there are fewer cores
    than parts, all parts share all of them, with one thread each: a second one would only wait for its turn.
    """
    each = len(cores) // parts
    if not cores:
        return (Share((), 0),) * parts
    if not each:
        return (Share(cores, 1),) * parts
    return tuple(Share(cores[i * each : (i + 1) * each], each) for i in range(parts))


def single_device(config: Config) -> Literal["cpu", "cuda"]:
    """Where a model alone runs, outside a run: ``cluster.device``, with ``auto`` a GPU where there is one."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if _gpu_count() else "cpu"


def engine_gpus(config: Config) -> int:
    """GPUs of this run's engines: ``rollout.tensor_parallel`` a replica; none in a replay, whose engines hold no model,
    nor where someone else runs them.
    """
    if config.seams.replay or config.rollout.engine == "http":
        return 0
    return config.rollout.replicas * (config.rollout.tensor_parallel if config.rollout.engine == "vllm" else 1)


def gpu_share(place: Placement, index: int, *, engine: bool = False) -> dict[str, Any]:
    """What Ray is told of the GPUs of rank or replica ``index``."""
    if place.device != "cuda":
        return {"num_gpus": 0}
    if place.pairs is None:
        return {"num_gpus": place.engine_gpus if engine else 1}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    pair = PlacementGroupSchedulingStrategy(
        placement_group=place.pairs,
        placement_group_bundle_index=index,
        placement_group_capture_child_tasks=False,
    )
    return {"num_gpus": 0.5, "scheduling_strategy": pair}


def _device(config: Config) -> tuple[Literal["cpu", "cuda"], str]:
    """Every rank and every engine needs GPUs of its own, or one for two of them (``cluster.colocate``); with the reason
    where ``auto`` falls back to the CPU. In a replay ``auto`` decides as in the run that it repeats.
    """
    asked = config.cluster.device
    if asked == "cpu":
        return "cpu", ""
    if config.cluster.address:  # the GPUs of other machines can not be seen from here; Ray waits for them
        return "cuda", ""
    ranks = config.actor.data_parallel
    live = config if asked == "cuda" else config.with_seams(replay="")
    engines = engine_gpus(live)
    gpus = _gpu_count()
    if config.cluster.colocate:
        needed = max(ranks, engines)
        need = f"actor.data_parallel = {ranks} ranks share a GPU with an engine each, so {needed}, and {gpus}"
    else:
        needed = ranks + engines
        sides = f"actor.data_parallel = {ranks}" + (
            f" and rollout.replicas = {config.rollout.replicas}" * bool(engines)
        )
        wide = config.rollout.tensor_parallel if engines > config.rollout.replicas else 1
        need = (
            f"{sides} need " + (f"{wide} GPUs an engine" if wide > 1 else "a GPU each") + f", so {needed}, and {gpus}"
        )
    need += " can be seen here"
    if gpus >= needed:
        return "cuda", ""
    on_gpus = config.weight_transfer != "host"  # weights that never leave them
    if asked == "cuda" or on_gpus:
        lower = "one of the two" if engines else "it"
        cpu = "take cluster.colocate and rollout.weight_transfer out" if on_gpus else 'set cluster.device = "cpu"'
        raise ConfigError(
            [f'cluster.device = "{asked}": {need}; make more visible (CUDA_VISIBLE_DEVICES), lower {lower}, or {cpu}']
        )
    return "cpu", f'cluster.device = "auto" chose the CPU: {need}'


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this process, if they descend from it: none gets away."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def settle(cores: tuple[int, ...], determinism: Literal["exact", "fast"], threads: int = 0) -> dict[str, Any]:
    """Pin this process to ``cores``, with as many torch threads (or ``threads``); make its results repeat where
    ``exact`` asks for it.

    Must run before the process does any work. Returns what was set, for the manifest.
    """
    import torch
    import transformers

    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads or len(cores))
    transformers.utils.logging.disable_progress_bar()
    if determinism == "exact":
        # cuBLAS picks its workspace, and with it the order of sums, at first use.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
