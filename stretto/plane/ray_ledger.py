"""The processes on both ends of a pull: the ledger's Ray actor, and the mixin of the actors that produce."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from stretto.plane.ledger import Ledger, PutTicket
from stretto.plane.payload import Payload, pack_column, unpack_column, write_back_spec
from stretto.plane.protocol import Lease, PlaneStats, ProducerDied
from stretto.types import GroupRecord

POLL_S = 0.2
INLINED_BYTES = 100 * 1024
"""Values up to this size travel within Ray's calls and replies, not through shared memory (its
max_direct_call_object_size). Payloads no larger are sent along with the put: a pull would be one more call a group."""


def cause_of(error: BaseException | str) -> str:
    """An error as one line for messages: of a dead actor why it died, of Ray's other errors the first line."""
    if isinstance(error, str):
        return error
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return cause_of(error.cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, RayActorError):
        noise = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
        cause = " ".join(line for line in lines if not line.startswith(noise))
        return _death(cause.partition(" Some common causes include")[0])  # a page about OOM killers, whatever it was
    if isinstance(error, RayError):
        return f"{type(error).__name__}: {lines[0].partition('. ')[0]}"
    return f"{type(error).__name__}: {' '.join(lines)}"


def _death(text: str) -> str:
    """Ray's words for how an actor's process ended, in plain ones; one that is not known stays as it is. Ray does not
    tell a signal from a crash: of both it has seen the end of a connection.
    """
    if "connection error code 2. End of file" in text:
        return "it was killed (SIGKILL: by someone, or by the kernel for want of memory), or it crashed"
    code = re.search(r"Worker exits with an exit code (-?\d+)", text)
    return f"it ended with exit code {code[1]}" if code and "Traceback" not in text else text


class PayloadProducer:
    """Mixin of a Ray actor that puts groups: the ledger pulls their payloads from it, and watches it.

    The actor must be an async one (it has ``async def`` methods), and its event loop must stay free.
    """

    def stash_payload(self, key: int, payload: Payload) -> None:
        self.__dict__.setdefault("_payloads", {})[key] = payload

    def drop_payload(self, key: int) -> None:
        self.__dict__.get("_payloads", {}).pop(key, None)

    async def take_payload(self, key: int) -> tuple[Payload, None]:
        """Two return values: the payload, and a token that says it is there without moving it."""
        return self.__dict__["_payloads"].pop(key), None

    async def watch_producer(self) -> None:
        """Never returns: the call fails when this process dies."""
        await asyncio.Event().wait()


class LedgerActor:
    """The ledger in an async Ray actor. All methods run on one event loop, so the ledger needs no locks."""

    def __init__(self, capacity_bytes: int, lease_s: float):
        self._ledger = Ledger(capacity_bytes=capacity_bytes, lease_s=lease_s, clock=time.monotonic)
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._producers: dict[str, Any] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def _wake_claims(self) -> None:
        """Every claim looks again whether its wait is over."""
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _wake_puts(self) -> None:
        self._room.set()
        self._room = asyncio.Event()

    @contextlib.contextmanager
    def _change(self) -> Iterator[Ledger]:
        """For changes that may end any wait."""
        try:
            yield self._ledger
        finally:
            self._wake_claims()
            self._wake_puts()

    async def ping(self) -> None:
        """Answers once the actor is up."""

    async def attach(self, name: str, producer: Any) -> None:
        """Makes a producer known, and watches its process. Its successor may attach under the same name."""
        known = self._producers.get(name)
        if known == producer:
            return
        self._producers[name] = producer
        self._ledger.producer_joined(name)
        watch = asyncio.create_task(self._watch(name, producer))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, name: str, producer: Any) -> None:
        while True:
            try:
                await producer.watch_producer.remote()
            except ActorUnavailableError:
                await asyncio.sleep(POLL_S)
            except (RayActorError, RayTaskError) as error:
                if self._producers.get(name) == producer:
                    del self._producers[name]
                    with self._change() as ledger:
                        ledger.producer_died(name, cause_of(error))
                return

    async def put(
        self, producer: str, key: int, record: GroupRecord, nbytes: int, logical: int, payload: Payload | None
    ) -> float:
        """Lets a group in and makes it readable, once its payload is pulled where it was not sent along; the seconds it
        waited for room.
        """
        handle = self._producers.get(producer)
        if handle is None:
            raise ProducerDied(
                f"partition {record.partition}, group {record.group}: the producer {producer!r} is not attached, or "
                "has died; attach it before it puts"
            )
        begun = time.monotonic()
        ticket = self._ledger.begin_put(record, nbytes, logical)
        self._wake_claims()  # the new put may have completed the proof of a deadlock
        committed = False
        try:
            while not self._ledger.poll_put(ticket):
                await self._room.wait()
            waited = time.monotonic() - begun
            # Ours either way: what the producer had put itself would be lost with its process.
            ref = await self._pull(handle, key, ticket) if payload is None else ray.put(payload)
            self._ledger.commit_put(ticket, ref)
            self._wake_claims()
            committed = True
            return waited
        finally:
            if not committed:
                with self._change() as ledger:
                    ledger.cancel_put(ticket)

    async def _pull(self, producer: Any, key: int, ticket: PutTicket) -> Any:
        payload, done = producer.take_payload.options(num_returns=2).remote(key)
        try:
            await done
        except RayActorError as error:
            # The watch fails the partition; this put may be the first to notice.
            raise ProducerDied(
                f"partition {ticket.partition}, group {ticket.group}: the producer died: {cause_of(error)}"
            ) from None
        return payload

    async def claim(self, *args: Any) -> Lease:
        claim = self._ledger.begin_claim(*args)
        self._wake_puts()  # the new claim may have completed the proof of a deadlock
        try:
            while (lease := self._ledger.poll_claim(claim)) is None:
                with contextlib.suppress(TimeoutError):
                    # Leases end and deadlines pass without an event, hence the short wait.
                    await asyncio.wait_for(self._arrived.wait(), POLL_S)
            return lease
        finally:
            self._ledger.cancel_claim(claim)

    async def write_back(
        self, partition: int, field: str, samples: list[int], column: Payload, overwrite: bool
    ) -> None:
        spec = write_back_spec(field, f"partition {partition}")
        values = dict(zip(samples, unpack_column(field, column, spec), strict=True))
        self._ledger.write_back(partition, field, values, overwrite=overwrite)

    async def read_back(self, partition: int, field: str, samples: list[int] | None) -> tuple[list[int], Payload]:
        spec = write_back_spec(field, f"partition {partition}")
        found = self._ledger.read_back(partition, field, samples)
        return list(found), pack_column(field, list(found.values()), spec)

    async def change(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the ledger that others may be waiting for."""
        with self._change() as ledger:
            return getattr(ledger, method)(*args, **kwargs)

    async def count_fetch(self, nbytes: int, logical: int) -> None:
        self._ledger.count_fetch(nbytes, logical)

    async def stats(self) -> PlaneStats:
        return self._ledger.stats()
