"""The data-parallel ranks of the actor as Ray actors, and the controller's end of them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from stretto import build, machine
from stretto.actor.checkpoint import Entries
from stretto.actor.evidence import Evidence, RankEvidence, merged, require_alike
from stretto.config import Config
from stretto.observe.fingerprint import TensorSum, add_sums, combine
from stretto.plane.protocol import Lease
from stretto.plane.ray_plane import RayPlane
from stretto.remote import answers, failure, memory_mib, settled
from stretto.stops import STOPS
from stretto.types import (
    ChunkSchedule,
    DeviceWeights,
    ForwardReport,
    GroupRecord,
    Mini,
    StrettoError,
    WeightBucket,
)

LEAVE_S = 1.0
"""How long ranks may take to say goodbye to one another before their processes are killed."""
SENDING = "weights"
"""Ray's name of the threads on which a rank sends weights while it trains."""
WATCH_S = 0.5
NOTICE_S = 2.0
"""How long a death is left to whoever waits for that rank: they say best what it did to the run."""


class ActorProcess:
    """Ray actor of one data-parallel rank."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane, rank: int):
        from stretto.actor.parallel import RankGroup

        share = place.ranks[rank]
        self.config, self.place = config, place
        self.facts = machine.settle(share.cores, config.run.determinism, share.threads)
        self.tracer = build.tracer(config, f"actor{rank}")
        self.group = RankGroup(rank=rank, world=config.actor.data_parallel)
        models = build.actor_models(config, place.device)
        self.core = build.actor_rank(config, plane.fetch, self.tracer, models, self.group)
        self.listener: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Rank 0: where the others find it."""
        from stretto.actor.rendezvous import listen

        self.listener = listen(self._own_address())
        return self._own_address(), int(self.listener.getsockname()[1])

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks; returns once all are there."""
        from stretto.actor.rendezvous import join

        join(
            self.group,
            address,
            port,
            own_address=self._own_address(),
            device=self.place.device,
            exact=self.config.run.determinism == "exact",
            listener=self.listener,
        )

    def _own_address(self) -> str:
        """Loopback, or this node's address on a cluster."""
        from stretto.actor.rendezvous import LOOPBACK

        return str(ray.util.get_node_ip_address()) if self.config.cluster.address else LOOPBACK

    def start(self) -> dict[str, Any]:
        """Answers once the model is loaded: what ``machine.settle`` set, whether forwards are alike, and the size of a
        published version.
        """
        return self.facts | {
            "no_grad_is_grad": self.core.no_grad_is_grad(),
            "published_bytes": self.core.publisher.version_bytes(),
        }

    def ping(self) -> None:
        """Answered after the calls before it, or never."""

    def weights(self) -> tuple[str, dict[str, TensorSum]]:
        """The fingerprint of all that this rank computes with, frozen parts too, and hashes of the masters that it
        owns.
        """
        from stretto.actor.others import fingerprint_of
        from stretto.observe.fingerprint import tensor_sums

        return fingerprint_of(self.core.model), tensor_sums(self.core.trainer.master.named())

    def phase1(self, chunk: ChunkSchedule, lease: Lease) -> ForwardReport:
        return self.core.phase1(chunk, lease.records, lease)

    def phase2(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        return self.core.phase2(records)

    def phase3(self, mini: Mini, normaliser: int) -> dict[str, float]:
        return self.core.phase3(mini, normaliser) | {"actor_rss_mib": memory_mib()}

    @ray.method(num_returns="streaming")  # a bucket is an object of its own, there as soon as it is copied
    def publish(self, version: int) -> Iterator[WeightBucket]:
        with self.tracer.span("actor.publish", version=version):
            yield from self.core.publisher.buckets(version)

    def snapshot(self, version: int) -> DeviceWeights:
        """As ``publish``, in this rank's device memory."""
        with self.tracer.span("actor.publish", version=version):
            return self.core.publisher.snapshot(version)

    def end_partition(self) -> RankEvidence:
        """The evidence of the partition just trained; then its samples are forgotten."""
        with self.tracer.span("actor.evidence"):
            evidence = self.core.evidence()
            self.core.end_partition()
        self.tracer.flush()
        return evidence

    def begin_save(self, step: int) -> None:
        self.core.saving.checkpointer.begin(step)

    def write_shard(self, step: int) -> Entries:
        return self.core.saving.write_shard(step)

    def commit(
        self, step: int, shards: list[Entries], published: dict[int, list[Any]], extra: Mapping[str, Any]
    ) -> None:
        kept = {version: partial(self._on_host, refs) for version, refs in published.items()}
        self.core.saving.commit(step, shards, cursor=step, policy_version=step, published=kept, extra=extra)

    def _on_host(self, refs: list[Any]) -> Iterator[WeightBucket]:
        return self.core.publisher.on_host(ray.get(refs))

    def abandon_save(self, step: int) -> None:
        self.core.saving.checkpointer.abandon(step)

    def load(self, path: Path, state: dict[str, Any]) -> None:
        self.core.saving.load(path, state)

    def leave(self) -> None:
        from stretto.actor.rendezvous import leave

        leave()


class SendingProcess(ActorProcess):
    """Of a rank that sends weights while it trains: threads beside the training one."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane, rank: int):
        super().__init__(config, place, plane, rank)
        if not config.cluster.address:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self.sender = build.sender(self.core)

    @ray.method(concurrency_group=SENDING)
    def invite(self, replica: int) -> bytes:
        return self.sender.invite(replica)

    @ray.method(concurrency_group=SENDING)
    def admit(self, replica: int, group: bytes, world: int) -> None:
        self.sender.join(replica, group, world)

    @ray.method(concurrency_group=SENDING)
    def send(self, replica: int, group: bytes, weights: DeviceWeights) -> None:
        self.sender.send(replica, group, weights)


def _remote(config: Config) -> Any:
    """The Ray actor of a rank. Without threads of its own making Ray runs everything on its main thread."""
    if config.weight_transfer != "nccl":
        return ray.remote(max_restarts=0)(ActorProcess)
    return ray.remote(max_restarts=0, concurrency_groups={SENDING: 2 * config.rollout.replicas})(SendingProcess)


class Actor:
    """The controller's end of the actor ranks."""

    def __init__(self, config: Config, place: machine.Placement, plane: RayPlane):
        self.world, self.place, self.transfer = config.actor.data_parallel, place, config.weight_transfer
        self.ranks = [
            _remote(config).options(num_cpus=1, **machine.gpu_share(place, rank)).remote(config, place, plane, rank)
            for rank in range(self.world)
        ]
        self.names = ["actor"] if self.world == 1 else [f"actor rank {rank}" for rank in range(self.world)]
        self.published_bytes = 0
        self.death = ""
        """Why the run was interrupted: a rank died while the driver waited for something else."""
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="actor-watch", daemon=True)

    def start(self) -> dict[str, Any]:
        """Wait until all ranks have loaded the model and met. What they set for themselves, and of the weights that
        training begins with, which all of them must have, two fingerprints: ``model`` of all that forwards compute
        with, ``parameters`` of what is trained.
        """
        facts: dict[str, Any] = {"device": self.place.device}
        if self.place.note:
            facts["device_note"] = self.place.note
        ranks = self._all("start")
        facts |= ranks[0] if self.world == 1 else {"ranks": ranks}
        if self.world > 1:
            (meeting,) = answers([self.ranks[0].listen.remote()], self.names[:1])
            self._all("join", *meeting)
        facts["model"], facts["parameters"] = self._weights()
        self.published_bytes = ranks[0]["published_bytes"]
        self._watcher.start()
        return facts

    def _watch(self) -> None:
        """Interrupt the run once a rank has died and nobody has noticed: the driver may wait for groups for minutes."""
        calls = {rank.ping.remote(): (rank, name) for rank, name in zip(self.ranks, self.names, strict=True)}
        while not self._closing.wait(WATCH_S):
            for ref in ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]:
                rank, name = calls.pop(ref)
                if (error := failure(ref, name)) is None:
                    calls[rank.ping.remote()] = rank, name
                elif not self._closing.wait(NOTICE_S):
                    self.death = str(error)
                    STOPS.interrupt(self.death)
                    return

    def _weights(self) -> tuple[str, str]:
        replicas, sums = zip(*self._all("weights"), strict=True)
        require_alike(replicas, "parameters")
        return replicas[0], combine(add_sums(sums))

    def forward(self, chunk: ChunkSchedule, lease: Lease) -> Callable[[], list[ForwardReport]]:
        """Start phase 1 of one chunk; ranks take chunks in the order of these calls. Returns a call that waits, and
        gives what each rank reports.
        """
        refs = [rank.phase1.remote(chunk, lease) for rank in self.ranks]
        return lambda: answers(refs, self.names)

    def advantages(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        """Phase 2: the records of the whole partition, on every rank."""
        return self._alike("phase2", records)

    def train(self, mini: Mini, normaliser: int) -> dict[str, float]:
        """Phase 3: one optimizer update. Ranks have reduced over one another, so their metrics are the same."""
        return self._alike("phase3", mini, normaliser)

    def publish(self, version: int) -> list[Any]:
        """Phase 4: references to the buckets of ``version``; returns once the actor has copied them."""
        if self.transfer != "host":
            return [ray.put(self._snapshot(version))]
        stream = self.ranks[0].publish.remote(version)
        buckets = list(stream)
        answers([stream.completed()], self.names[:1])
        return buckets

    def _snapshot(self, version: int) -> DeviceWeights:
        """A version in device memory: by CUDA IPC every engine takes that of the rank on its own GPU, by NCCL all are
        sent that of rank 0.
        """
        if self.transfer == "nccl":
            (weights,) = answers([self.ranks[0].snapshot.remote(version)], self.names[:1])
            return replace(weights, sender=self.ranks[0])
        parts: list[DeviceWeights] = self._all("snapshot", version)
        return replace(parts[0], handles={uuid: handle for part in parts for uuid, handle in part.handles.items()})

    def end_partition(self) -> Evidence:
        """Of the partition just trained; its samples are forgotten. Raises StrettoError where ranks have parted."""
        ranks: list[RankEvidence] = self._all("end_partition")
        return merged(ranks)

    def save(self, step: int, published: dict[int, list[Any]], extra: Mapping[str, Any]) -> None:
        """``extra``: plain JSON, found again in the checkpoint's state.

        Raises StrettoError where any rank could not write its part: nothing is left of it then.
        """
        first = self.ranks[0]
        answers([first.begin_save.remote(step)], self.names[:1])
        try:
            # All must have ended before a folder that they write to can be removed; none waits for another here.
            shards = settled([rank.write_shard.remote(step) for rank in self.ranks], self.names)
        except StrettoError:
            with suppress(StrettoError):  # the error that the save ended with comes first
                answers([first.abandon_save.remote(step)], self.names[:1])
            raise
        answers([first.commit.remote(step, shards, published, extra)], self.names[:1])

    def load(self, path: Path, state: dict[str, Any]) -> None:
        self._all("load", path, state)
        self._weights()

    def _all(self, method: str, *args: Any) -> list[Any]:
        return answers([getattr(rank, method).remote(*args) for rank in self.ranks], self.names)

    def _alike(self, method: str, *args: Any) -> dict[str, float]:
        """The metrics that all ranks answer with, and the memory of the one that has most."""
        metrics = self._all(method, *args)
        memory = [rank.pop("actor_rss_mib") for rank in metrics if "actor_rss_mib" in rank]
        for name in metrics[0]:
            require_alike([rank.get(name) for rank in metrics], name)
        return metrics[0] | ({"actor_rss_mib": max(memory)} if memory else {})

    def stop_watching(self) -> None:
        """To be called first of all when the run ends: a call to a Ray that has been shut down would start another."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(2 * WATCH_S)

    def kill(self) -> None:
        if self.world > 1:  # so that none complains that another has gone
            ray.wait([rank.leave.remote() for rank in self.ranks], num_returns=self.world, timeout=LEAVE_S)
        for rank in self.ranks:
            ray.kill(rank)
