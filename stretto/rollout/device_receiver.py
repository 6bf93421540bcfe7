"""The workers' half of ``device_transfer``, without vLLM: a version's tensors, on the GPU of this process."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.models.device_io import JOIN_S, SEND_S, Communicator, open_ipc, pieces, stamp, view
from stretto.types import DeviceWeights, StrettoError


class Receiver:
    """``rank`` counts the workers of the engine from 0."""

    def __init__(self, device: torch.device, rank: int):
        self.device, self.rank = device, rank
        self._group: Communicator | None = None
        self._opened: dict[bytes, Tensor] = {}
        self._read: tuple[Tensor, DeviceWeights] | None = None

    def join(self, group: bytes, world: int) -> None:
        """Become a member of the sender's group, of ``world`` with the sender. Returns once all are there."""
        self._group = Communicator(group, self.rank + 1, world, self.device)
        self._group.settle(time.monotonic() + JOIN_S)

    def receive(self, sent: bytes) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors of a version, a few at a time. By CUDA IPC they are the actor's own: never write to them, and
        call ``verify`` once they have been copied.
        """
        weights: DeviceWeights = pickle.loads(sent)
        self._read = None
        if weights.handles:
            yield self._open(weights)
            return
        if self._group is None:
            raise StrettoError("the weights were to be sent by NCCL before this engine had joined the sender")
        stream, deadline = torch.cuda.current_stream(self.device), time.monotonic() + SEND_S
        for begin, end, tensors in pieces(weights):
            piece = torch.empty(end - begin, dtype=torch.uint8, device=self.device)
            self._group.broadcast(piece, 0, stream, deadline)
            yield [(weights.metas[i].name, view(piece, weights.metas[i], weights.offsets[i] - begin)) for i in tensors]

    def _open(self, weights: DeviceWeights) -> list[tuple[str, Tensor]]:
        key = next(iter(weights.handles.values()))
        if key not in self._opened:  # the actor makes its few buffers once
            self._opened[key] = open_ipc(weights.handles, self.device)
        self._read = self._opened[key], weights
        return [(m.name, view(self._opened[key], m, at)) for m, at in zip(weights.metas, weights.offsets, strict=True)]

    def verify(self) -> None:
        """Raises StrettoError where the buffer was written again while it was read."""
        if self._read is None:
            return
        buffer, weights = self._read
        if int(stamp(buffer, weights.size)) != weights.serial:
            raise StrettoError(
                f"the weights of version {weights.version} are no longer held by the actor: newer versions were "
                "published before this engine could take them; resume from the last checkpoint"
            )

    def close(self) -> None:
        self._opened.clear()
        self._read = None
        if self._group is not None:
            self._group.abort()
