"""The default data plane: the ledger in a Ray actor, payloads as numpy arrays in Ray's object store.

Path of a group::

    rollout process                    ledger actor                          actor rank
    put: check, pack, stash  --put-->  admit (waits while full)
         take_payload        <--pull-- the returned object belongs to the
                                       ledger and outlives the producer
         (a small payload is sent with the put, and the ledger keeps its copy)
                                       commit, wake the claims  --lease-->   fetch: ray.get, views, no copy

An object that the producer itself had put would be lost with its process (OwnerDiedError). Only the ledger's death
loses payloads, and it holds no compute that could bring it down.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from stretto.observe.trace import Tracer
from stretto.plane.payload import (
    check_array,
    check_group,
    logical_bytes,
    pack_column,
    pack_group,
    payload_bytes,
    unpack_column,
    unpack_group,
    write_back_spec,
)
from stretto.plane.protocol import Lease, Missing, Order, PlaneDied, PlaneError, PlaneStats, spans
from stretto.plane.ray_ledger import INLINED_BYTES, POLL_S, LedgerActor, PayloadProducer, cause_of
from stretto.types import GroupFields, GroupRecord, StrettoError

ANSWER_S = 60.0
PUTS_IN_FLIGHT = 256
CALLS_IN_FLIGHT = 4096


def unwrapped(error: RayTaskError) -> BaseException:
    """What the remote code raised, where that is one of ours; Ray's own error with the remote traceback otherwise."""
    return error.cause if isinstance(error.cause, StrettoError) else error


class RayPlane:
    """The controller's and the consumers' side; see protocol.DataPlane for each method.

    May be sent to other processes. Blocking calls notice the ledger's death within a second, and leave Ctrl-C alone.
    """

    def __init__(self, ledger: Any):
        self.ledger = ledger
        self._counts: list[Any] = []

    def __reduce__(self) -> tuple[type[RayPlane], tuple[Any]]:
        return RayPlane, (self.ledger,)

    @classmethod
    def start(cls, *, capacity_bytes: int, lease_s: float) -> RayPlane:
        """Starts the ledger's actor, which takes no CPU slot. Raises PlaneDied where it does not come up."""
        actor = ray.remote(num_cpus=0, max_concurrency=CALLS_IN_FLIGHT, max_restarts=0)(LedgerActor)
        plane = cls(actor.remote(capacity_bytes, lease_s))
        plane._answer(plane.ledger.ping.remote())
        return plane

    def stop(self) -> None:
        """Kills the ledger and with it everything the plane holds."""
        ray.kill(self.ledger)

    def attach(self, producer: Any, name: str) -> None:
        """Makes the handle of a PayloadProducer actor known. Its death fails the partitions that are not complete.

        Call it as soon as the actor is created: a producer that dies while it starts is noticed too.
        """
        self._answer(self.ledger.attach.remote(name, producer))

    def open(self, partition: int, groups: int, n_samples: int, *, minis: int = 1, chunks_per_mini: int = 1) -> None:
        self._change("open", partition, groups, n_samples, minis=minis, chunks_per_mini=chunks_per_mini)

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
        ref = self.ledger.claim.remote(partition, consumer, groups, timeout_s, mini, chunk, order)
        try:
            return self._answer(ref, timeout_s + ANSWER_S)
        except KeyboardInterrupt:
            ray.cancel(ref)
            raise

    def fetch(self, lease: Lease, groups: Iterable[int] | None = None) -> dict[int, GroupFields]:
        wanted = list(lease.groups if groups is None else groups)
        if outside := [group for group in wanted if group not in lease.refs]:
            raise Missing(
                f"{lease.place}: groups {spans(outside)} are not in the lease {lease.id}, which holds "
                f"{spans(lease.groups)}; claim them first"
            )
        try:
            payloads = ray.get([lease.refs[group] for group in wanted], timeout=ANSWER_S)
        except (ObjectLostError, GetTimeoutError) as error:
            raise PlaneDied(
                f"{lease.place}: the payloads of groups {spans(wanted)} are lost; the ledger, or a node that held "
                f"them, died: {cause_of(error)}; restart from the last checkpoint"
            ) from None
        n_samples = {record.group: record.n for record in lease.records}
        self._count(
            sum(payload_bytes(payload) for payload in payloads),
            sum(logical_bytes(payload, n_samples[group]) for group, payload in zip(wanted, payloads, strict=True)),
        )
        return {group: unpack_group(payload) for group, payload in zip(wanted, payloads, strict=True)}

    def write_back(
        self,
        partition: int,
        field: str,
        values: Mapping[int, np.ndarray | np.generic],
        *,
        overwrite: bool = False,
    ) -> None:
        spec = write_back_spec(field, f"partition {partition}")
        for sample, value in values.items():  # laid on end they could no longer be told apart
            check_array(value, spec, f"partition {partition}, field {field!r}, sample {sample}")
        column = pack_column(field, [np.asarray(value) for value in values.values()], spec)
        self._answer(self.ledger.write_back.remote(partition, field, list(values), column, overwrite))

    def read_back(self, partition: int, field: str, samples: Iterable[int] | None = None) -> dict[int, np.ndarray]:
        wanted = None if samples is None else list(samples)
        found, column = self._answer(self.ledger.read_back.remote(partition, field, wanted))
        spec = write_back_spec(field, f"partition {partition}")
        return dict(zip(found, unpack_column(field, column, spec), strict=True))

    def ack(self, *leases: Lease) -> None:
        self._change("ack", *(_bare(lease) for lease in leases))

    def release(self, lease: Lease) -> None:
        self._change("release", _bare(lease))

    def consumer_died(self, consumer: str) -> int:
        return self._change("consumer_died", consumer)

    def close(self, partition: int, *, discard: bool = False) -> None:
        self._change("close", partition, discard=discard)

    def fail(self, partition: int | None, cause: BaseException | str) -> None:
        self._change("fail", partition, cause_of(cause))

    def stats(self) -> PlaneStats:
        for ref in self._counts:
            self._answer(ref)
        self._counts.clear()
        return self._answer(self.ledger.stats.remote())

    def _change(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self.ledger.change.remote(method, *args, **kwargs))

    def _count(self, nbytes: int, logical: int) -> None:
        self._counts = [ref for ref in self._counts if not ray.wait([ref], timeout=0)[0]]
        self._counts.append(self.ledger.count_fetch.remote(nbytes, logical))

    def _answer(self, ref: Any, limit_s: float = ANSWER_S) -> Any:
        """The answer of a call to the ledger, in slices short enough for signals to be handled in between."""
        end = time.monotonic() + limit_s
        while not ray.wait([ref], timeout=POLL_S)[0]:
            if time.monotonic() > end:
                raise PlaneDied(
                    f"the data plane's ledger has not answered for {limit_s:.0f} s; its process hangs or its node is "
                    "unreachable: restart from the last checkpoint"
                )
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise unwrapped(error) from None
        except RayActorError as error:
            raise plane_died(error) from None


