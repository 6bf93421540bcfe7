"""Memory and disk: what a run takes at least, against what there is."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stretto import machine
from stretto.config import Config
from stretto.observe.hardware import cgroup_limits, memory_bytes, read_first_line
from stretto.preflight.case import Case, Caution, Fact, Line, size
from stretto.preflight.model import sizes, trained
from stretto.problems import Problem

FLOAT32 = 4
PROCESS_BYTES = 350 * 2**20
"""A process with torch, transformers and ray loaded, before it holds a weight."""
SLOW_STORE_BYTES = 10**10
"""An object store above this Ray refuses to keep elsewhere than in shared memory, unless its variable allows it."""
SLOW_STORE = "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE"
TEMPORARY_BYTES = 2**30


@dataclass(frozen=True)
class Needs:
    """Bytes of one process of each kind, without activations: a lower bound.

    ``rank`` is one actor rank: weights, gradient, optimizer; ``others`` what it keeps of other policies in host memory;
    ``engine`` one replica, of which ``cache`` keys and values of a decode batch; ``versions`` the published weights;
    ``store`` the object store, versions included.
    """

    rank: int
    others: int
    engine: int
    cache: int
    versions: int
    store: int


def needs(case: Case) -> Needs:
    from stretto.cluster import object_store_bytes

    config = case.config
    parameters, version = sizes(case)
    weights = parameters * (FLOAT32 if config.model.dtype == "float32" else 2)
    changing = trained(case)
    # A float32 parameter is its own master; one of bfloat16 has a master beside it, which ranks share out as they do
    # the optimizer's two moments.
    shared = 2 * FLOAT32 * changing + (FLOAT32 * changing if config.model.dtype != "float32" else 0)
    rank = weights + FLOAT32 * changing + shared // config.actor.data_parallel
    cache = _cache_bytes(case)
    versions = (config.staleness.max + 2) * version
    others = _tags(config) * changing * (FLOAT32 if config.model.dtype == "float32" else 2) + case.teacher_bytes
    engine = weights + (version if config.lora.rank > 0 and config.lora.publish == "adapter" else 0)
    if config.weight_transfer != "host":  # the versions that engines may still take lie on the rank's device
        rank += versions
    return Needs(rank, others, engine + cache, cache, versions, object_store_bytes(config))


def _tags(config: Config) -> int:
    """Sets of weights in host memory; while one of them is resident, the actor's own lie there."""
    algorithm = config.algorithm
    tags = int(algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0) + int(algorithm.old_policy == "old_actor")
    return tags + 1 if tags else 0


def _cache_bytes(case: Case) -> int:
    """Keys and values of one decode batch at its longest; 0 where no prompt is known."""
    if case.family is None or not case.processed:
        return 0
    rollout, text = case.config.rollout, case.family.config.text_config
    rows = min(rollout.groups_per_decode_batch, rollout.prompts_per_partition) * rollout.n_samples_per_prompt
    tokens = max(len(p.prompt_ids) for p in case.processed) + rollout.max_response_tokens
    itemsize = FLOAT32 if case.config.model.dtype == "float32" else 2
    return rows * tokens * text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * itemsize


def memory(case: Case) -> Iterator[Line]:
    config = case.config
    if case.family is None:
        yield Fact("not looked at, since there is no model")
        return
    need = needs(case)
    ranks, replicas = config.actor.data_parallel, config.rollout.replicas
    beside = f", {size(need.others)} for other policies" if need.others else ""
    yield Fact(
        f"an actor rank takes {size(need.rank)}{beside} and an engine {size(need.engine)} ({size(need.cache)} of it "
        f"for keys and values), activations not counted; object store {size(need.store)} at most"
    )
    if config.cluster.address:
        yield Fact("not compared, since the run is on a cluster")
        return
    yield from _shared_memory(need.store)
    gpus = _gpus(config)
    if gpus:
        yield from _gpu_memory(case, need, gpus)
    weights = need.versions + ranks * need.others
    weights += 0 if gpus else ranks * need.rank + replicas * (need.engine - need.cache)
    processes = ranks + replicas + config.switches.processor_pool + 3
    likely = weights + (0 if gpus else replicas * need.cache) + PROCESS_BYTES * processes
    yield from _ram(case, weights, likely)


def _ram(case: Case, weights: int, likely: int) -> Iterator[Line]:
    total, free = ram()
    if weights > total:
        names = (case.model_name, "actor.data_parallel", "rollout.replicas")
        yield Problem(
            names,
            f"{case.model_name}: weights, gradients and optimizer of all processes take {size(weights)}, and this "
            f"machine has {size(total)} of memory; take a smaller model, bfloat16 (model.dtype), fewer processes "
            f"(actor.data_parallel = {case.config.actor.data_parallel}, rollout.replicas = "
            f"{case.config.rollout.replicas}) or a machine with more",
        )
        return
    yield Fact(f"all processes take about {size(likely)}; the machine has {size(total)}, {size(free)} of it free")
    if likely > free:
        yield Caution(
            f"about {size(likely)} are needed and {size(free)} are free now; end what else runs here, or the kernel "
            "may end the run"
        )


