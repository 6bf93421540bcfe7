"""Phase 1 as the controller sees it: claim groups, schedule chunks, have the actor fetch and forward them.

This is the seam of switch S: ``WholePartition`` waits for every group of the partition and then forwards its chunks in
order. The schedule of a chunk is a pure function of that chunk's records, so that whoever forwards chunks as they
arrive gets the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.plane.protocol import DataPlane, Lease
from stretto.schedule.packing import schedule_chunk
from stretto.staleness import check_versions
from stretto.types import ChunkSchedule, GroupRecord, Mini

Forward = Callable[[ChunkSchedule, Lease], Callable[[], None]]
"""Has the actor fetch and forward a chunk, whose groups the lease holds; returns a call that waits until it has."""


@dataclass(frozen=True, kw_only=True)
class Phase1Batch:
    """A partition after phase 1: the recorded schedules of its minis, its records in group order, and the leases to
    acknowledge before it trains. ``exposed_wait_s`` are the seconds in which the actor had nothing to forward.
    """

    minis: tuple[Mini, ...]
    records: tuple[GroupRecord, ...]
    leases: tuple[Lease, ...]
    exposed_wait_s: float

    def of(self, mini: Mini) -> tuple[GroupRecord, ...]:
        """The records of one mini."""
        groups = {group for chunk in mini.chunks for group in chunk.groups}
        return tuple(record for record in self.records if record.group in groups)


class Phase1(Protocol):
    def __call__(self, partition: int) -> Phase1Batch: ...


class WholePartition:
    """One claim for the whole partition, then a forward for each chunk of each mini; the next is scheduled while one is
    forwarded.
    """

    def __init__(self, config: Config, plane: DataPlane, forward: Forward, tracer: Tracer, device: str):
        self.config = config
        self.device = device
        self.plane = plane
        self.forward = forward
        self.tracer = tracer

    def __call__(self, partition: int) -> Phase1Batch:
        groups = range(self.config.rollout.prompts_per_partition)
        begun = time.monotonic()
        with self.tracer.span("loop.claim", partition=partition, groups=len(groups)):
            lease = self.plane.claim(
                partition, consumer="actor", groups=groups, timeout_s=self.config.plane.fetch_timeout_s, mini=0
            )
        waited = time.monotonic() - begun
        check_versions(lease.records, self.config.staleness)
        minis, pending = [], []
        for mini, ranges in enumerate(chunk_ranges(self.config)):
            chunks = []
            for index, chunk_groups in enumerate(ranges):
                part = lease.part(chunk_groups, chunk=index, mini=mini)
                chunk = schedule_chunk(
                    index,
                    part.records,
                    ranks=self.config.actor.data_parallel,
                    max_tokens=self.config.actor.max_tokens_per_microbatch,
                    max_patches=self.config.actor.max_patches_per_microbatch,
                    layout=self.config.actor.layout_on(self.device),
                )
                pending.append(self.forward(chunk, part))
                chunks.append(chunk)
            minis.append(Mini(partition=partition, index=mini, chunks=tuple(chunks)))
        for finish in pending:
            finish()
        return Phase1Batch(minis=tuple(minis), records=lease.records, leases=(lease,), exposed_wait_s=waited)


def chunk_ranges(config: Config) -> list[list[range]]:
    """The groups of each chunk of each mini, in order and equally many: by mini, then by chunk."""
    minis, chunks = config.actor.minis_per_partition, config.actor.chunks_per_mini
    g = config.rollout.prompts_per_partition // (minis * chunks)
    return [[range((m * chunks + c) * g, (m * chunks + c + 1) * g) for c in range(chunks)] for m in range(minis)]
