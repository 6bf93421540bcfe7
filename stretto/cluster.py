"""The processes of a run: an embedded Ray (or a cluster's), the actor ranks, the rollout process, the data plane.

Everything here is plumbing between the controller and ``build``'s parts; what the parts do is theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group

from stretto import build, compat, machine
from stretto.actor_ranks import Actor
from stretto.config import Config
from stretto.data.check import Note
from stretto.embedded import EmbeddedRay
from stretto.engine_process import create_engine
from stretto.plane.ray_plane import RayPlane
from stretto.remote import answers, failure
from stretto.rollout_process import Rollout
from stretto.stops import STOPS
from stretto.types import StrettoError

ENGINE = "rollout engine"
CLOSE_S = 4.0
"""How long parts may take to end by themselves before their processes are killed."""
ABORT_S = 2.0
"""The same where a run is cut short: reward functions get the time to end what they have started."""


def object_store_bytes(config: Config) -> int:
    """What Ray must hold in shared memory at once: the plane's payloads, the s + 1 published versions and the next one,
    which is made before the oldest is let go, and some room. With less, Ray would spill weights to disk.
    """
    from stretto.models.lora import published_bytes

    versions = config.staleness.max + 2
    return config.plane.capacity_mib * 2**20 + versions * published_bytes(config) + 512 * 2**20


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


class Cluster:
    """All processes of one run; a context manager that leaves none behind. ``note`` is told of every step of the start,
    and, from another thread, of what happens to engines; that stays.
    """

    def __init__(self, config: Config, place: machine.Placement, note: Note):
        self.config, self.place, self.note = config, place, note
        self._begun = time.monotonic()
        self.own_ray = None if config.cluster.address else EmbeddedRay(Path(config.run.dir) / "logs")

    def __enter__(self) -> Cluster:
        try:
            self._start_ray()
            if self.config.cluster.colocate and self.place.device == "cuda":
                self.place = replace(self.place, pairs=self._pairs())
            self._step("Ray is up")
            self.engines = [create_engine(self.config, self.place, i) for i in range(self.config.rollout.replicas)]
            self.plane: RayPlane = build.plane(self.config)  # waits for its process, while the engines' come up
            self._step("the data plane is up")
            self.rollout = Rollout(self.config, self.place, self.plane, self.engines)
            self.actor = Actor(self.config, self.place, self.plane)
        except BaseException:
            self._stop_ray()
            raise
        return self

    def _start_ray(self) -> None:
        """Join ``cluster.address``, or start a Ray of our own that ends with this process."""
        os.environ.update({k: v for k, v in machine.ENVIRONMENT.items() if k not in os.environ})
        if self.own_ray is not None:
            # Ray counts a core for each process, the coordinator of the rollout side included; ours are pinned by us.
            cores = 1 + self.config.actor.data_parallel + self.config.rollout.replicas
            self.own_ray.start(cpus=max(4, cores), object_store_bytes=object_store_bytes(self.config))
            return
        with compat.ray_as_a_guest(STOPS.put_off):
            ray.init(address=self.config.cluster.address, log_to_driver=False, configure_logging=False)
        STOPS.check()

    def _pairs(self) -> Any:
        """A GPU for each rank and the engine that shares it. Ray takes the group back when the run ends."""
        pair = {"CPU": 2.0, "GPU": 1.0}
        group = placement_group([pair] * self.config.actor.data_parallel)
        return group

    def start(self) -> dict[str, Any]:
        """Wait until both sides are ready; what each has set for itself."""
        self.rollout.watch(lambda text: self.note(text, stays=True))
        rollout = self.rollout.process.start.remote()
        ranks = {rank.start.remote(): name for rank, name in zip(self.actor.ranks, self.actor.names, strict=True)}
        engines = {process.start.remote(): ENGINE for process in self.engines}
        starting = ranks | engines
        self._loaded(starting, until=ranks)
        actor = self.actor.start()
        self._loaded(starting, until=engines)
        facts = {"actor": actor, "rollout": answers([rollout], "rollout")[0]}
        self._step("the rollout side is ready")
        STOPS.check()
        return facts

    def _loaded(self, starting: dict[Any, str], *, until: Iterable[Any]) -> None:
        """Tell of each process that has loaded its model, and return once all of ``until`` have answered.

        ``starting``: calls that have not been heard of yet; those that are leave it. A rank that fails ends the run; of
        an engine the rollout process says what becomes of it.
        """
        last = set(until)
        while last & starting.keys():
            for ref in ray.wait(list(starting), num_returns=1)[0]:
                name = starting.pop(ref)
                part, world = (ENGINE, len(self.engines)) if name == ENGINE else ("actor", self.actor.world)
                if (error := failure(ref, name)) is None:
                    count = world - sum(other.startswith(part) for other in starting.values())
                    which = "" if world == 1 else f" {count} of {world}"
                    self._step(f"{part}{which} has loaded the model")
                elif part == "actor":
                    raise error

    def _step(self, text: str) -> None:
        self.note(f"{text} ({time.monotonic() - self._begun:.0f} s)")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        STOPS.phase = "ending"
        self.actor.stop_watching()
        self.rollout.stop_watching()
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
        if self.actor.death and kind is KeyboardInterrupt and not STOPS.signal:
            raise StrettoError(self.actor.death) from error

    def _stop_ray(self) -> None:
        STOPS.phase = "ending"
        if self.own_ray is not None:
            self.own_ray.stop()
        else:
            ray.shutdown()
