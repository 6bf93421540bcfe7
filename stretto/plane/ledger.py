"""The rules of the data plane, without processes, payloads or waiting.

A ledger is told what happens (a put begins, a payload has arrived, a claim is made, a consumer died) and answers at
once: a put or a claim that has to wait stays as a ticket, which its owner polls when something has changed. Time
comes from an injected clock, so that lease ends and timeouts are exact and can be tested without sleeping.

Room is given out in one order: the lowest partition first, then first come first served. So a put of a later
partition never overtakes an earlier one, and "the head of the queue does not fit, and nothing that could make room
can move" is a deadlock for certain.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.plane.partition import Claim, Entry, Partition
from stretto.plane.payload import check_array, write_back_spec
from stretto.plane.protocol import (
    CapacityDeadlock,
    Duplicate,
    FetchTimeout,
    Lease,
    LeaseExpired,
    Moved,
    Order,
    PartitionClosed,
    PartitionFailed,
    PlaneError,
    PlaneStats,
    ProducerDied,
    WrongShape,
    mib,
    spans,
)
from stretto.types import GroupRecord


@dataclass(order=True)
class PutTicket:
    """A put on its way in; sorted as room is given out. ``admitted`` tickets hold room."""

    partition: int
    sequence: int
    group: int = field(compare=False)
    nbytes: int = field(compare=False)
    since: float = field(compare=False)
    admitted: bool = field(compare=False, default=False)


@dataclass
class _Grant:
    """A lease as the ledger keeps it; ``ended`` says why it no longer holds its groups."""

    lease: Lease
    expires: float
    ended: str = ""


class Ledger:
    """``capacity_bytes`` bounds the bytes held, ``lease_s`` is how long a lease holds, ``clock`` is in seconds."""

    def __init__(self, *, capacity_bytes: int, lease_s: float, clock: Callable[[], float]):
        self._capacity, self._lease_s, self._clock = capacity_bytes, lease_s, clock
        self._partitions: dict[int, Partition] = {}
        self._last_opened = -1
        self._queue: list[PutTicket] = []
        self._claims: list[Claim] = []
        self._grants: dict[str, _Grant] = {}
        self._producers: set[str] = set()
        self._orphaned: str | None = None
        self._sequence = itertools.count()
        self._held = self._peak = 0
        self._backpressure_s = 0.0
        self._moved = {boundary: Moved() for boundary in ("put", "fetch", "write_back", "read_back")}

    def open(self, partition: int, groups: int, n_samples: int, *, minis: int = 1, chunks_per_mini: int = 1) -> None:
        if partition <= self._last_opened:
            raise Duplicate(
                f"partition {partition}: partitions open in increasing order, each once, and {self._last_opened} has "
                "been opened; a resumed run needs a new plane"
            )
        if self._orphaned is not None:
            raise ProducerDied(f"partition {partition}: nobody is left to fill it; {self._orphaned}")
        self._partitions[partition] = Partition(partition, groups, n_samples, minis, chunks_per_mini)
        self._last_opened = partition

    def begin_put(self, record: GroupRecord, nbytes: int, logical_bytes: int) -> PutTicket:
        """Queues a group of ``nbytes``. Its payload may be moved once the ticket is admitted, and not before."""
        partition = self._open(record.partition, f"group {record.group}")
        partition.check_record(record)
        place = partition.place(record.group)
        partition.raise_failure(place)
        if nbytes > self._capacity:
            raise CapacityDeadlock(
                f"{place}: a group of {mib(nbytes)} can never enter a plane of {mib(self._capacity)}; raise "
                "plane.capacity_mib"
            )
        ticket = PutTicket(record.partition, next(self._sequence), record.group, nbytes, self._clock())
        partition.entries[record.group] = Entry(record, nbytes, logical_bytes, ticket.sequence)
        bisect.insort(self._queue, ticket)
        self._admit()
        self._find_deadlock()
        return ticket

    def poll_put(self, ticket: PutTicket) -> bool:
        """Whether the ticket has been admitted. Raises when its partition failed or was dropped meanwhile."""
        place = f"group {ticket.group}"
        partition = self._open(ticket.partition, place)
        partition.raise_failure(partition.place(ticket.group))
        return ticket.admitted

    def commit_put(self, ticket: PutTicket, payload: Any) -> None:
        """Makes an admitted group readable; ``payload`` is whatever leases shall carry for it."""
        if not self.poll_put(ticket):
            raise PlaneError(f"partition {ticket.partition}, group {ticket.group}: committed before it was admitted")
        partition = self._partitions[ticket.partition]
        entry = partition.entries[ticket.group]
        entry.payload, entry.arrival = payload, next(self._sequence)
        partition.arrivals.append(ticket.group)
        self._move("put", entry.nbytes, entry.logical_bytes)

    def cancel_put(self, ticket: PutTicket) -> None:
        """Forgets a put that was not committed, as if it had never begun. Does nothing after commit or close."""
        partition = self._partitions.get(ticket.partition)
        entry = partition.entries.get(ticket.group) if partition else None
        if partition is None or entry is None or entry.sequence != ticket.sequence or entry.arrival is not None:
            return
        del partition.entries[ticket.group]
        if ticket.admitted:
            self._hold(-ticket.nbytes)
        else:
            self._leave_queue(lambda other: other is ticket)
        self._admit()

    def begin_claim(
        self,
        partition: int,
        consumer: str,
        groups: Sequence[int] | int,
        timeout_s: float,
        mini: int = 0,
        chunk: int = 0,
        order: Order = "index",
    ) -> Claim:
        now = self._clock()
        self._expire(now)
        wanted = groups if isinstance(groups, int) else tuple(groups)
        claim = Claim(partition, consumer, wanted, order, mini, chunk, since=now, deadline=now + timeout_s)
        part = self._open(partition, f"mini {mini}, chunk {chunk}")
        part.check_claim(claim)
        part.check_left(claim)
        self._claims.append(claim)
        self._find_deadlock()
        return claim

    def poll_claim(self, claim: Claim) -> Lease | None:
        """The lease once the claim is met; None while it waits. A claim that raised or was met is over."""
        try:
            lease = self._poll_claim(claim)
        except PlaneError:
            self.cancel_claim(claim)
            raise
        if lease is not None:
            self.cancel_claim(claim)
        return lease

    def cancel_claim(self, claim: Claim) -> None:
        self._claims = [other for other in self._claims if other is not claim]

    def _poll_claim(self, claim: Claim) -> Lease | None:
        now = self._clock()
        self._expire(now)
        partition = self._open(claim.partition, f"mini {claim.mini}, chunk {claim.chunk}")
        partition.raise_failure(claim.place)
        partition.check_left(claim)
        groups = partition.select(claim)
        if groups is not None:
            return self._grant(partition, claim, groups, now)
        if now >= claim.deadline:
            remedy = "raise plane.capacity_mib" if self._queue else "see whether the rollout still makes progress"
            raise FetchTimeout(
                f"{claim.place}: consumer {claim.consumer!r} waited {now - claim.since:.1f} s for "
                f"{partition.explain(claim)}; {self._fill()}; {remedy}, or raise plane.fetch_timeout_s"
            )
        return None

    def _grant(self, partition: Partition, claim: Claim, groups: tuple[int, ...], now: float) -> Lease:
        entries = [partition.entries[group] for group in groups]
        lease = Lease(
            id=f"{claim.consumer}-{partition.index}-{next(self._sequence)}",
            partition=partition.index,
            consumer=claim.consumer,
            groups=groups,
            records=tuple(entry.record for entry in entries),
            mini=claim.mini,
            chunk=claim.chunk,
            refs={group: entry.payload for group, entry in zip(groups, entries, strict=True)},
        )
        taken = partition.taken(claim.consumer)
        taken.leased.update(dict.fromkeys(groups, lease.id))
        taken.version += 1
        # The payload handles stay with the entries: a grant must not keep them alive.
        kept = Lease(
            id=lease.id,
            partition=lease.partition,
            consumer=lease.consumer,
            groups=groups,
            records=(),
            mini=lease.mini,
            chunk=lease.chunk,
        )
        self._grants[lease.id] = _Grant(kept, now + self._lease_s)
        return lease

    def ack(self, *leases: Lease) -> None:
        self._expire(self._clock())
        if len({lease.id for lease in leases}) != len(leases):
            raise PlaneError("a lease is acknowledged twice in one call; acknowledge every lease once")
        for lease in leases:
            place = f"mini {lease.mini}, chunk {lease.chunk}"
            self._open(lease.partition, place).raise_failure(lease.place)
            grant = self._grants.get(lease.id)
            ended = "is not known here" if grant is None else grant.ended
            if ended:
                raise LeaseExpired(
                    f"{lease.place}: the lease {lease.id} of consumer {lease.consumer!r} on groups "
                    f"{spans(lease.groups)} {ended}; its samples must not be trained under it: claim them again, and "
                    "raise plane.lease_s if steps take longer"
                )
        for lease in leases:
            self._end(self._grants[lease.id], "has been acknowledged before", acked=True)

    def release(self, lease: Lease) -> None:
        self._expire(self._clock())
        grant = self._grants.get(lease.id)
        if grant is not None and not grant.ended:
            self._end(grant, "was given back")

    def consumer_died(self, consumer: str) -> int:
        self._expire(self._clock())
        lost = [g for g in self._grants.values() if g.lease.consumer == consumer and not g.ended]
        for grant in lost:
            self._end(grant, "was taken back when its consumer died")
        return len(lost)

    def producer_joined(self, producer: str) -> None:
        self._producers.add(producer)
        self._orphaned = None

    def producer_died(self, producer: str, cause: str) -> None:
        """Fails every partition that is not complete: nobody knows which groups the producer still owed."""
        self._producers.discard(producer)
        text = f"the producer {producer!r} died: {cause}"
        if not self._producers:
            self._orphaned = text
        self._fail(None, ProducerDied, text)

    def fail(self, partition: int | None, cause: str) -> None:
        if partition is not None:
            self._open(partition, "a failure was reported")
        self._fail(partition, PartitionFailed, cause)

    def _fail(self, partition: int | None, kind: type[PartitionFailed], cause: str) -> None:
        failed = [
            p for p in self._partitions.values() if p.index == partition or (partition is None and not p.complete)
        ]
        for each in failed:
            each.failure = each.failure or (kind, cause)
        indexes = {each.index for each in failed}
        self._leave_queue(lambda ticket: ticket.partition in indexes)
        self._admit()

    def write_back(
        self,
        partition: int,
        field: str,
        values: Mapping[int, np.ndarray | np.generic],
        *,
        overwrite: bool = False,
    ) -> None:
        """Keeps copies, in this process's memory: a written-back field is one number a token or less."""
        part = self._open(partition, f"field {field!r}")
        spec = write_back_spec(field, f"partition {partition}")
        column = part.columns.get(field, {})
        for sample, value in values.items():
            record, position = part.sample_record(sample)
            place = f"{part.place(record.group)}, field {field!r}, sample {sample}"
            check_array(value, spec, place)
            tokens = record.response_tokens[position]
            if spec.shape and value.shape[0] != tokens:
                raise WrongShape(f"{place}: {value.shape[0]} entries, the sample has {tokens} response tokens")
            if sample in column and not overwrite:
                raise Duplicate(f"{place}: was written back before; pass overwrite=True to replace it")
        new = {sample: np.array(value) for sample, value in values.items()}
        for array in new.values():
            array.flags.writeable = False
        nbytes = sum(array.nbytes for array in new.values())
        self._hold(nbytes - sum(column[sample].nbytes for sample in new if sample in column))
        part.columns.setdefault(field, {}).update(new)
        self._move("write_back", nbytes, nbytes)

    def read_back(self, partition: int, field: str, samples: Iterable[int] | None = None) -> dict[int, np.ndarray]:
        part = self._open(partition, f"field {field!r}")
        write_back_spec(field, f"partition {partition}")
        found = part.values(field, sorted(part.columns.get(field, {}) if samples is None else samples))
        nbytes = sum(array.nbytes for array in found.values())
        self._move("read_back", nbytes, nbytes)
        return found

    def close(self, partition: int, *, discard: bool = False) -> None:
        self._expire(self._clock())
        part = self._open(partition, "closed")
        if not discard:
            part.raise_failure(f"partition {partition}")
            part.check_closable()
        del self._partitions[partition]
        self._grants = {key: grant for key, grant in self._grants.items() if grant.lease.partition != partition}
        self._leave_queue(lambda ticket: ticket.partition == partition)
        self._hold(-part.nbytes)
        self._admit()

    def count_fetch(self, nbytes: int, logical_bytes: int) -> None:
        """Fetches go past the ledger; their reader reports the bytes."""
        self._move("fetch", nbytes, logical_bytes)

    def stats(self) -> PlaneStats:
        now = self._clock()
        self._expire(now)
        return PlaneStats(
            capacity_bytes=self._capacity,
            held_bytes=self._held,
            peak_bytes=self._peak,
            waiting_puts=len(self._queue),
            waiting_bytes=sum(ticket.nbytes for ticket in self._queue),
            backpressure_s=self._backpressure_s + sum(now - ticket.since for ticket in self._queue),
            partitions=tuple(sorted(self._partitions)),
            groups=sum(len(part.arrivals) for part in self._partitions.values()),
            leases=sum(not grant.ended for grant in self._grants.values()),
            **self._moved,
        )

    def _open(self, partition: int, place: str) -> Partition:
        if partition not in self._partitions:
            still = f"open are {spans(self._partitions)}" if self._partitions else "none is open"
            was = f"has not been opened ({still}); open it first"
            if partition <= self._last_opened:
                was = f"has been closed ({still}); use it before it is closed"
            raise PartitionClosed(f"partition {partition}, {place}: the partition {was}")
        return self._partitions[partition]

    def _expire(self, now: float) -> None:
        for grant in self._grants.values():
            if not grant.ended and now >= grant.expires:
                self._end(grant, f"timed out after {self._lease_s:g} s")

    def _end(self, grant: _Grant, why: str, *, acked: bool = False) -> None:
        grant.ended = why
        taken = self._partitions[grant.lease.partition].taken(grant.lease.consumer)
        for group in grant.lease.groups:
            del taken.leased[group]
        if acked:
            taken.acked.update(grant.lease.groups)
        taken.version += 1

    def _admit(self) -> None:
        while self._queue and self._held + self._queue[0].nbytes <= self._capacity:
            ticket = self._queue.pop(0)
            ticket.admitted = True
            self._backpressure_s += self._clock() - ticket.since
            self._partitions[ticket.partition].entries[ticket.group].admitted = True
            self._hold(ticket.nbytes)

    def _leave_queue(self, leaves: Callable[[PutTicket], bool]) -> None:
        now = self._clock()
        self._backpressure_s += sum(now - ticket.since for ticket in self._queue if leaves(ticket))
        self._queue = [ticket for ticket in self._queue if not leaves(ticket)]

    def _find_deadlock(self) -> None:
        """Fails partitions that can never be completed.

        A claim lacks groups of partition q, and the put at the head of the queue, of partition r <= q, would not fit
        even if every partition before q were closed (but r, which cannot be complete without it). Later partitions
        cannot help: they are consumed after q. A head that belongs to a later partition proves nothing, since the
        next put of q goes before it.
        """
        for claim in self._claims:
            part = self._partitions.get(claim.partition)
            if not self._queue or part is None or part.failure or self._queue[0].partition > part.index:
                continue
            head = self._queue[0]
            earlier = [p for p in self._partitions.values() if p.index < part.index and p.index != head.partition]
            freeable = sum(p.nbytes for p in earlier)
            if self._held - freeable + head.nbytes <= self._capacity or not part.lacks(claim):
                continue
            text = (
                f"consumer {claim.consumer!r} waits for {part.explain(claim)}, and the put of "
                f"{self._partitions[head.partition].place(head.group)} ({mib(head.nbytes)}) can never enter: "
                f"{self._fill()}, and nothing can be freed; raise plane.capacity_mib, or lower "
                "rollout.prompts_per_partition or staleness.max"
            )
            for index in {part.index, head.partition}:
                self._fail(index, CapacityDeadlock, text)

    def _fill(self) -> str:
        blocked = sum(ticket.nbytes for ticket in self._queue)
        puts = f"{len(self._queue)} puts of {mib(blocked)} wait for room" if self._queue else "no put waits for room"
        return f"the plane holds {mib(self._held)} of {mib(self._capacity)}, {puts}"

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def _move(self, boundary: str, nbytes: int, logical_bytes: int) -> None:
        self._moved[boundary] = self._moved[boundary].plus(nbytes, logical_bytes)
