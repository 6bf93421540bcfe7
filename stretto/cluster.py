"""The processes of a run: an embedded Ray (or a cluster's), the actor ranks, the rollout process, the data plane.

Everything here is plumbing between the controller and ``build``'s parts; what the parts do is theirs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from stretto import build, compat, machine
from stretto.config import Config
from stretto.embedded import EmbeddedRay
from stretto.plane.protocol import Lease
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer, cause_of, unwrapped
from stretto.stops import STOPS
from stretto.types import (
    ChunkSchedule,
    Evaluation,
    GroupRecord,
    Mini,
    PartitionPlan,
    Split,
    StrettoError,
    WeightBucket,
)

CLOSE_S = 4.0
"""How long parts may take to end by themselves before their processes are killed."""
ABORT_S = 2.0
"""The same where a run is cut short: reward functions get the time to end what they have started."""


def object_store_bytes(config: Config) -> int:
    """What Ray must hold in shared memory at once: the plane's payloads, the s + 1 published versions and the next one,
    which is made before the oldest is let go, and some room. With less, Ray would spill weights to disk.
    """
    from stretto.models.loading import weight_bytes

    versions = config.staleness.max + 2
    return config.plane.capacity_mib * 2**20 + versions * weight_bytes(config.model) + 512 * 2**20


def memory_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


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


class ActorProcess:
    """Ray actor of one data-parallel rank."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane, rank: int):
        from stretto.actor.parallel import RankGroup

        self.facts = machine.settle(place.actor_cores, config.run.determinism)
        self.tracer = build.tracer(config, f"actor{rank}")
        group = RankGroup(rank=rank, world=config.actor.data_parallel)
        self.core = build.actor_rank(config, plane.fetch, self.tracer, place.device, group)

    def start(self) -> dict[str, Any]:
        """Answers once the model is loaded, with what ``machine.settle`` set and the fingerprint of the weights."""
        from stretto.observe.fingerprint import fingerprint

        return self.facts | {"parameters": fingerprint(self.core.trainer.master.named())}

    def phase1(self, chunk: ChunkSchedule, lease: Lease) -> dict[str, float]:
        return self.core.phase1(chunk, lease.records, lease)

    def phase2(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        return self.core.phase2(records)

    def phase3(self, mini: Mini, normaliser: int) -> dict[str, float]:
        return self.core.phase3(mini, normaliser) | {"actor_rss_mib": memory_mib()}

    @ray.method(num_returns="streaming")  # a bucket is an object of its own, there as soon as it is copied
    def publish(self, version: int) -> Iterator[WeightBucket]:
        with self.tracer.span("actor.publish", version=version):
            yield from self.core.publish(version)

    def end_partition(self) -> tuple[dict[str, str], dict[str, Any]]:
        """The evidence of the partition just trained: fingerprints and raw values; then its samples are forgotten."""
        with self.tracer.span("actor.evidence"):
            evidence = self.core.fingerprints(), self.core.raw()
            self.core.end_partition()
        self.tracer.flush()
        return evidence

    def save(self, step: int, published: dict[int, list[Any]]) -> None:
        kept = {version: _getter(refs) for version, refs in published.items()}
        self.core.save(step, cursor=step, policy_version=step, published=kept)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        self.core.load(path, state)


def _getter(refs: list[Any]) -> Any:
    return lambda: ray.get(refs)


class Actor:
    """The controller's end of the actor ranks. Ranks answer alike where they have reduced over one another."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane):
        remote = ray.remote(num_cpus=1, num_gpus=int(place.device == "cuda"), max_restarts=0)(ActorProcess)
        self.ranks = [remote.remote(config, place, plane, rank) for rank in range(config.actor.data_parallel)]

    def start(self) -> dict[str, Any]:
        return self._all("start")[0]

    def forward(self, chunk: ChunkSchedule, lease: Lease) -> Callable[[], None]:
        """Start phase 1 of one chunk; ranks take chunks in the order of these calls. Returns a call that waits."""
        refs = [rank.phase1.remote(chunk, lease) for rank in self.ranks]

        def finish() -> None:
            answers(refs, "actor")

        return finish

    def advantages(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        """Phase 2: the records of the whole partition, on every rank."""
        return self._all("phase2", records)[0]

    def train(self, mini: Mini, normaliser: int) -> dict[str, float]:
        """Phase 3: one optimizer update."""
        return self._all("phase3", mini, normaliser)[0]

    def publish(self, version: int) -> list[Any]:
        """Phase 4: references to the buckets of ``version``; returns once the actor has copied them."""
        stream = self.ranks[0].publish.remote(version)
        buckets = list(stream)
        answers([stream.completed()], "actor")
        return buckets

    def end_partition(self) -> tuple[dict[str, str], dict[str, Any]]:
        return self._all("end_partition")[0]

    def save(self, step: int, published: dict[int, list[Any]]) -> None:
        self._all("save", step, published)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        self._all("load", path, state)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return answers([getattr(rank, method).remote(*args) for rank in self.ranks], "actor")

    def kill(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


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


class WeightStore:
    """References to the buckets of the newest s + 1 policy versions."""

    def __init__(self, bound: int):
        self.bound = bound
        self._versions: dict[int, list[Any]] = {}

    def keep(self, version: int, buckets: list[Any]) -> None:
        """Offer ``version``; older ones than version - s are let go."""
        self._versions[version] = buckets
        for old in [v for v in self._versions if v < version - self.bound]:
            del self._versions[old]

    def __getitem__(self, version: int) -> list[Any]:
        return self._versions[version]

    def __iter__(self) -> Iterator[int]:
        """The kept versions, oldest first."""
        return iter(sorted(self._versions))

    def before(self, version: int) -> dict[int, list[Any]]:
        """The kept versions below ``version``: what a checkpoint at ``version`` must hold beside its parameters."""
        return {v: refs for v, refs in sorted(self._versions.items()) if v < version}


def answers(refs: Iterable[Any], side: str) -> list[Any]:
    """Results of remote calls; errors as their own, without Ray's wrapping.

    Raises:
        StrettoError: raised there, or the process died.
    """
    try:
        return ray.get(list(refs))
    except RayTaskError as error:
        raise unwrapped(error) from None
    except OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
        raise StrettoError(
            f"the {side} process was ended by Ray because this machine ran out of memory ({cause}); free some or lower "
            "rollout.prompts_per_partition or actor.max_tokens_per_microbatch, then resume from the last checkpoint"
        ) from None
    except RayActorError as error:
        raise StrettoError(f"the {side} process died: {cause_of(error)}; resume from the last checkpoint") from None


class Cluster:
    """All processes of one run; a context manager that leaves none behind."""

    def __init__(self, config: Config, place: machine.Placement):
        self.config, self.place = config, place
        self.own_ray = None if config.cluster.address else EmbeddedRay(Path(config.run.dir) / "logs")

    def __enter__(self) -> Cluster:
        try:
            self._start_ray()
            self.plane: RayPlane = build.plane(self.config)
            self.rollout = Rollout(self.config, self.place, self.plane)
            self.actor = Actor(self.config, self.place, self.plane)
        except BaseException:
            self._stop_ray()
            raise
        return self

    def _start_ray(self) -> None:
        """Join ``cluster.address``, or start a Ray of our own that ends with this process."""
        os.environ.update({k: v for k, v in machine.ENVIRONMENT.items() if k not in os.environ})
        if self.own_ray is not None:
            cores = len(self.place.actor_cores) + len(self.place.rollout_cores)
            self.own_ray.start(cpus=max(4, cores), object_store_bytes=object_store_bytes(self.config))
            return
        with compat.ray_as_a_guest(STOPS.put_off):
            ray.init(address=self.config.cluster.address, log_to_driver=False, configure_logging=False)
        STOPS.check()

    def start(self) -> dict[str, Any]:
        """Wait until both sides are ready; what each has set for itself."""
        rollout = self.rollout.process.start.remote()
        actor = self.actor.start()
        facts = {"actor": actor, "rollout": answers([rollout], "rollout")[0]}
        STOPS.check()
        return facts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        STOPS.phase = "ending"
        died = self.own_ray.died() if self.own_ray is not None else ""
        try:
            if not died:  # else every call would wait for what is gone
                self.rollout.close(CLOSE_S if kind is None else ABORT_S)
                self.rollout.kill()
                self.actor.kill()
                self.plane.stop()
        finally:
            self._stop_ray()
        if died and not (kind is KeyboardInterrupt and STOPS.signal):
            raise StrettoError(f"{died}; resume from the last checkpoint") from error

    def _stop_ray(self) -> None:
        STOPS.phase = "ending"
        if self.own_ray is not None:
            self.own_ray.stop()
        else:
            ray.shutdown()
