"""Spreads decode batches over engine replicas, and replaces replicas that die.

    scheduler ── batch 7 ─► wait in order ─► a replica that is free, or runs the same version and has room;
                                             of several, the one with the fewest outstanding tokens
                                             └─► load the batch's version if it holds another ─► generate

Pure asyncio over ``Engine`` objects: what stands behind one (this process, a Ray actor) is its own affair. A batch
whose engine died goes to the next replica that can take it; it is the same batch with the same noise, so the same bits
come back.

What a version that is offered does to an engine that is generating is ``in_flight``:

    finish   it takes no more batches until it is idle, then takes the weights: no response spans two versions
    abort    what it generates is given up and begun again, under the new weights
    keep     it takes the weights at once (``Engine.live_update``), and what it generates goes on under them

A batch that names its version (every one in lockstep, evaluations) is never touched: the engine finishes it first.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from stretto.observe.trace import Tracer
from stretto.rollout.engine import Engine, EngineLost, GroupRequest, Sampling, Weights
from stretto.rollout.replica import GivenUp, Replica, unless
from stretto.types import Response, StrettoError

LEAST_START_LIMIT_S = 600.0
"""A model may take longer to load than a decode batch; a start is given at least this long."""

SLOW_S = 30.0
SLOW_TIMES = 10.0
"""A call that takes longer than both, seconds and times the median of decode batches so far, is told of once."""
REMEMBERED = 100
"""Decode batches whose times are kept for the median."""

T = TypeVar("T")
InFlight = Literal["finish", "abort", "keep"]


@dataclass(frozen=True)
class Offer:
    """The weights of a policy version."""

    version: int
    weights: Weights


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One call of an engine.

    ``order``: batches are begun in this order. ``offer``: the version that must generate it; None for the newest that
    has been offered when it begins (the one the engine was built with, where none has). ``span`` and ``attrs`` are
    what the trace calls it.
    """

    order: int
    requests: Sequence[GroupRequest]
    sampling: Sampling
    offer: Offer | None
    span: str
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The most tokens that an engine may hold for it."""
        prompts = sum(len(r.prompt.prompt_ids) for r in self.requests)
        return self.sampling.n * (prompts + self.sampling.max_tokens * len(self.requests))


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Responses in request order, the version that made them, and the seconds its engine took to load that and to
    generate.
    """

    groups: list[list[Response]]
    version: int
    load_s: float
    decode_s: float


