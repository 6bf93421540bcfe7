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
class Placement:
    """Cores (empty: not pinned, on a cluster) and device of each side."""

    actor_cores: tuple[int, ...]
    rollout_cores: tuple[int, ...]
    device: Literal["cpu", "cuda"]


def placement(config: Config) -> Placement:
    """Resolve ``cluster.*``. Sides without named cores share out, half and half, what is left of this machine's.

    Raises:
        ConfigError: ``device = "cuda"`` where actor and rollout cannot have a GPU each.
    """
    cluster = config.cluster
    if cluster.address:
        return Placement(cluster.actor_cores, cluster.rollout_cores, "cpu" if cluster.device == "cpu" else "cuda")
    named = set(cluster.actor_cores) | set(cluster.rollout_cores)
    free = sorted(os.sched_getaffinity(0) - named)
    half = (len(free) + 1) // 2
    actor = cluster.actor_cores or tuple(free[:half] if not cluster.rollout_cores else free)
    rollout = cluster.rollout_cores or tuple(free[half:] if not cluster.actor_cores else free)
    device: Literal["cpu", "cuda"] = "cpu"
    if cluster.device != "cpu":
        gpus = _gpu_count()
        if cluster.device == "cuda" and gpus < 2:
            raise ConfigError(
                [
                    f'cluster.device = "cuda": actor and rollout need a GPU each, and {gpus} can be seen here; make '
                    'two visible (CUDA_VISIBLE_DEVICES) or set cluster.device = "cpu"'
                ]
            )
        device = "cuda" if gpus >= 2 else "cpu"
    return Placement(actor, rollout, device)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this process, if they descend from it: none gets away."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def settle(cores: tuple[int, ...], determinism: Literal["exact", "fast"]) -> dict[str, Any]:
    """Pin this process to ``cores``, with as many torch threads; make its results repeat where ``exact`` asks for it.

    Must run before the process does any work. Returns what was set, for the manifest.
    """
    import torch
    import transformers

    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
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
