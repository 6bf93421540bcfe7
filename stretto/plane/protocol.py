"""The seam between the stages that make samples and the stages that train on them.

A partition is opened with its expected size. Producers put whole prompt groups; consumers claim groups under a
lease, fetch their payloads, write columns back, and acknowledge. Closing a partition checks that every sample
arrived exactly once and was consumed, and frees its memory.

Back-pressure, and who waits for whom::

    producer --put--> [ plane: at most capacity_bytes ] --claim--> consumer
       ^ waits while the plane is full                      ^ waits while its groups are not there
       '------------- room comes from close(partition) -----'

Both waits at once, on one partition, would be a deadlock; it is raised as :class:`CapacityDeadlock` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from stretto.types import ConfigError, GroupFields, GroupRecord, StrettoError

Order = Literal["index", "arrival"]


class PlaneError(StrettoError):
    """Something that the data plane refuses. The message names partition, mini, chunk or group, and a remedy."""


class Duplicate(PlaneError):
    """A partition, group or written-back value that is there already."""


class Missing(PlaneError):
    """A group, sample or value that was asked for and is not there."""


class Underfilled(PlaneError):
    """A partition or group with fewer samples than declared."""


class Overfilled(PlaneError):
    """More groups or samples than the partition declared, or a claim for more than it holds."""


class FieldError(PlaneError):
    """A payload that does not match the declared fields."""


class UnknownField(FieldError):
    """A field that is not declared."""


class MissingField(FieldError):
    """A declared field that the payload lacks."""


class WrongDtype(FieldError):
    """A value that is no numpy array, or one of another dtype than declared. Nothing is ever cast."""


class WrongShape(FieldError):
    """An array, or a list of arrays, of another shape or length than declared or recorded."""


class LeaseExpired(PlaneError):
    """A lease that no longer holds its groups: it timed out, its consumer died, or it was given back."""


class AlreadyConsumed(PlaneError):
    """Groups that this consumer has acknowledged before."""


class Unconsumed(PlaneError):
    """A partition closed before a consumer acknowledged all of it."""


class PartitionClosed(PlaneError):
    """A partition that was closed, or never opened."""


class PartitionFailed(PlaneError):
    """A partition whose producer reported an error; the message carries the first cause."""


class ProducerDied(PartitionFailed):
    """A partition whose producer died before it was complete."""


class CapacityDeadlock(PartitionFailed):
    """Groups that a consumer waits for can never enter the plane, because it is full."""


class FetchTimeout(PlaneError):
    """A claim or fetch whose groups did not come in time."""


class PlaneDied(PlaneError):
    """The plane itself died or does not answer; the message carries the cause."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to consume some groups of a partition, once, before a deadline that the plane keeps.

    ``groups`` and ``records`` are parallel: ascending by group index, or in order of arrival where the claim asked
    for that. ``refs`` maps a group to a handle of its payload that only the plane understands. A lease may be sent
    to other processes, which then fetch with it.
    """

    id: str
    partition: int
    consumer: str
    groups: tuple[int, ...]
    records: tuple[GroupRecord, ...]
    mini: int = 0
    chunk: int = 0
    refs: Mapping[int, Any] = field(repr=False, compare=False, default_factory=dict)

    def part(self, groups: Sequence[int], chunk: int, mini: int = 0) -> Lease:
        """The same lease for some of its groups: what a reader of one chunk is sent. Acknowledge the whole."""
        records = {record.group: record for record in self.records}
        return replace(
            self,
            groups=tuple(groups),
            records=tuple(records[group] for group in groups),
            refs={group: self.refs[group] for group in groups},
            mini=mini,
            chunk=chunk,
        )

    @property
    def place(self) -> str:
        """Where the lease's groups are, for messages."""
        return f"partition {self.partition}, mini {self.mini}, chunk {self.chunk}"


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Traffic over one boundary of the plane.

    ``logical_bytes`` is what would have moved if every sample carried its own copy of its group's fields.
    """

    calls: int = 0
    bytes: int = 0
    logical_bytes: int = 0

    def plus(self, nbytes: int, logical_bytes: int) -> Moved:
        return Moved(calls=self.calls + 1, bytes=self.bytes + nbytes, logical_bytes=self.logical_bytes + logical_bytes)


@dataclass(frozen=True, kw_only=True)
class PlaneStats:
    """What the plane holds now, and what has moved since it started. Bytes are payload bytes.

    ``held_bytes`` includes groups that were let in and are still on their way, and written-back columns.
    ``backpressure_s`` sums the seconds that puts have waited for room, over all puts.
    """

    capacity_bytes: int
    held_bytes: int
    peak_bytes: int
    waiting_puts: int
    waiting_bytes: int
    backpressure_s: float
    partitions: tuple[int, ...]
    groups: int
    leases: int
    put: Moved
    fetch: Moved
    write_back: Moved
    read_back: Moved


class Producer(Protocol):
    """The side that makes samples; its methods are awaited in the rollout process's event loop."""

    async def put(self, record: GroupRecord, fields: GroupFields) -> None:
        """Writes one whole prompt group; it becomes readable at once, with all fields, when this returns.

        Waits while the plane is full. The arrays must not change before it returns.
        Raises FieldError, Duplicate, Underfilled or Overfilled for a group that does not match its partition;
        PartitionClosed, PartitionFailed, CapacityDeadlock or PlaneDied where waiting is in vain.
        """
        ...

    async def fail(self, partition: int | None, cause: BaseException | str) -> None:
        """Gives up a partition (None: every incomplete one). All who wait for it get ``cause``, the first one."""
        ...


