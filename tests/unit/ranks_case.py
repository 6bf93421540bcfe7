"""What each process of ``rank_pool`` runs: updates of the tiny model over its share of a partition."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import actor_case
import numpy as np
import tiny
import torch
from torch import nn

from stretto.actor.checkpoint import latest_valid
from stretto.actor.parallel import RankGroup, reduce_sum
from stretto.actor.rank import ActorRankCore
from stretto.config import ActorConfig, Config
from stretto.models.loading import load_model
from stretto.models.parts import prepare, seed_dropout
from stretto.types import ChunkSchedule, GroupFields, GroupRecord, Microbatch, Mini

Options = dict[str, Any]
kept: dict[str, ActorRankCore] = {}
device = "cpu"


def config(options: Options) -> Config:
    """``actor_case.config`` with weights as small as the recipes': float32 itself is off by 1.6e-6 in the gradients of
    ``tiny``'s larger ones, one rank or many, and by 7e-7 in these.
    """
    block = copy.deepcopy(tiny.BLOCK)
    for part in ("text", "vision"):
        block[part]["initializer_range"] = 0.05
    return actor_case.config(**({"model": {"config": block}} | options))


def model(cfg: Config, seed: int = 0) -> nn.Module:
    loaded = load_model(cfg.model, seed)
    prepare(loaded, tiny.family(), cfg)
    return loaded.to(device)


def arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: t.detach().float().cpu().numpy().copy() for name, t in tensors.items()}


def state(actor: ActorRankCore) -> dict[str, Any]:
    """What tests look at: everything that an update ends with."""
    trainer = actor.trainer
    return {
        "grads": arrays(trainer.master.named_grads()),
        "model": arrays(dict(actor.model.named_parameters())),
        "masters": arrays(trainer.master.named()),
        "optimizer": arrays(trainer.optimizer_tensors()),
    }


def partition(change: str, k: int = 0) -> tuple[list[GroupRecord], dict[int, GroupFields]]:
    """``actor_case.partition``, or with its text group alone (``text``), or with images in group 0 only, so that
    the last rank has none (``first``).
    """
    records, payloads = actor_case.partition(k)
    sources = {"": (0, 1, 2, 3), "text": (1, 1, 1, 1), "first": (0, 1, 1, 1)}[change]
    return (
        [dataclasses.replace(records[source], group=g) for g, source in enumerate(sources)],
        {g: payloads[source] for g, source in enumerate(sources)},
    )


def one_update(group: RankGroup, options: Options, change: str = "", dump: str = "") -> dict[str, Any]:
    """All phases of one partition: metrics, state, evidence, its chunks, and the microbatches that this rank had.
    ``dump``: the folder where gradients and parameters are left.
    """
    cfg = config(options | ({"run": {"dir": dump}} if dump else {}))
    cfg = cfg.with_seams(dump_partition=0) if dump else cfg
    records, payloads = partition(change)
    actor = actor_case.core(cfg, payloads, group=group, model=model(cfg))
    (metrics,) = actor_case.run_step(actor, records, ranks=group.world)
    (mini,) = actor_case.minis(cfg, records, group.world)
    return state(actor) | {
        "metrics": metrics,
        "evidence": actor.evidence(),
        "chunks": mini.chunks,
        "microbatches": mini.microbatches(group.rank),
    }


def from_scratch(group: RankGroup, options: Options, count: int) -> dict[str, Any]:
    """The state after ``count`` partitions, each with its own dropout where there is any."""
    cfg = config(options)
    actor = actor_case.core(cfg, {}, group=group, model=model(cfg))
    seed_dropout(cfg.run.seed, group.rank)
    for k in range(count):
        records, payloads = partition("", k)
        actor.fetch = lambda _refs, groups, payloads=payloads: {g: payloads[g] for g in groups}
        (metrics,) = actor_case.run_step(actor, records, ranks=group.world)
        actor.end_partition()
    return state(actor) | {"metrics": metrics}


# Fixed schedules and advantages --------------------------------------------------------------------------------------


def fixed(
    group: RankGroup,
    options: Options,
    lengths: Sequence[int],
    advantages: Sequence[float],
    ranks: list[list[list[int]]],
) -> dict[str, Any]:
    """One update on text samples of these response lengths and advantages (a group each, trained from the very weights
    that made them), with ``ranks[dp][i]`` the samples of a microbatch; negative ones make it inert.
    """
    cfg = config(options)
    family = tiny.family()
    rng = np.random.default_rng(0)
    prompt = family.process(tiny.prompt(0, ()))
    allowed = np.flatnonzero(~family.suppressed_V.numpy())
    ids = [rng.choice(allowed, n).astype(np.int32) for n in lengths]
    payloads: dict[int, GroupFields] = {
        g: {
            "prompt_ids": prompt.prompt_ids,
            "mm_token_type_ids": prompt.mm_token_type_ids,
            "pixel_values": prompt.pixel_values,
            "image_grid_thw": prompt.image_grid_thw,
            "response_ids": [ids[g]],
            "rollout_logprobs": [np.zeros(len(ids[g]), np.float32)],
        }
        for g in range(len(lengths))
    }
    records = [record(g, len(prompt.prompt_ids), n) for g, n in enumerate(lengths)]
    chunk = ChunkSchedule(
        chunk=0,
        groups=tuple(range(len(lengths))),
        layout=cfg.actor.layout_on("cpu"),
        ranks=tuple(tuple(Microbatch(samples=tuple(map(abs, m)), inert=m[0] < 0) for m in rank) for rank in ranks),
        fill=1.0,
    )
    actor = actor_case.core(cfg, payloads, group=group, model=model(cfg))
    estimate = actor.estimator
    actor.estimator = lambda *args: dataclasses.replace(estimate(*args), advantages_B=torch.tensor(advantages))
    forwards = count_forwards(actor.model)
    actor.phase1(chunk, records, None)
    actor.phase2(records)
    after_phase1 = forwards()
    normaliser = sum(lengths) if cfg.algorithm.aggregation == "token_mean" else len(lengths)
    metrics = actor.phase3(Mini(partition=0, index=0, chunks=(chunk,)), normaliser)
    return state(actor) | {"metrics": metrics, "forwards": (after_phase1, forwards() - after_phase1)}


def record(group: int, prompt_tokens: int, response_tokens: int) -> GroupRecord:
    return GroupRecord(
        partition=0,
        group=group,
        row_id=f"row-{group}",
        prompt_tokens=prompt_tokens,
        patches=0,
        images=0,
        response_tokens=(response_tokens,),
        rewards=(float(group % 2),),
        valid=(True,),
        truncated=(False,),
        version_start=(0,),
        version_end=(0,),
    )


def count_forwards(loaded: nn.Module) -> Callable[[], int]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    loaded.get_submodule("lm_head").register_forward_pre_hook(count)
    return lambda: calls[0]


# Several updates -----------------------------------------------------------------------------------------------------


def updates(
    group: RankGroup, name: str, options: Options, first: int, count: int, seed: int = 0, spoiled: int = -1
) -> list[dict[str, Any]]:
    """Partitions ``first`` … on the rank kept as ``name``, made with weights of ``seed`` where there is none yet. Of
    partition ``spoiled`` the last rank gets a NaN advantage.
    """
    if name not in kept:
        cfg = config(options)
        kept[name] = actor_case.core(cfg, {}, group=group, model=model(cfg, seed))
    actor = kept[name]
    estimate, result = actor.estimator, []
    for k in range(first, first + count):
        records, payloads = actor_case.partition(k)
        actor.fetch = lambda _refs, groups, payloads=payloads: {g: payloads[g] for g in groups}
        if k == spoiled and group.rank == group.world - 1:
            actor.estimator = lambda *args: spoil(estimate(*args))
        (metrics,) = actor_case.run_step(actor, records, ranks=group.world)
        actor.estimator = estimate
        result.append(state(actor) | {"metrics": metrics, "evidence": actor.evidence() if k != spoiled else None})
        actor.end_partition()
    return result


def spoil(result: Any) -> Any:
    result.advantages_B[-1] = float("nan")
    return result


def forget(_group: RankGroup) -> None:
    kept.clear()


def begin_save(_group: RankGroup, name: str, step: int) -> None:
    kept[name].saving.checkpointer.begin(step)


def write_shard(_group: RankGroup, name: str, step: int) -> dict[str, Any]:
    return kept[name].saving.write_shard(step)


def commit(_group: RankGroup, name: str, step: int, shards: list[Any]) -> str:
    return str(kept[name].saving.commit(step, shards, cursor=step, policy_version=step, published={}))


def resume(group: RankGroup, name: str, options: Options, seed: int) -> None:
    """A fresh rank with other weights, loaded from the newest checkpoint."""
    cfg = config(options)
    actor = actor_case.core(cfg, {}, group=group, model=model(cfg, seed))
    found = latest_valid(Path(cfg.run.dir) / "checkpoints", group.world)
    assert found.path is not None, found
    torch.manual_seed(seed)
    actor.saving.load(found.path, found.state)
    kept[name] = actor


# Sharding ------------------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Parameters of random shapes, some of them larger than all others together."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        for i in range(int(rng.integers(4, 9))):
            shape = tuple(int(n) for n in rng.integers(1, 8, rng.integers(0, 4)))
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))


def sharded_steps(group: RankGroup, seed: int, dtype: str, steps: int) -> dict[str, Any]:
    """``steps`` updates of ``Shapes``; their reduced gradients are a function of ``seed``: rank 0 hands them in."""
    from stretto.actor.trainer import Trainer

    loaded = Shapes(seed, getattr(torch, dtype)).to(device)
    trainer = Trainer(
        tiny.family(),
        loaded,
        ActorConfig(grad_clip=1.0, weight_decay=0.1),
        lambda _: 1e-2,
        temperature=1.0,
        group=group,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        trainer.begin()
        gradient = torch.randn(trainer.master.flat_grad.shape, generator=generator) * 3
        trainer.master.flat_grad.copy_(gradient if group.rank == 0 else torch.zeros_like(gradient))
        trainer._statistics.add({"loss_sum": torch.tensor(float(group.rank == 0), device=device)})
        trainer.finish(2)
    return {
        "model": arrays(dict(loaded.named_parameters())),
        "masters": arrays(trainer.master.named()),
        "optimizer": arrays(trainer.optimizer_tensors()),
    }


def lonely_reduction(group: RankGroup) -> str:
    """Only rank 0 takes part; its error."""
    if group.rank:
        return ""
    try:
        reduce_sum(torch.ones(3), group, "the sum of gradients")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
