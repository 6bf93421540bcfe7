"""A rollout side without Ray: real scheduler, router, processor and rewards; a list stands where the plane would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tiny
import torch

from stretto.actor.weights import iter_buckets
from stretto.config import RewardConfig
from stretto.data.processor import InlineProcessor
from stretto.models.loading import load_model
from stretto.observe.trace import Tracer
from stretto.rollout.engine import Engine, Sampling
from stretto.rollout.hf import HfEngine
from stretto.rollout.refill import Refill
from stretto.rollout.reward import Rewarder
from stretto.rollout.router import Offer, Router
from stretto.rollout.scheduler import Scheduler
from stretto.types import GroupFields, GroupRecord, PartitionPlan, ProcessedPrompt, Prompt

SAMPLING = Sampling(n=2, temperature=1.0, max_tokens=6, seed=0)
LAYOUTS: list[tuple[tuple[int, int], ...]] = [((32, 64),), (), ((64, 32), (32, 32))]


def read(row: int) -> Prompt:
    return tiny.prompt(row, LAYOUTS[row % 3])


def plan(count: int, version: int = 0, partition: int = 4) -> PartitionPlan:
    return PartitionPlan(partition=partition, version=version, epochs=(0,) * count, rows=tuple(range(count)))


def hf(_replica: int = 0) -> HfEngine:
    return HfEngine(tiny.family(), lambda: load_model(tiny.model_config(), 0), "cpu")


@cache
def published(version: int) -> Offer:
    """Weights of another model for each version, as the actor publishes them."""
    named = dict(tiny.model(seed=version).named_parameters())
    return Offer(version, list(iter_buckets(named, version, torch.float32)))


class SlowFor(InlineProcessor):
    """Takes longer for some rows, so that work would finish out of order if order depended on speed."""

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        if prompt.row_id in ("row-0", "row-4"):
            await asyncio.sleep(0.2)
        return await super().process(prompt)


@dataclass
class Case:
    router: Router
    scheduler: Scheduler
    arrived: list[tuple[GroupRecord, GroupFields]] = field(default_factory=list)

    def bits(self) -> dict[tuple[int, int], list[bytes]]:
        """Ids and log-probs of every group that was put."""
        return {
            (record.partition, record.group): [
                array.tobytes() for array in (*fields["response_ids"], *fields["rollout_logprobs"])
            ]
            for record, fields in self.arrived
        }


@asynccontextmanager
async def rollout(
    make: Callable[[int], Engine],
    replicas: int = 1,
    *,
    m: int = 3,
    processor: type[InlineProcessor] = InlineProcessor,
    put: Any = None,
    reward: str = "exact_match",
    sampling: Sampling = SAMPLING,
    restarts: int = 0,
    timeout_s: float = 60,
    refill: Refill | None = None,
    rewarder: Any = None,
    recorder: Any = None,
) -> AsyncIterator[Case]:
    tracer = Tracer(None, "test")
    rewarder = rewarder or Rewarder(RewardConfig(function=reward))
    router = Router(make, replicas, max_restarts=restarts, timeout_s=timeout_s, tracer=tracer)
    runner = processor(tiny.family().process, tracer)
    arrived: list[tuple[GroupRecord, GroupFields]] = []

    async def keep(record: GroupRecord, fields: GroupFields) -> None:
        arrived.append((record, fields))

    await asyncio.gather(rewarder.start(), router.start())
    scheduler = Scheduler(
        router=router,
        processor=runner,
        rewarder=rewarder,
        put=put or keep,
        sampling=sampling,
        groups_per_decode_batch=m,
        tracer=tracer,
        refill=refill,
        recorder=recorder,
    )
    try:
        yield Case(router, scheduler, arrived)
    finally:
        rewarder.close()
        runner.close()
        await router.close()
