"""How a version's weights get from the engine's process into vLLM's workers.

vLLM's native interface is ``start_weight_update``, any number of ``update_weights``, ``finish_weight_update``; what an
update holds is up to the backend, of which one half runs in each worker (``vllm_worker.py`` registers ours). A
``Transfer`` is the other half.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from stretto.models.weight_sample import Sampled, sample
from stretto.models.weights_io import check_arrived
from stretto.rollout.engine import Weights
from stretto.types import StrettoError, WeightBucket

Update = Callable[[Mapping[str, Any]], Awaitable[None]]
"""vLLM's ``update_weights``: returns once every worker has taken it."""

ALIGNMENT = 64


class Transfer(Protocol):
    """One way for weights to travel."""

    backend: str
    """Its name in vLLM's registry."""

    def check(self, version: int, weights: Weights) -> None:
        """Raises StrettoError for weights that no engine of this model could take. Called before any is touched."""
        ...

    async def send(self, version: int, weights: Weights, update: Update) -> list[Sampled]:
        """Hand over all weights of a version; returns what a sample of them must read in the engine."""
        ...

    def close(self) -> None:
        """May be called in any state, and again."""
        ...


class HostTransfer:
    """Through host memory: one segment that every bucket is copied into in turn.

    The segment is a file of no folder, so that nothing is left of it however the engine ends. Workers open it through
    this process's entry in /proc.

    ``shapes``: the parameters of the model, by name.
    """

    backend = "stretto_host"

    def __init__(self, shapes: Mapping[str, Sequence[int]]):
        self._shapes = shapes
        self._file = -1
        self._segment: mmap.mmap | None = None

    def check(self, version: int, weights: Weights) -> None:
        # An older version has the weights that were asked for where the updates in between were skipped.
        if (held := check_arrived(weights, self._shapes)) > version:
            raise StrettoError(f"weights of version {version} were asked for, and those of version {held} came")

    async def send(self, version: int, weights: Weights, update: Update) -> list[Sampled]:
        for bucket in weights:
            await update(self._put(bucket))
        return sample(self._shapes, version, weights)

    def _put(self, bucket: WeightBucket) -> dict[str, Any]:
        """Copy a bucket into the segment; where its tensors lie there, as ``vllm_worker.HostUpdate`` has it."""
        sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in bucket.data]
        segment, at, tensors = self._room(sum(sizes)), 0, []
        for meta, array, size in zip(bucket.metas, bucket.data, sizes, strict=True):
            np.frombuffer(segment, array.dtype, array.size, at)[:] = array.reshape(-1)
            tensors.append([meta.name, meta.dtype, list(meta.shape), at])
            at += size
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": len(segment), "tensors": tensors}

    def _room(self, size: int) -> mmap.mmap:
        """A segment of at least ``size`` bytes: the one there is, or a larger one in its place."""
        if self._segment is None or len(self._segment) < size:
            self.close()
            self._file = os.memfd_create("stretto-weights")
            os.ftruncate(self._file, size)
            self._segment = mmap.mmap(self._file, size)
        return self._segment

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            os.close(self._file)
            self._segment = None
