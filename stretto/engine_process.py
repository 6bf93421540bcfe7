"""A rollout engine as a Ray actor, and the ``Engine`` that stands for it in the rollout process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from stretto import build, machine
from stretto.config import Config
from stretto.remote import cause_of, memory_mib, unwrapped
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling, Weights
from stretto.types import DeviceWeights, Response, StrettoError, WeightsLost

CLOSE_S = 1.0
"""How long an engine may take to end by itself."""


class EngineProcess:
    """Ray actor of one engine replica; async, so that it can be told to end while it generates."""

    def __init__(self, config: Config, place: machine.Placement, replica: int):
        self.config, self.place, self.replica = config, place, replica
        self._started: asyncio.Future[tuple[dict[str, Any], dict[str, Any]]] | None = None

    async def begin(self) -> None:
        """Begins to build the engine. ``start`` tells what comes of it: Ray would print an error of a call whose answer
        nobody keeps, with its traceback.
        """
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())

    async def start(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Builds the engine when first called; what it has set for itself, and what its ``RemoteEngine`` must know."""
        await self.begin()
        assert self._started is not None
        return await asyncio.shield(self._started)

    async def _start(self) -> tuple[dict[str, Any], dict[str, Any]]:
        machine.adopt_orphans()  # those of an engine with processes of its own
        share = self.place.replicas[self.replica]
        facts = machine.settle(share.cores, self.config.run.determinism, share.threads)
        self.engine = build.engine(self.config, self.place.device, self.replica)
        facts |= await self.engine.start()
        return facts, {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "fixed_batches": self.engine.fixed_batches,
            "batch_invariant": self.engine.batch_invariant,
            "live_update": self.engine.live_update,
            "concurrency": self.engine.concurrency,
        }

    async def load_weights(self, version: int, refs: Sequence[Any]) -> None:
        try:
            buckets = await asyncio.gather(*refs)
        except ObjectLostError as error:  # no other engine would find them
            raise StrettoError(
                f"the weights of version {version} are lost with the process that held them: {cause_of(error)}; "
                "resume from the last checkpoint"
            ) from None
        await self.engine.load_weights(version, [_within_reach(bucket, self.replica) for bucket in buckets])

    async def generate(
        self, requests: Sequence[GroupRequest], sampling: Sampling
    ) -> tuple[list[list[Response]], float]:
        """The responses, and the memory of this process in MiB."""
        return await self.engine.generate(requests, sampling), memory_mib()

    async def close(self) -> None:
        if hasattr(self, "engine"):
            await self.engine.close()


@dataclass(frozen=True)
class _Sender:
    """The actor rank that sends a version, to this replica; see ``actor.device_weights.Sender``."""

    rank: Any
    replica: int
    weights: DeviceWeights

    async def invite(self) -> bytes:
        group: bytes = await _sent(self.rank.invite.remote(self.replica))
        return group

    async def admit(self, group: bytes, world: int) -> None:
        await _sent(self.rank.admit.remote(self.replica, group, world))

    async def send(self, group: bytes) -> None:
        await _sent(self.rank.send.remote(self.replica, group, self.weights))


async def _sent(call: Any) -> Any:
    """Raises EngineLost where sending fails, whose end of it an engine is: another one may do better. WeightsLost where
    no other would.
    """
    try:
        return await call
    except RayTaskError as error:
        if isinstance(cause := unwrapped(error), WeightsLost):
            raise cause from None
        raise EngineLost(cause_of(error)) from None
    except RayError as error:
        raise EngineLost(cause_of(error)) from None


def _within_reach(bucket: Any, replica: int) -> Any:
    """A bucket whose sender knows whom it sends to, where it has one."""
    if not isinstance(bucket, DeviceWeights) or bucket.sender is None:
        return bucket
    return replace(bucket, sender=_Sender(bucket.sender, replica, replace(bucket, sender=None)))


def _take_back(sending: asyncio.Future[Any]) -> None:
    """Cancel a call that was made after whoever wanted it had gone."""
    if not sending.cancelled() and sending.exception() is None:
        ray.cancel(sending.result())


def create_engine(config: Config, place: machine.Placement, replica: int) -> Any:
    """The Ray actor of a replica. It begins to start at once; ``RemoteEngine.start`` waits until it has."""
    remote = ray.remote(max_restarts=0)(EngineProcess)
    share = machine.gpu_share(place, replica, engine=True)
    process = remote.options(num_cpus=1, max_concurrency=1000, **share).remote(config, place, replica)
    process.begin.remote()
    return process


class RemoteEngine:
    """The ``Engine`` of an ``EngineProcess``. Weights are references to buckets; they never pass through this process.

    All methods await; a process that is gone, or that raises what is not a ``StrettoError``, is an ``EngineLost``.
    """

    def __init__(self, process: Any):
        self.process = process
        self.fixed_batches, self.batch_invariant, self.live_update, self.concurrency = False, False, False, 1
        self.memory_mib = 0.0
        self._version = -1
        self._local: psutil.Process | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None before it has started, and on another machine."""
        return None if self._local is None else self._local.pid

    async def start(self) -> Mapping[str, Any]:
        facts, known = await self._ask("start")
        self.fixed_batches, self.batch_invariant = known["fixed_batches"], known["batch_invariant"]
        self.live_update, self.concurrency = known["live_update"], known["concurrency"]
        if known["node"] == ray.get_runtime_context().get_node_id():
            with suppress(psutil.NoSuchProcess):  # the next call will say so
                self._local = psutil.Process(known["pid"])
        return facts

    async def load_weights(self, version: int, weights: Weights) -> None:
        self._version = -1  # of neither version until it is done
        await self._ask("load_weights", version, list(weights))
        self._version = version

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        groups, self.memory_mib = await self._ask("generate", list(requests), sampling)
        return groups

    async def _ask(self, method: str, *args: Any) -> Any:
        # Pixels are copied into Ray's store by this call, hence the thread, which goes on where this is cancelled.
        sending = asyncio.ensure_future(asyncio.to_thread(getattr(self.process, method).remote, *args))
        try:
            ref = await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(_take_back)
            raise
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayTaskError as error:
            cause = unwrapped(error)
            if isinstance(cause, StrettoError):
                raise cause from None
            if isinstance(error.cause, EngineLost):
                raise error.cause from None
            raise EngineLost(cause_of(error)) from None
        except RayError as error:
            raise EngineLost(cause_of(error)) from None

    def kill(self) -> None:
        tree = []
        if self._local is not None:
            with suppress(psutil.NoSuchProcess):
                tree = [self._local, *self._local.children(recursive=True)]
        ray.kill(self.process)
        for process in tree:  # Ray asks the process to end, which does nothing for one that hangs, or for its children
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def close(self) -> None:
        with suppress(EngineLost, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._ask("close")
                ray.kill(self.process)
                return
        self.kill()