class Router:
    """``make(i)`` gives the engine of replica i, not yet started; it is called again for its successors.

    ``max_restarts`` is for the router's lifetime; the death after that ends it with that cause. ``timeout_s`` bounds
    one ``load_weights`` and one ``generate``. ``in_flight`` is what an offer does to responses under way, see above.
    ``note`` is told in one line of every restart, and of every call that is slow (``slow_s``: see ``SLOW_S``), while it
    is. All methods belong to one event loop.
    """

    def __init__(
        self,
        make: Callable[[int], Engine],
        replicas: int,
        *,
        max_restarts: int,
        timeout_s: float,
        tracer: Tracer,
        in_flight: InFlight = "finish",
        note: Callable[[str], None] = lambda _: None,
        slow_s: float = SLOW_S,
    ):
        self.replicas = replicas
        self.restarts = 0
        self.begun_again = 0
        """Groups that were given up for newer weights, so far."""
        self._make = make
        self._in_flight = in_flight
        self._max_restarts = max_restarts
        self._timeout_s = timeout_s
        self._tracer = tracer
        self._note = note
        self._slow_s = slow_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._newest: Offer | None = None
        self._live: dict[int, Replica] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._waiting: set[int] = set()
        self._changed = asyncio.Event()
        self._ended: StrettoError | None = None
        self._first_death = ""

    async def start(self) -> list[Mapping[str, Any]]:
        """Start all replicas at once; what each has set for itself.

        Raises:
            StrettoError: one cannot start, or ``max_restarts`` is used up.
        """
        await asyncio.gather(*(self._bring_up(index) for index in range(self.replicas)))
        if self._ended is not None:
            raise self._ended
        return [self._live[index].facts for index in sorted(self._live)]

    @property
    def capacity(self) -> int:
        """Batches that all replicas together run at once, as far as they have started."""
        most = max((replica.engine.concurrency for replica in self._live.values()), default=1)
        return self.replicas * most

    @property
    def fixed_batches(self) -> bool:
        """Whether every engine that has started decodes what a call gives it as one batch."""
        return all(replica.engine.fixed_batches for replica in self._live.values())

    @property
    def repeatable(self) -> bool:
        """Whether bits repeat from run to run, as far as batches decide."""
        return all(r.engine.fixed_batches or r.engine.batch_invariant for r in self._live.values())

    def offer(self, version: int, weights: Weights) -> None:
        """Batches without a version of their own take it from now on, unless a newer one has been offered."""
        if self._newest is None or version > self._newest.version:
            self._newest = Offer(version, weights)
            for replica in self._live.values():
                self._renew(replica)
            self._wake()

    async def generate(self, batch: DecodeBatch) -> Decoded:
        """Decode a batch on some replica.

        Raises:
            StrettoError: the engine refused it; or engines died more often than allowed, with the last one's cause.
        """
        while True:
            replica, offer = await self._place(batch)
            try:
                return await self._decode(replica, batch, offer)
            except GivenUp:
                self.begun_again += len(batch.requests)
            except StrettoError:
                raise
            except Exception as error:  # whatever it is, it says nothing of the batch: another engine shall do it
                self._lost(replica, error)
            finally:
                replica.calls -= 1
                replica.pinned -= batch.offer is not None
                replica.tokens -= batch.tokens
                self._renew(replica)
                self._wake()

    async def close(self) -> None:
        """End all engines; calls that run fail."""
        self._end(StrettoError("the rollout side is closing"))
        tasks = [*self._starts, *self._updates.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(r.engine.close() for r in self._live.values()), return_exceptions=True)
        self._live.clear()

    def outstanding(self) -> dict[int, tuple[int, int]]:
        """Calls and tokens that each live replica has been given and not finished."""
        return {index: (replica.calls, replica.tokens) for index, replica in sorted(self._live.items())}

    # Placing -------------------------------------------------------------------------------------------------------

    async def _place(self, batch: DecodeBatch) -> tuple[Replica, Offer | None]:
        """A replica that has been given the batch, and the version to generate it by."""
        self._waiting.add(batch.order)
        try:
            while True:
                if self._ended is not None:
                    raise self._ended
                if batch.order == min(self._waiting):
                    offer = batch.offer or self._newest
                    if (replica := self._fitting(offer)) is not None:
                        replica.calls += 1
                        replica.pinned += batch.offer is not None
                        replica.tokens += batch.tokens
                        replica.version = replica.engine.version if offer is None else offer.version
                        return replica, offer
                await self._changed.wait()
        finally:
            self._waiting.discard(batch.order)
            self._wake()

    def _fitting(self, offer: Offer | None) -> Replica | None:
        fitting = [
            replica
            for replica in self._live.values()
            if replica.calls == 0
            or (replica.calls < replica.engine.concurrency and (offer is None or offer.version == replica.version))
        ]
        return min(fitting, key=lambda replica: (replica.tokens, replica.index), default=None)

    def _wake(self) -> None:
        """Everyone who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Serving -------------------------------------------------------------------------------------------------------

    async def _decode(self, replica: Replica, batch: DecodeBatch, offer: Offer | None) -> Decoded:
        engine, given_up, load_s = replica.engine, replica.given_up, 0.0
        async with replica.loading:
            # Its engine may hold a newer version by now, which a batch that names none is as well served by.
            newer = batch.offer is None and offer is not None and engine.version > offer.version
            if offer is not None and engine.version != offer.version and not newer:
                begun = time.monotonic()  # what others wait meanwhile is no second load
                await self._load(replica, offer)
                load_s = time.monotonic() - begun
            if batch.offer is None and given_up.is_set():  # while it loaded
                raise GivenUp
        version = engine.version
        known = {"version": version, "replica": replica.index, "groups": len(batch.requests)}
        with self._tracer.span(batch.span, **batch.attrs, **known) as attrs:
            begun = time.monotonic()
            call = self._in_time(replica, engine.generate(batch.requests, batch.sampling))
            groups = await (call if batch.offer is not None else unless(given_up, call))
            decode_s = time.monotonic() - begun
            self._took.append(decode_s)
            attrs["tokens"] = sum(len(r.token_ids) for group in groups for r in group)
        return Decoded(groups=groups, version=version, load_s=load_s, decode_s=decode_s)

    async def _load(self, replica: Replica, offer: Offer) -> None:
        with self._tracer.span("rollout.load_weights", version=offer.version, replica=replica.index):
            await self._in_time(replica, replica.engine.load_weights(offer.version, offer.weights))

    # Renewing ------------------------------------------------------------------------------------------------------

    def _renew(self, replica: Replica) -> None:
        """Let an engine that is generating have the newest version, as far as ``in_flight`` and its batches allow."""
        newest = self._newest
        if (
            self._in_flight == "finish"
            or newest is None
            or not replica.calls
            or replica.pinned
            or replica.version >= newest.version
            or self._live.get(replica.index) is not replica
        ):
            return
        if self._in_flight == "abort":
            replica.given_up.set()
            replica.given_up = asyncio.Event()
        elif replica.index not in self._updates:
            task = asyncio.create_task(self._update(replica))
            self._updates[replica.index] = task
            task.add_done_callback(lambda _: self._updated(replica))

    async def _update(self, replica: Replica) -> None:
        """Load the newest version into an engine while it generates."""
        async with replica.loading:
            newest = self._newest
            assert newest is not None
            # Calls that came meanwhile may have changed what it is to run, or its version.
            if replica.pinned or replica.engine.version >= newest.version:
                return
            replica.version = newest.version
            self._wake()
            try:
                await self._load(replica, newest)
            except StrettoError as error:
                self._end(error)
                replica.given_up.set()
            except Exception as error:
                self._lost(replica, error)

    def _updated(self, replica: Replica) -> None:
        del self._updates[replica.index]
        self._renew(replica)  # a newer one may have been offered meanwhile

    async def _in_time(self, replica: Replica, call: Awaitable[T]) -> T:
        slow_s = max(self._slow_s, SLOW_TIMES * statistics.median(self._took or [0.0]))
        slow = asyncio.get_running_loop().call_later(slow_s, self._is_slow, replica, slow_s)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(f"it has not answered for rollout.engine_timeout_s = {self._timeout_s:g} s") from None
        finally:
            slow.cancel()

    def _is_slow(self, replica: Replica, seconds: float) -> None:
        if self._ended is None and self._live.get(replica.index) is replica:
            pid = getattr(replica.engine, "pid", None)  # an engine in a process of its own has one
            process = "" if pid is None else f" (pid {pid})"
            self._note(
                f"rollout engine {replica.index}{process} has not answered for {seconds:.3g} s; it is replaced after "
                f"rollout.engine_timeout_s = {self._timeout_s:g} s"
            )

    # Replacing -----------------------------------------------------------------------------------------------------

    async def _bring_up(self, index: int) -> None:
        """Start the engine of a replica, and where that fails another one, as long as restarts are left."""
        limit_s = max(self._timeout_s, LEAST_START_LIMIT_S)
        while self._ended is None:
            engine = self._make(index)
            try:
                async with asyncio.timeout(limit_s):
                    facts = await engine.start()
            except Exception as error:
                engine.kill()
                if isinstance(error, StrettoError):
                    self._end(error)
                    return
                self._count_death(index, error)
            except BaseException:
                engine.kill()
                raise
            else:
                self._live[index] = Replica(index, engine, facts, engine.version)
                self._wake()
                return

    def _lost(self, replica: Replica, error: Exception) -> None:
        """Take a replica out for good, and have its successor started. Its other calls fail, and come here too."""
        if self._live.get(replica.index) is not replica:
            return
        del self._live[replica.index]
        replica.engine.kill()
        self._count_death(replica.index, error)
        if self._ended is None:
            task = asyncio.create_task(self._bring_up(replica.index))
            self._starts.add(task)
            task.add_done_callback(self._starts.discard)

    def _count_death(self, index: int, error: Exception) -> None:
        cause = str(error) if isinstance(error, EngineLost) else f"{type(error).__name__}: {error}"
        death = f"rollout engine {index} died: {cause.removesuffix('.')}"
        self._first_death = self._first_death or death
        if self.restarts >= self._max_restarts:
            spent = f"rollout.max_engine_restarts = {self._max_restarts}"
            if self._first_death != death:
                spent += f"; the first death: {self._first_death}"
            self._end(StrettoError(f"{death} ({spent}); resume from the last checkpoint"))
            return
        self.restarts += 1
        self._note(f"{death}; restart {self.restarts} of {self._max_restarts}")

    def _end(self, error: StrettoError) -> None:
        self._ended = self._ended or error
        self._wake()
