"""The data-parallel ranks of the actor as Ray actors, and the controller's end of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from stretto import build, machine
from stretto.config import Config
from stretto.plane.protocol import Lease
from stretto.plane.ray_plane import RayPlane
from stretto.remote import answers, memory_mib
from stretto.types import ChunkSchedule, GroupRecord, Mini, WeightBucket


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
