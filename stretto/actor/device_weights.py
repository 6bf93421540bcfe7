"""Published versions in GPU memory: engines open them (CUDA IPC) or are sent them (NCCL) while training goes on.

publish(v) ─► snapshot: one copy on the device, one buffer a version ─► DeviceWeights (metadata, handles)
                    ▲                       ▲
engine on this GPU ─┘ opens the buffer      └─ sender thread ─ NCCL ─► engine elsewhere, which asked for v
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.actor.weights import BUCKET_BYTES, iter_buckets
from stretto.models.device_io import (
    JOIN_S,
    SEND_S,
    STAMP,
    Communicator,
    gpu_uuid,
    ipc_handle,
    layout,
    pieces,
    stamp,
    unique_id,
    view,
)
from stretto.models.weight_sample import sample_tensors
from stretto.models.weights_io import Sendable, dtype_name
from stretto.types import DeviceWeights, StrettoError, TensorMeta, WeightBucket, WeightsLost


@dataclass(eq=False)
class _Slot:
    buffer: Tensor
    handles: Mapping[str, bytes]
    weights: DeviceWeights | None = None
    readers: int = 0


class Snapshots:
    """The newest versions of the published weights, ``kept`` of them for certain.

    There is one buffer more, for the version that is published while engines may still read the oldest. Buffers are
    made once and written over, never freed: their handles stay good.
    """

    def __init__(self, kept: int, dtype: torch.dtype):
        self.kept, self.dtype = kept, dtype
        self._slots: list[_Slot] = []
        self._serial = 0
        self._readers_change = threading.Condition()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Sendable], version: int, *, shared: bool = False) -> DeviceWeights:
        """Copy ``tensors`` (name -> tensor, tied ones once) in the engine's dtype; ``shared``: with a handle for other
        processes. Returns once the copy is complete; waits for those who read the version that it is written over.
        """
        names = sorted(tensors)
        metas = tuple(TensorMeta(name=n, dtype=dtype_name(self.dtype), shape=tuple(tensors[n].shape)) for n in names)
        offsets, size = layout([tensors[name].numel() * self.dtype.itemsize for name in names])
        device = tensors[names[0]].detach().device
        self._serial += 1
        slot = self._free(size, device, shared)
        with self._readers_change:
            slot.weights = None  # nobody begins to read it any more
            self._readers_change.wait_for(lambda: slot.readers == 0)
        mark = stamp(slot.buffer, size)
        mark.fill_(-1)  # before the first byte changes: another process that reads meanwhile finds out
        for name, meta, offset in zip(names, metas, offsets, strict=True):
            view(slot.buffer, meta, offset).copy_(tensors[name].detach())
        mark.fill_(self._serial)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        held = {m.name: view(slot.buffer, m, at) for m, at in zip(metas, offsets, strict=True)}
        slot.weights = DeviceWeights(
            version=version,
            serial=self._serial,
            metas=metas,
            offsets=offsets,
            size=size,
            sample=tuple(sample_tensors(held, version)),
            handles=slot.handles,
        )
        return slot.weights

    def _free(self, size: int, device: torch.device, shared: bool) -> _Slot:
        """A buffer that no version needs any more, a new one while there are fewer than ``kept`` + 1."""
        if len(self._slots) <= self.kept:
            buffer = torch.zeros(size + STAMP, dtype=torch.uint8, device=device)
            self._slots.append(_Slot(buffer, {gpu_uuid(device): ipc_handle(buffer)} if shared else {}))
            return self._slots[-1]
        return min(self._slots, key=lambda slot: slot.weights.serial if slot.weights else 0)

    @contextmanager
    def reading(self, weights: DeviceWeights) -> Iterator[Tensor]:
        """The buffer of a version, not written to in the body; any number may read one. Raises WeightsLost where it is
        no longer held.
        """
        with self._readers_change:
            held = [s for s in self._slots if s.weights is not None and s.weights.serial == weights.serial]
            if not held:
                raise WeightsLost(
                    f"the weights of version {weights.version} are no longer held: {self.kept} newer versions have "
                    "been published since; resume from the last checkpoint"
                )
            held[0].readers += 1
        try:
            yield held[0].buffer
        finally:
            with self._readers_change:
                held[0].readers -= 1
                self._readers_change.notify_all()

    def buckets(self, weights: DeviceWeights, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
        """A version as host buckets, the ones that ``weights.iter_buckets`` would have made of it."""
        with self.reading(weights) as buffer:
            tensors = {m.name: view(buffer, m, at) for m, at in zip(weights.metas, weights.offsets, strict=True)}
            yield from iter_buckets(tensors, weights.version, self.dtype, bucket_bytes)


@dataclass(eq=False)
class _Group:
    """What a replica was invited to, and once it joins, the actor's membership with a stream for it alone: kernels that
    wait for one receiver hold up nobody else's."""

    id: bytes
    member: Communicator | None = None
    stream: Any = None


class Sender:
    """Sends snapshots by NCCL, in one group an engine replica; its calls come from threads beside the training one.

    An engine that comes back is invited to a new group, and its predecessor's is given up, whatever it waits for.
    """

    def __init__(self, snapshots: Snapshots, device: torch.device):
        self._snapshots, self._device = snapshots, device
        self._groups: dict[int, _Group] = {}
        self._lock = threading.Lock()

    def invite(self, replica: int) -> bytes:
        """A new group for ``replica``: what its workers need to join it, as ranks 1, 2, …"""
        group = unique_id()
        with self._lock:
            before, self._groups[replica] = self._groups.get(replica), _Group(group)
        if before is not None and before.member is not None:
            before.member.abort()
        return group

    def join(self, replica: int, group: bytes, world: int) -> None:
        """Returns once the workers of ``replica`` have joined ``group``, of ``world`` with this process. Raises
        StrettoError where they have not within ``JOIN_S``, and at once where the replica was invited anew.
        """
        with self._lock:
            found = self._current(replica, group)
            found.member = member = Communicator(group, 0, world, self._device)
            found.stream = torch.cuda.Stream(self._device)
        try:
            member.settle(time.monotonic() + JOIN_S)
        except StrettoError as error:
            raise StrettoError(f"rollout engine {replica} did not join the actor: {error}") from None

    def send(self, replica: int, group: bytes, weights: DeviceWeights) -> None:
        """Returns once the workers that joined ``group`` have the version. Raises as ``join``, with ``SEND_S``."""
        with self._lock:
            found = self._current(replica, group)
        member, stream, deadline = found.member, found.stream, time.monotonic() + SEND_S
        assert member is not None
        with self._snapshots.reading(weights) as buffer, torch.cuda.device(self._device):
            try:
                for begin, end, _ in pieces(weights):
                    member.broadcast(buffer[begin:end], 0, stream, deadline)
                member.settle(deadline, stream.record_event().query)
            except StrettoError as error:
                raise StrettoError(
                    f"rollout engine {replica} did not take the weights that it asked for: {error}"
                ) from None

    def _current(self, replica: int, group: bytes) -> _Group:
        found = self._groups[replica]
        if found.id != group:
            raise StrettoError(f"rollout engine {replica} was replaced")
        return found
