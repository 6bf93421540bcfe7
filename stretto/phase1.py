"""Phase 1 as the controller sees it: claim groups, schedule chunks, have the actor fetch and forward them.

This is the seam of switch S: ``WholePartition`` waits for every group of the partition and then forwards its chunks in
order, ``ByChunk`` takes each chunk as soon as its groups are there. The schedule of a chunk is a pure function of that
chunk's records, so that both get the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.plane.protocol import DataPlane, Lease
from stretto.schedule.packing import schedule_chunk
from stretto.staleness import check_versions
from stretto.types import ChunkSchedule, ForwardReport, GroupRecord, Mini

RENEWED_AFTER = 0.1
"""Share of a lease that may pass while later chunks are waited for before it is taken anew."""
Forward = Callable[[ChunkSchedule, Lease], Callable[[], list[ForwardReport]]]
"""Has the actor fetch and forward a chunk, whose groups the lease holds; returns a call that waits until it has, and
gives what each rank reports."""


@dataclass(frozen=True, kw_only=True)
class Phase1Batch:
    """A partition after phase 1: the recorded schedules of its minis, its records in group order, and the leases to
    acknowledge before it trains.

    exposed_wait_s  seconds in which the actor had nothing to forward, since groups were not there
    forwards        of each chunk, when its forwards began on the first rank and ended on the last (wall clock, seconds)
    fetched_bytes   of payload, over all ranks
    """

    minis: tuple[Mini, ...]
    records: tuple[GroupRecord, ...]
    leases: tuple[Lease, ...]
    exposed_wait_s: float
    forwards: tuple[tuple[float, float], ...]
    fetched_bytes: int

    def overlap(self, last_put_s: float) -> float:
        """The share of forward time that lies before ``last_put_s``, when the last group was put (wall clock)."""
        before = sum(max(0.0, min(ended, last_put_s) - begun) for begun, ended in self.forwards)
        whole = sum(ended - begun for begun, ended in self.forwards)
        return before / whole if whole > 0 else 0.0

    def of(self, mini: Mini) -> tuple[GroupRecord, ...]:
        """The records of one mini."""
        groups = {group for chunk in mini.chunks for group in chunk.groups}
        return tuple(record for record in self.records if record.group in groups)


class Phase1(Protocol):
    def __call__(self, partition: int) -> Phase1Batch: ...


class _Chunks:
    """What both ways have in common: claims, and chunks that are scheduled and handed to the actor."""

    def __init__(self, config: Config, plane: DataPlane, forward: Forward, tracer: Tracer, device: str):
        self.config = config
        self.device = device
        self.plane = plane
        self.forward = forward
        self.tracer = tracer

    def _claim(self, partition: int, groups: range, chunk: int) -> _Claim:
        chunks = self.config.actor.chunks_per_mini * self.config.actor.minis_per_partition
        begun_s = time.time()
        with self.tracer.span("loop.claim", partition=partition, groups=len(groups), chunk=chunk, chunks=chunks):
            lease = self.plane.claim(
                partition,
                consumer="actor",
                groups=groups,
                timeout_s=self.config.plane.fetch_timeout_s,
                mini=0,
                chunk=chunk,
            )
        if not self.config.seams.replay:  # stamps are those of another run, under its own bound
            check_versions(lease.records, self.config.staleness)
        return _Claim(lease, begun_s, time.time())

    def _start(self, index: int, part: Lease) -> tuple[ChunkSchedule, Callable[[], list[ForwardReport]]]:
        actor = self.config.actor
        chunk = schedule_chunk(
            index,
            part.records,
            ranks=actor.data_parallel,
            max_tokens=actor.max_tokens_per_microbatch,
            max_patches=actor.max_patches_per_microbatch,
            layout=actor.layout_on(self.device),
        )
        return chunk, self.forward(chunk, part)


@dataclass(frozen=True)
class _Claim:
    lease: Lease
    begun_s: float
    had_s: float


class WholePartition(_Chunks):
    """One claim for the whole partition, then a forward for each chunk of each mini; the next is scheduled while one is
    forwarded.
    """

    def __call__(self, partition: int) -> Phase1Batch:
        claim = self._claim(partition, range(self.config.rollout.prompts_per_partition), 0)
        minis, pending = [], []
        for mini, ranges in enumerate(chunk_ranges(self.config)):
            chunks = []
            for index, groups in enumerate(ranges):
                chunk, finish = self._start(index, claim.lease.part(groups, chunk=index, mini=mini))
                chunks.append(chunk)
                pending.append(finish)
            minis.append(Mini(partition=partition, index=mini, chunks=tuple(chunks)))
        return _batch(minis, [claim], [finish() for finish in pending], claim.had_s - claim.begun_s)


class ByChunk(_Chunks):
    """A claim for each chunk of the one mini: it is forwarded while the groups of later chunks are still being made.

    The weights that forwards want are those that the actor holds outside ``WeightTags.active``: nothing has to be
    restored between chunks.
    """

    def __call__(self, partition: int) -> Phase1Batch:
        (ranges,) = chunk_ranges(self.config)
        claims, chunks, pending = [], [], []
        for index, groups in enumerate(ranges):
            claims.append(self._claim(partition, groups, index))
            chunk, finish = self._start(index, claims[-1].lease)
            chunks.append(chunk)
            pending.append(finish)
        waited_s = RENEWED_AFTER * self.config.plane.lease_s
        claims = [self._renewed(c) if claims[-1].had_s - c.had_s > waited_s else c for c in claims]
        mini = Mini(partition=partition, index=0, chunks=tuple(chunks))
        reports = [finish() for finish in pending]
        return _batch([mini], claims, reports, exposed_wait(claims, reports))

    def _renewed(self, claim: _Claim) -> _Claim:
        """Under a lease that begins now. A chunk waits for later ones as long as the rollout takes; a claim of the
        whole partition does so before its lease begins. That wait must not cost either of them the lease.
        """
        lease = claim.lease
        self.plane.release(lease)
        again = self.plane.claim(
            lease.partition,
            consumer=lease.consumer,
            groups=lease.groups,
            timeout_s=self.config.plane.fetch_timeout_s,
            mini=lease.mini,
            chunk=lease.chunk,
        )
        return replace(claim, lease=again)


def exposed_wait(claims: Sequence[_Claim], reports: Sequence[Sequence[ForwardReport]]) -> float:
    """Seconds in which claims were waited for and the actor had nothing to forward."""
    idle_since, wait_s = claims[0].begun_s, 0.0
    for claim, ranks in zip(claims, reports, strict=True):
        wait_s += max(0.0, claim.had_s - max(idle_since, claim.begun_s))
        idle_since = max(rank.ended_s for rank in ranks)
    return wait_s


def _batch(
    minis: Sequence[Mini], claims: Sequence[_Claim], reports: Sequence[Sequence[ForwardReport]], wait_s: float
) -> Phase1Batch:
    return Phase1Batch(
        minis=tuple(minis),
        records=tuple(record for claim in claims for record in claim.lease.records),
        leases=tuple(claim.lease for claim in claims),
        exposed_wait_s=wait_s,
        forwards=tuple((min(r.begun_s for r in ranks), max(r.ended_s for r in ranks)) for ranks in reports),
        fetched_bytes=sum(rank.fetched_bytes for ranks in reports for rank in ranks),
    )


def chunk_ranges(config: Config) -> list[list[range]]:
    """The groups of each chunk of each mini, in order and equally many: by mini, then by chunk."""
    minis, chunks = config.actor.minis_per_partition, config.actor.chunks_per_mini
    g = config.rollout.prompts_per_partition // (minis * chunks)
    return [[range((m * chunks + c) * g, (m * chunks + c + 1) * g) for c in range(chunks)] for m in range(minis)]