class _Slots:
    """The puts of one partition that may be in flight at once."""

    def __init__(self) -> None:
        self.free, self.users = asyncio.Semaphore(PUTS_IN_FLIGHT), 0


class RayProducer:
    """The producers' side, inside of a rollout actor; see protocol.Producer.

    ``stash`` is the actor itself (a PayloadProducer), known to the plane as ``name`` by RayPlane.attach. All methods
    are awaited on the actor's event loop.
    """

    def __init__(self, plane: RayPlane, name: str, stash: PayloadProducer, tracer: Tracer | None = None):
        self._ledger, self._name, self._stash = plane.ledger, name, stash
        self._tracer = tracer or Tracer(None, name)
        self._key = 0
        self._slots: dict[int, _Slots] = {}
        self._attached: asyncio.Future[None] | None = None

    async def put(self, record: GroupRecord, fields: GroupFields) -> None:
        check_group(record, fields, f"partition {record.partition}, group {record.group}")
        await self._attach()
        payload = pack_group(fields)
        nbytes, logical = payload_bytes(payload), logical_bytes(payload, record.n)
        begun = time.monotonic_ns()
        attrs = {"partition": record.partition, "group": record.group, "bytes": nbytes}
        async with self._slot(record.partition):
            waited = time.monotonic_ns() - begun
            self._key += 1
            key = self._key
            small = nbytes <= INLINED_BYTES
            if not small:
                self._stash.stash_payload(key, payload)
            try:
                sent = (key, record, nbytes, logical, payload if small else None)
                waited += round(1e9 * await self._call("put", self._name, *sent))
            finally:
                self._stash.drop_payload(key)
        if waited > 1_000_000:
            self._tracer.record("plane.backpressure", begun, begun + waited, **attrs)
        self._tracer.record("plane.put", begun, time.monotonic_ns(), logical_bytes=logical, **attrs)

    async def fail(self, partition: int | None, cause: BaseException | str) -> None:
        await self._call("change", "fail", partition, cause_of(cause))

    @contextlib.asynccontextmanager
    async def _slot(self, partition: int) -> AsyncIterator[None]:
        """Bounds the puts that wait in the ledger. Each partition on its own: none waits for another's."""
        slots = self._slots.setdefault(partition, _Slots())
        slots.users += 1
        try:
            async with slots.free:
                yield
        finally:
            slots.users -= 1
            if not slots.users:
                del self._slots[partition]

    async def _attach(self) -> None:
        if self._attached is None:
            me = ray.get_runtime_context().current_actor
            self._attached = asyncio.ensure_future(self._call("attach", self._name, me))
        await asyncio.shield(self._attached)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self._ledger, method).remote(*args)
        except RayTaskError as error:
            raise unwrapped(error) from None
        except RayActorError as error:
            raise plane_died(error) from None


def plane_died(error: RayActorError) -> PlaneError:
    return PlaneDied(f"the data plane's ledger died: {cause_of(error)}; restart from the last checkpoint")


def _bare(lease: Lease) -> Lease:
    """Without payload handles and records, which the ledger has."""
    return Lease(
        id=lease.id,
        partition=lease.partition,
        consumer=lease.consumer,
        groups=lease.groups,
        records=(),
        mini=lease.mini,
        chunk=lease.chunk,
    )
