"""The rollout side as a Ray actor, and the controller's end of it."""

from __future__ import annotations

from typing import Any

import ray

from stretto import build, machine
from stretto.config import Config
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer
from stretto.remote import answers, memory_mib
from stretto.types import Evaluation, PartitionPlan, Split


class RolloutProcess(PayloadProducer):
    """Ray actor of the rollout side; async, so that it serves the plane while a partition is generated."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane):
        self.config, self.place, self.plane = config, place, plane

    async def start(self) -> dict[str, Any]:
        machine.adopt_orphans()  # those of reward functions
        facts = machine.settle(self.place.rollout_cores, self.config.run.determinism)
        tracer = build.tracer(self.config, "rollout")
        producer = RayProducer(self.plane, "rollout", self, tracer)
        self.worker = await build.rollout_worker(self.config, producer, tracer, self.place.device)
        return facts

    async def run(self, plan: PartitionPlan, refs: list[Any]) -> dict[str, Any]:
        return await self.worker.run(plan, lambda: ray.get(refs)) | {"rollout_rss_mib": memory_mib()}

    async def evaluate(self, split: Split, prompts: int, version: int, refs: list[Any]) -> Evaluation:
        return await self.worker.evaluate(split, prompts, version, lambda: ray.get(refs))

    async def close(self) -> None:
        if hasattr(self, "worker"):
            await self.worker.close()


class Rollout:
    """The controller's end of the rollout process: work is queued there and done in order."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane):
        remote = ray.remote(num_cpus=1, num_gpus=int(place.device == "cuda"), max_restarts=0)(RolloutProcess)
        self.process = remote.options(max_concurrency=1000).remote(config, place, plane)
        plane.attach(self.process, "rollout")
        self._runs: dict[int, Any] = {}
        self._evaluations: list[Any] = []

    def run(self, plan: PartitionPlan, refs: list[Any]) -> None:
        """Queue a partition. Its errors reach whoever claims from it, and ``report``."""
        self._runs[plan.partition] = self.process.run.remote(plan, refs)

    def report(self, partition: int) -> dict[str, Any]:
        """Counts and times of a partition, once it is generated."""
        return answers([self._runs.pop(partition)], "rollout")[0]

    def evaluate(self, split: Split, prompts: int, version: int, refs: list[Any]) -> None:
        """Queue an evaluation."""
        self._evaluations.append(self.process.evaluate.remote(split, prompts, version, refs))

    def evaluations(self, *, wait: bool = False) -> list[Evaluation]:
        """Those that have come in since the last call, in the order they were queued; with ``wait``, all."""
        done = self._evaluations
        if not wait and done:
            ready, _ = ray.wait(done, num_returns=len(done), timeout=0)
            done = done[: len(ready)]  # they end in the order in which they were queued
        self._evaluations = self._evaluations[len(done) :]
        return answers(done, "rollout")

    def close(self, limit_s: float) -> None:
        ray.wait([self.process.close.remote()], timeout=limit_s)

    def kill(self) -> None:
        ray.kill(self.process)
