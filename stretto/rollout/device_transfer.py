"""The leading half of transfers that never leave GPU memory, for ``rollout.weight_transfer`` "ipc" and "nccl"."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stretto.models.weight_sample import Sampled
from stretto.models.weights_io import Arrival
from stretto.rollout.engine import Weights
from stretto.rollout.vllm_transfer import HostTransfer, Update
from stretto.types import DeviceWeights, WeightBucket


class DeviceTransfer(HostTransfer):
    """Has the workers open the actor's buffer (CUDA IPC), or take it from a sender (NCCL), whose group they join when
    it first sends. The versions that a resumed run begins with come from its checkpoint, through host memory.

    ``workers``: of this engine.
    """

    backend = "stretto_device"

    def __init__(self, shapes: Mapping[str, Sequence[int]], workers: int):
        super().__init__(shapes)
        self._workers = workers
        self._group = b""
        """Of a sender, once the workers have joined it."""

    def check(self, version: int, weights: Weights) -> None:
        if device := _on_device(weights):
            shapes_alone = tuple(np.broadcast_to(np.uint8(0), meta.shape) for meta in device.metas)
            arrival = Arrival(self._shapes)
            arrival.take(WeightBucket(version=device.version, index=0, count=1, metas=device.metas, data=shapes_alone))
            arrival.end()
        else:
            super().check(version, weights)

    async def send(self, version: int, weights: Weights, update: Update) -> list[Sampled]:
        device = _on_device(weights)
        if device is None:
            return await super().send(version, weights, update)
        sender, sent = device.sender, {"sent": pickle.dumps(replace(device, sender=None))}
        if sender is None:
            await update(sent)
            return list(device.sample)
        if not self._group:
            group, world = await sender.invite(), 1 + self._workers
            await asyncio.gather(sender.admit(group, world), update({"group": group, "world": world}))
            self._group = group
        await asyncio.gather(sender.send(self._group), update(sent))
        return list(device.sample)


def _on_device(weights: Weights) -> DeviceWeights | None:
    return weights[0] if len(weights) == 1 and isinstance(weights[0], DeviceWeights) else None
