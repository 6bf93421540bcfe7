"""A small partition of real prompts and random responses for a tiny Qwen3-VL, shared by the actor's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch import nn

from stretto.actor import evidence
from stretto.actor.parallel import RankGroup
from stretto.actor.rank import ActorRankCore
from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.schedule import loss_normaliser, schedule_chunk
from stretto.types import GroupFields, GroupRecord, Mini

torch.set_num_threads(1)
RESPONSES = ((3, 5, 4), (6, 0, 2), (1, 4, 7), (5, 2, 3))
REWARDS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.5), (1.0, 0.0, 0.25), (0.5, 0.5, 0.5))
VALID = ((True, True, True), (True, True, True), (True, False, True), (True, True, True))
IMAGES: tuple[tuple[tuple[int, int], ...], ...] = (((32, 64),), (), ((32, 32), (64, 32)), ((32, 64),))
GROUPS = len(RESPONSES)
N = 3


def config(
    *, dtype: str = "float32", staleness: int = 1, run_dir: str = "runs/none", **blocks: dict[str, Any]
) -> Config:
    """``blocks``: options of ``actor``, ``algorithm`` and so on over small defaults."""
    plain: dict[str, Any] = {
        "run": {"updates": 10, "dir": run_dir},
        "model": {"config": tiny.BLOCK, "dtype": dtype},
        "rollout": {"prompts_per_partition": GROUPS, "n_samples_per_prompt": N},
        "actor": {"lr": 1e-3, "eps": 1e-3, "warmup_updates": 2, "max_tokens_per_microbatch": 64},
        "staleness": {"max": staleness},
    }
    for name, options in blocks.items():
        plain[name] = plain.get(name, {}) | options
    return Config.model_validate(plain)


def partition(k: int = 0) -> tuple[list[GroupRecord], dict[int, GroupFields]]:
    """Partition k: group 0 one image, 1 text with an empty response, 2 two images and a failed sample, 3 no signal."""
    family = tiny.family()
    rng = np.random.default_rng(k)
    allowed = np.flatnonzero(~family.suppressed_V.numpy())
    records, payloads = [], {}
    for g in range(GROUPS):
        prompt = family.process(tiny.prompt(10 * k + g, IMAGES[g]))
        responses = [rng.choice(allowed, r).astype(np.int32) for r in RESPONSES[g]]
        records.append(
            GroupRecord(
                partition=k,
                group=g,
                row_id=f"row-{g}",
                prompt_tokens=len(prompt.prompt_ids),
                patches=len(prompt.pixel_values),
                images=len(prompt.image_grid_thw),
                response_tokens=RESPONSES[g],
                rewards=REWARDS[g],
                valid=VALID[g],
                truncated=(False,) * N,
                version_start=(0,) * N,
                version_end=(0,) * N,
            )
        )
        payloads[g] = {
            "prompt_ids": prompt.prompt_ids,
            "mm_token_type_ids": prompt.mm_token_type_ids,
            "pixel_values": prompt.pixel_values,
            "image_grid_thw": prompt.image_grid_thw,
            "response_ids": responses,
            "rollout_logprobs": [rng.uniform(-6.5, -5.0, len(ids)).astype(np.float32) for ids in responses],
        }
    return records, payloads


def core(
    cfg: Config,
    payloads: dict[int, GroupFields],
    seed: int = 0,
    group: RankGroup | None = None,
    model: nn.Module | None = None,
    **kwargs: Any,
) -> ActorRankCore:
    def fetch(_refs: Any, groups: Sequence[int]) -> dict[int, GroupFields]:
        return {g: payloads[g] for g in groups}

    model = model or tiny.model(seed, cfg.model.dtype)
    return ActorRankCore(cfg, tiny.family(), model, fetch, Tracer(None, "actor0"), group, **kwargs)


def minis(cfg: Config, records: Sequence[GroupRecord], ranks: int = 1, groups_per_mini: int = GROUPS) -> list[Mini]:
    """``records`` as minis of ``chunks_per_mini`` chunks each."""
    a = cfg.actor
    size = groups_per_mini // a.chunks_per_mini
    result = []
    for m in range(len(records) // groups_per_mini):
        start = m * groups_per_mini
        parts = [records[start + c * size : start + (c + 1) * size] for c in range(a.chunks_per_mini)]
        chunks = tuple(
            schedule_chunk(
                c, part, ranks, a.max_tokens_per_microbatch, a.max_patches_per_microbatch, a.layout_on("cpu")
            )
            for c, part in enumerate(parts)
        )
        result.append(Mini(partition=records[0].partition, index=m, chunks=chunks))
    return result


def run_step(
    actor: ActorRankCore, records: Sequence[GroupRecord], ranks: int = 1, groups_per_mini: int = GROUPS
) -> list[dict[str, float]]:
    """All phases of one partition; ``end_partition`` is left to the caller. Metrics of each mini."""
    planned = minis(actor.config, records, ranks, groups_per_mini)
    by_group = {r.group: r for r in records}
    for mini in planned:
        for chunk in mini.chunks:
            actor.phase1(chunk, [by_group[g] for g in chunk.groups], None)
    batch_metrics = actor.phase2(records)
    return [
        batch_metrics
        | actor.phase3(
            mini,
            loss_normaliser(
                [by_group[g] for chunk in mini.chunks for g in chunk.groups],
                actor.config.algorithm,
                actor.config.rollout.max_response_tokens,
            ),
        )
        for mini in planned
    ]


def fingerprints(actor: ActorRankCore) -> dict[str, str]:
    """Those of a run with one rank."""
    return evidence.merged([actor.evidence()]).fingerprints


def save(actor: ActorRankCore, step: int, **options: Any) -> Path:
    """All parts of a save on one rank, after ``step`` updates."""
    actor.saving.checkpointer.begin(step)
    shard = actor.saving.write_shard(step)
    defaults: dict[str, Any] = {"cursor": step, "policy_version": step, "published": {}}
    return actor.saving.commit(step, [shard], **(defaults | options))


def parameters(actor: ActorRankCore) -> dict[str, torch.Tensor]:
    """A copy of the float32 masters that this rank owns: of all, where it is alone."""
    return {name: t.clone() for name, t in actor.trainer.master.named().items()}


def assert_equal_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, the first is {different[0]}"


def reference_samples(records: Sequence[GroupRecord], payloads: dict[int, GroupFields]) -> list[dict]:
    """The partition as ``reference_grpo`` takes it."""
    samples = []
    for record in records:
        fields = payloads[record.group]
        images = len(fields["image_grid_thw"]) > 0
        for i in range(record.n):
            samples.append(
                {
                    "group": record.group,
                    "prompt": fields["prompt_ids"].tolist(),
                    "types": fields["mm_token_type_ids"].tolist(),
                    "pixels": torch.from_numpy(fields["pixel_values"]) if images else None,
                    "grid": torch.from_numpy(fields["image_grid_thw"]).long() if images else None,
                    "response": fields["response_ids"][i].tolist(),
                    "rollout": fields["rollout_logprobs"][i].tolist(),
                    "reward": record.rewards[i],
                    "valid": record.valid[i],
                }
            )
    return samples
