"""The rollout side's coordinator as a Ray actor, and the controller's end of it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import ray

from stretto import build, machine
from stretto.config import Config
from stretto.engine_process import RemoteEngine, create_engine
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer
from stretto.remote import answers, failure, memory_mib
from stretto.rollout.router import Offer
from stretto.types import Evaluation, PartitionPlan, Split

WATCH_S = 0.5


class RolloutProcess(PayloadProducer):
    """Ray actor that processes prompts, sends decode batches to the engines, has responses scored, and puts them.

    Async, so that it serves the plane while partitions are generated. It holds no model. ``processes`` are the engines'
    first ones; their successors are made here.
    """

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane, processes: list[Any]):
        self.config, self.place, self.plane = config, place, plane
        self._first = dict(enumerate(processes))
        self._engines: dict[int, RemoteEngine] = {}
        self._notes: list[str] = []
        self._noted = asyncio.Event()
        self._turn, self._turned = 0, asyncio.Event()

    async def start(self) -> dict[str, Any]:
        machine.adopt_orphans()  # those of reward functions
        facts = machine.settle(self.place.rollout_cores, self.config.run.determinism)
        tracer = build.tracer(self.config, "rollout")
        producer = RayProducer(self.plane, "rollout", self, tracer)
        self.worker, engines = await build.rollout_worker(self.config, producer, tracer, self._engine, note=self._note)
        return facts | {"engines": engines}

    def _engine(self, replica: int) -> RemoteEngine:
        process = self._first.pop(replica, None) or create_engine(self.config, self.place, replica)
        self._engines[replica] = RemoteEngine(process)
        return self._engines[replica]

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._noted.set()

    async def notes(self) -> list[str]:
        """What happened to engines, one line each: all since the last call, once there is anything."""
        await self._noted.wait()
        self._noted.clear()
        notes, self._notes = self._notes, []
        return notes

    async def offer(self, version: int, refs: list[Any]) -> None:
        self.worker.offer(version, refs)

    async def run(self, turn: int, plan: PartitionPlan, refs: list[Any]) -> dict[str, Any]:
        async with self._in_turn(turn):
            report = asyncio.ensure_future(self.worker.run(plan, refs))
        result = await report
        return result | {
            "engine_restarts": self.worker.router.restarts,
            "begun_again_groups": self.worker.router.begun_again,
            "engine_rss_mib": max(engine.memory_mib for engine in self._engines.values()),
            "rollout_rss_mib": memory_mib(),
        }

    async def evaluate(self, turn: int, split: Split, prompts: int, version: int, refs: list[Any]) -> Evaluation:
        async with self._in_turn(turn):
            result = asyncio.ensure_future(self.worker.evaluate(split, prompts, Offer(version, refs)))
        return await result

    @asynccontextmanager
    async def _in_turn(self, turn: int) -> AsyncIterator[None]:
        """Ray may deliver calls to an async actor in another order than that in which they were made."""
        while self._turn != turn:
            await self._turned.wait()
        yield
        self._turn += 1
        self._turned.set()
        self._turned = asyncio.Event()

    async def close(self) -> None:
        if hasattr(self, "worker"):
            await self.worker.close()


class Rollout:
    """The controller's end of the rollout side: work is queued there and begun in order."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane, engines: list[Any]):
        remote = ray.remote(num_cpus=1, max_restarts=0)(RolloutProcess)
        self.process = remote.options(max_concurrency=1000).remote(config, place, plane, engines)
        plane.attach(self.process, "rollout")
        self.engines = engines
        self.position = 0
        """Dynamic sampling: where the candidates of the partition after the one last reported start; of the first one,
        where they are to start."""
        self._bounded = config.staleness.mode == "bounded"
        self._turns = 0
        self._runs: dict[int, Any] = {}
        self._evaluations: list[tuple[int, Any]] = []
        """Their versions and calls, in the order they were queued."""
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    def offer(self, version: int, refs: list[Any]) -> None:
        """A version has been published. In lockstep every partition names its own, and none is wanted earlier."""
        if self._bounded:
            self.process.offer.remote(version, refs)

    def run(self, plan: PartitionPlan, refs: list[Any]) -> None:
        """Queue a partition. Its errors reach whoever claims from it, and ``report``."""
        self._runs[plan.partition] = self.process.run.remote(self._next_turn(), plan, refs)

    def report(self, partition: int) -> dict[str, Any]:
        """Counts and times of a partition, once it is generated."""
        report: dict[str, Any] = answers([self._runs.pop(partition)], "rollout")[0]
        self.position = report.get("next_position", self.position)
        return report

    def watch(self, note: Callable[[str], None]) -> None:
        """From now on ``note`` is called, from another thread, with what happens to engines, when it happens."""
        self._watcher = threading.Thread(target=self._watch, args=(note,), name="rollout-watch", daemon=True)
        self._watcher.start()

    def _watch(self, note: Callable[[str], None]) -> None:
        call = self.process.notes.remote()
        while not self._closing.wait(WATCH_S):
            if ray.wait([call], timeout=0)[0]:
                if failure(call, "rollout") is not None:
                    return  # whoever waits for its work says so
                for text in ray.get(call):
                    note(text)
                call = self.process.notes.remote()

    def stop_watching(self) -> None:
        """To be called before Ray is shut down: a call to one that is gone would start another."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join(2 * WATCH_S)

    def evaluate(self, split: Split, prompts: int, version: int, refs: list[Any]) -> None:
        """Queue an evaluation."""
        call = self.process.evaluate.remote(self._next_turn(), split, prompts, version, refs)
        self._evaluations.append((version, call))

    def settle(self, version: int) -> None:
        """Wait for the evaluations of versions up to ``version``, whose weights are about to be overwritten."""
        if calls := [call for of, call in self._evaluations if of <= version]:
            ray.wait(calls, num_returns=len(calls))

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns - 1

    def evaluations(self, *, wait: bool = False) -> list[Evaluation]:
        """Those that have come in since the last call, in the order they were queued; with ``wait``, all."""
        done = [call for _, call in self._evaluations]
        if not wait and done:
            ready, _ = ray.wait(done, num_returns=len(done), timeout=0)
            done = list(itertools.takewhile(lambda ref: ref in ready, done))
        self._evaluations = self._evaluations[len(done) :]
        return answers(done, "rollout")

    def close(self, limit_s: float) -> None:
        ray.wait([self.process.close.remote()], timeout=limit_s)

    def kill(self) -> None:
        for process in (self.process, *self.engines):
            ray.kill(process)