def ram() -> tuple[int, int]:
    """Bytes that processes here may use, and those of them that are free."""
    total, free = memory_bytes(), int(psutil.virtual_memory().available)
    limit = cgroup_limits()["memory_bytes"]
    if limit is not None and limit < total:
        used = int(read_first_line("/sys/fs/cgroup/memory.current") or 0)
        return int(limit), max(0, min(free, int(limit) - used))
    return total, free


def _shared_memory(store: int) -> Iterator[Line]:
    free = shutil.disk_usage("/dev/shm").free
    if store <= free:
        yield Fact(f"/dev/shm has {size(free)} for the object store")
        return
    why = (
        f"the object store takes up to {size(store)}, and /dev/shm has {size(free)}; lower plane.capacity_mib or "
        "staleness.max, remove files from /dev/shm, or enlarge it (mount -o remount,size=…, docker run --shm-size=…)"
    )
    if store > SLOW_STORE_BYTES and not os.environ.get(SLOW_STORE):
        yield Problem(("plane.capacity_mib",), f"plane.capacity_mib: {why}")
    else:
        yield Caution(f"{why}; Ray keeps it in {tempfile.gettempdir()} instead, which is slower")


def _gpus(config: Config) -> list[int]:
    """Memory of each GPU that the run will use; empty on the CPU."""
    if machine.placement(config).device != "cuda":
        return []
    import torch

    ranks, engines = config.actor.data_parallel, machine.engine_gpus(config)
    wanted = max(ranks, engines) if config.cluster.colocate else ranks + engines
    return [torch.cuda.get_device_properties(i).total_memory for i in range(wanted)]


def _gpu_memory(case: Case, need: Needs, totals: list[int]) -> Iterator[Line]:
    """Actor ranks come first, then the engines; where they share, a GPU has one of each."""
    ranks = case.config.actor.data_parallel
    for index, total in enumerate(totals):
        what, least = ("actor rank", need.rank) if index < ranks else ("engine", need.engine)
        if case.config.cluster.colocate:
            what, least = "actor rank and an engine", need.rank + need.engine
        if least > total:
            yield Problem(
                (case.model_name, "actor.data_parallel"),
                f"{case.model_name}: an {what} takes {size(least)} without activations, and GPU {index} has "
                f"{size(total)}; take a smaller model, bfloat16 (model.dtype) or a larger GPU",
            )
        elif case.thorough:  # asking for it makes a context that stays until this process ends
            import torch

            free, _ = torch.cuda.mem_get_info(index)
            yield Fact(f"GPU {index}: {size(free)} of {size(total)} free for an {what}")
            if least > free:
                yield Caution(f"GPU {index}: an {what} needs {size(least)}, {size(free)} are free; end what runs there")


def disk(case: Case) -> Iterator[Line]:
    """Room for the checkpoints that will be kept, and for the one that is written before the oldest is removed."""
    if not case.config.seams.checkpoints:
        yield Fact("no checkpoint is written")
        return
    if case.family is None:
        yield Fact("not looked at, since there is no model")
        return
    from stretto.actor.checkpoint import steps

    config = case.config
    _, version = sizes(case)
    one = 3 * FLOAT32 * trained(case) + config.staleness.max * version
    every = config.checkpoint.every or config.run.updates
    count = min(config.checkpoint.keep + 1, math.ceil(config.run.updates / every))
    folder = Path(config.run.dir).absolute()
    held = min(count - 1, len(steps(folder / "checkpoints")))
    wanted = (count - held) * one
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if wanted > free:
        yield Problem(
            ("checkpoint.keep", "run.dir"),
            f"checkpoint.keep = {config.checkpoint.keep}: a checkpoint takes {size(one)}, and {count} of them are "
            f"there at once ({held} are already); {existing} has {size(free)} free; free space, lower checkpoint.keep, "
            "or choose another run.dir",
        )
        return
    yield Fact(f"a checkpoint takes {size(one)}, {count} of them at once; {size(free)} are free in {existing}")
    if case.thorough:
        temporary = tempfile.gettempdir()
        if shutil.disk_usage(temporary).free < TEMPORARY_BYTES:
            yield Caution(f"{temporary} has less than {size(TEMPORARY_BYTES)} free, and Ray keeps its session there")
        if config.checkpoint.every == 0:
            yield Caution("checkpoint.every = 0: a run that is ended before its last update loses everything")
