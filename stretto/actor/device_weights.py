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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.actor.weights import BUCKET_BYTES, iter_buckets
from stretto.models.device_io import STAMP, Communicator, gpu_uuid, ipc_handle, layout, pieces, stamp, unique_id, view
from stretto.models.weight_sample import sample_tensors
from stretto.models.weights_io import Sendable, dtype_name
from stretto.types import DeviceWeights, StrettoError, TensorMeta, WeightBucket, WeightsLost

SEND_S = 120.0
"""How long one version may take to be sent before its receiver is given up; a snapshot that is being sent is not
written to meanwhile."""
POLL_S = 0.0005


@dataclass(eq=False)
class _Slot:
    buffer: Tensor
    handles: Mapping[str, bytes]
    weights: DeviceWeights | None = None
    reading: threading.Lock = field(default_factory=threading.Lock)


class Snapshots:
    """The newest versions of the published weights, ``kept`` of them for certain.

    There is one buffer more, for the version that is published while engines may still read the oldest. Buffers are
    made once and written over, never freed: their handles stay good.
    """

    def __init__(self, kept: int, dtype: torch.dtype):
        self.kept, self.dtype = kept, dtype
        self._slots: list[_Slot] = []
        self._serial = 0

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Sendable], version: int, *, shared: bool = False) -> DeviceWeights:
        """Copy ``tensors`` (name -> tensor, tied ones once) in the engine's dtype; ``shared``: with a handle for other
        processes. Returns once the copy is complete.
        """
        names = sorted(tensors)
        metas = tuple(TensorMeta(name=n, dtype=dtype_name(self.dtype), shape=tuple(tensors[n].shape)) for n in names)
        offsets, size = layout([tensors[name].numel() * self.dtype.itemsize for name in names])
        device = tensors[names[0]].detach().device
        self._serial += 1
        slot = self._free(size, device, shared)
        with slot.reading:
            mark = stamp(slot.buffer, size)
            mark.fill_(-1)  # before the first byte changes: who reads meanwhile finds out
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
        """The buffer of a version, not written to in the body. Raises WeightsLost where it is no longer held."""
        for slot in self._slots:
            if slot.weights is not None and slot.weights.serial == weights.serial:
                with slot.reading:
                    if slot.weights.serial == weights.serial:
                        yield slot.buffer
                        return
        raise WeightsLost(
            f"the weights of version {weights.version} are no longer held: {self.kept} newer versions have been "
            "published since; resume from the last checkpoint"
        )

    def buckets(self, weights: DeviceWeights, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
        """A version as host buckets, the ones that ``weights.iter_buckets`` would have made of it."""
        with self.reading(weights) as buffer:
            tensors = {m.name: view(buffer, m, at) for m, at in zip(weights.metas, weights.offsets, strict=True)}
            yield from iter_buckets(tensors, weights.version, self.dtype, bucket_bytes)


class Sender:
    """Sends snapshots by NCCL, in one group an engine replica; its calls come from threads beside the training one.

    An engine that comes back joins a new group, and its predecessor's is given up.
    """

    def __init__(self, snapshots: Snapshots, device: torch.device):
        self._snapshots, self._device = snapshots, device
        self._stream: Any = None
        self._ids: dict[int, bytes] = {}
        self._groups: dict[int, Communicator] = {}
        self._lock = threading.Lock()

    def invite(self, replica: int) -> bytes:
        """A new group for ``replica``: what its workers need to join it, as ranks 1, 2, …"""
        with self._lock:
            self._ids[replica] = unique_id()
            before = self._groups.pop(replica, None)
        if before is not None:
            before.abort()
        return self._ids[replica]

    def join(self, replica: int, world: int) -> None:
        """Returns once the workers of ``replica`` have joined the group that it was invited to."""
        group = self._ids[replica]
        made = Communicator(group, 0, world, self._device)
        with self._lock:
            if self._ids[replica] == group:
                self._groups[replica] = made
                return
        made.abort()
        raise StrettoError(f"rollout engine {replica} was replaced while it joined")

    def send(self, replica: int, weights: DeviceWeights) -> None:
        """Returns once ``replica`` has the version. Raises StrettoError where it has not within ``SEND_S``."""
        group = self._groups[replica]
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with self._snapshots.reading(weights) as buffer, torch.cuda.device(self._device):
            for begin, end, _ in pieces(weights):
                group.broadcast(buffer[begin:end], 0, self._stream)
            done = self._stream.record_event()
            deadline = time.monotonic() + SEND_S
            while not done.query():
                if time.monotonic() > deadline or self._groups.get(replica) is not group:
                    group.abort()
                    raise StrettoError(f"rollout engine {replica} did not take the weights that it asked for")
                time.sleep(POLL_S)