class DataPlane(Protocol):
    """The side of the controller and the consumers. Calls block the calling thread."""

    def open(self, partition: int, groups: int, n_samples: int, *, minis: int = 1, chunks_per_mini: int = 1) -> None:
        """Declares a partition of ``groups`` prompt groups of ``n_samples`` samples; before anything is put.

        ``minis`` and ``chunks_per_mini`` only let messages name the mini and the chunk of a group.
        Raises Duplicate unless partitions open in increasing order, each once; ProducerDied when nobody is left to
        fill it.
        """
        ...

    def claim(
        self,
        partition: int,
        consumer: str,
        groups: Sequence[int] | int,
        timeout_s: float,
        mini: int = 0,
        chunk: int = 0,
        order: Order = "index",
    ) -> Lease:
        """Waits until the wanted groups are there and free for ``consumer``, and leases them.

        ``groups`` are the indexes wanted, or a number: that many groups that the consumer has not taken yet, the
        lowest (``order="index"``) or those that arrived first (``order="arrival"``). Consumers are told apart by
        name and do not disturb one another. A lease that is not acknowledged in time goes back.
        Raises FetchTimeout; AlreadyConsumed; Overfilled for more groups than are left; PartitionClosed; at once, and
        also while waiting, PartitionFailed, ProducerDied, CapacityDeadlock, PlaneDied with the first cause.
        """
        ...

    def fetch(self, lease: Lease, groups: Iterable[int] | None = None) -> dict[int, GroupFields]:
        """The payloads of ``groups`` (default: all) of a lease, as read-only arrays; zero-copy on one node.

        Raises Missing for a group outside of the lease, PlaneDied where the payload is lost.
        """
        ...

    def write_back(
        self,
        partition: int,
        field: str,
        values: Mapping[int, np.ndarray | np.generic],
        *,
        overwrite: bool = False,
    ) -> None:
        """Adds ``values`` (by global_index) of one of types.WRITE_BACK_FIELDS to samples that are there; all or none.

        Never waits: the bytes count against the capacity for later puts. Raises UnknownField, WrongDtype, WrongShape;
        Missing for samples that have not arrived; Duplicate for values that are there, unless ``overwrite``.
        """
        ...

    def read_back(self, partition: int, field: str, samples: Iterable[int] | None = None) -> dict[int, np.ndarray]:
        """Written-back values by global_index (default: all there are). Raises UnknownField, Missing."""
        ...

    def ack(self, *leases: Lease) -> None:
        """Consumes leases, all or none of them; call it before the optimizer step that uses them.

        Raises LeaseExpired for a lease that timed out, was given back or consumed; PartitionFailed.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Gives a lease back unconsumed. Does nothing to a lease that no longer holds its groups."""
        ...

    def consumer_died(self, consumer: str) -> int:
        """Gives back all leases of a consumer that is known to be dead; the number of them."""
        ...

    def close(self, partition: int, *, discard: bool = False) -> None:
        """Ends a partition and frees its memory.

        Raises Underfilled unless every sample arrived, Unconsumed unless it was claimed and every consumer that has
        claims in it acknowledged all groups. ``discard`` drops the partition without these checks.
        """
        ...

    def fail(self, partition: int | None, cause: BaseException | str) -> None:
        """Like Producer.fail, from the controller's side."""
        ...

    def stats(self) -> PlaneStats:
        """Bytes held and moved."""
        ...


def check_capacity(capacity_bytes: int, partition_bytes: int, staleness: int) -> None:
    """Refuses, at start-up, a plane that cannot hold the ``staleness`` + 1 partitions that are in flight at once."""
    needed = (staleness + 1) * partition_bytes
    if capacity_bytes < needed:
        raise ConfigError(
            [
                f"plane.capacity_mib: {mib(capacity_bytes)} is less than the {mib(needed)} that staleness.max + 1 = "
                f"{staleness + 1} partitions of about {mib(partition_bytes)} need; raise plane.capacity_mib to "
                f"{-(-needed // 2**20)} or lower staleness.max or rollout.prompts_per_partition"
            ]
        )


def mib(nbytes: int) -> str:
    """Bytes for messages; exact below 1 MiB."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes:,} bytes"


def spans(indexes: Iterable[int]) -> str:
    """Indexes for messages, runs joined: ``0-3, 7, 9-10``; at most ten runs."""
    runs: list[list[int]] = []
    for index in sorted(indexes):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:10]]
    more = sum(b - a + 1 for a, b in runs[10:])
    return ", ".join(words) + (f" and {more} more" if more else "")
