"""Phase 1 as the controller sees it: claim groups, schedule chunks, have the actor fetch and forward them.

This is the seam of switch S: ``WholeMini`` waits for every group of the mini and then forwards its chunks in order. The
schedule of a chunk is a pure function of that chunk's records, so that whoever forwards chunks as they arrive gets
the same one.
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
    """A mini after phase 1: its recorded schedule, its records in group order, and the leases to acknowledge before it
    trains. ``exposed_wait_s`` are the seconds in which the actor had nothing to forward.
    """

    mini: Mini
    records: tuple[GroupRecord, ...]
    leases: tuple[Lease, ...]
    exposed_wait_s: float


class Phase1(Protocol):
    def __call__(self, partition: int) -> Phase1Batch: ...


class WholeMini:
    """One claim for the whole mini, then a forward for each chunk; the next is scheduled while one is forwarded."""

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
        chunks, pending = [], []
        for index, chunk_groups in enumerate(chunk_ranges(self.config)):
            part = lease.part(chunk_groups, chunk=index)
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
        for finish in pending:
            finish()
        mini = Mini(partition=partition, index=0, chunks=tuple(chunks))
        return Phase1Batch(mini=mini, records=lease.records, leases=(lease,), exposed_wait_s=waited)


def chunk_ranges(config: Config) -> list[range]:
    """Chunk c of a mini is groups [c * g, (c + 1) * g)."""
    groups, chunks = config.rollout.prompts_per_partition, config.actor.chunks_per_mini
    g = groups // chunks
    return [range(c * g, (c + 1) * g) for c in range(chunks)]
