"""What leaves a rank as a policy version: host buckets, or a snapshot in the memory of its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from stretto.actor.device_weights import Snapshots
from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.models.loading import DTYPES
from stretto.models.lora import published
from stretto.types import DeviceWeights, WeightBucket


class Publisher:
    """Copies the weights of ``model`` as engines take them, in their dtype (``model.dtype``)."""

    def __init__(self, config: Config, model: nn.Module):
        self.config, self.model, self.dtype = config, model, DTYPES[config.model.dtype]
        self.snapshots = Snapshots(config.staleness.max + 1, self.dtype)

    def buckets(self, version: int) -> Iterator[WeightBucket]:
        """The weights as policy version ``version``, on the host."""
        return iter_buckets(published(self.model, self.config), version, self.dtype)

    def snapshot(self, version: int) -> DeviceWeights:
        """The same in a buffer on this rank's device, with a handle for engines that share its GPU by CUDA IPC."""
        shared = self.config.weight_transfer == "ipc"
        return self.snapshots.take(published(self.model, self.config), version, shared=shared)

    def on_host(self, parts: Iterable[WeightBucket | DeviceWeights]) -> Iterator[WeightBucket]:
        """What was published before, as host buckets. Raises WeightsLost where a snapshot is no longer held."""
        for part in parts:
            if isinstance(part, DeviceWeights):
                yield from self.snapshots.buckets(part)
            else:
                yield part

    def version_bytes(self) -> int:
        """Of all tensors of a version."""
        return sum(tensor.numel() for tensor in published(self.model, self.config).values()) * self.dtype.itemsize
