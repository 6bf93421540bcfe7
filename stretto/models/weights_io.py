"""Weights as they travel: tensors to and from the host arrays of a ``WeightBucket``. Both sides use this file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stretto.types import StrettoError, TensorMeta, WeightBucket

_HOST = {torch.float32: ("float32", torch.float32), torch.bfloat16: ("bfloat16", torch.uint16)}


class Sendable(Protocol):
    """A tensor, or what becomes one when it is sent."""

    @property
    def shape(self) -> torch.Size: ...

    def numel(self) -> int: ...

    def detach(self) -> Tensor:
        """The values, without gradient."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` or ``bfloat16``, the types that weights travel in."""
    return _HOST[dtype][0]


def torch_dtype(name: str) -> torch.dtype:
    """The type of that name, see ``dtype_name``."""
    return next(kind for kind, (known, _) in _HOST.items() if known == name)


def to_host(tensor: Sendable, dtype: torch.dtype) -> np.ndarray:
    """A copy of ``tensor`` on the host, cast to ``dtype``, C-contiguous; bfloat16 as uint16 bits."""
    host = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
    return host.view(_HOST[dtype][1]).numpy()


def from_host(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor of an array made by ``to_host``. It shares the array's memory, which other processes may read too:
    never write to it.
    """
    with warnings.catch_warnings():
        # Weights come as read-only views of shared memory. A copy of gigabytes would only serve to be read once.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch_dtype(dtype))


class Arrival:
    """Checks one published version as its buckets arrive: whole, of one version, and of the shapes that are expected.

    ``shapes``: every name that the version must hold.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]):
        self._shapes = shapes
        self._seen: set[str] = set()
        self._indexes: list[int] = []
        self._version = self._count = -1

    def take(self, bucket: WeightBucket) -> None:
        """Raises StrettoError for a bucket of another version, an unknown name, or a shape that differs."""
        if not self._indexes:
            self._version, self._count = bucket.version, bucket.count
        if (bucket.version, bucket.count) != (self._version, self._count):
            raise StrettoError(
                f"weights of version {self._version} ({self._count} buckets) are mixed with bucket {bucket.index} of "
                f"version {bucket.version} ({bucket.count} buckets)"
            )
        self._indexes.append(bucket.index)
        for meta, array in zip(bucket.metas, bucket.data, strict=True):
            self._check(meta, array)
            self._seen.add(meta.name)

    def _check(self, meta: TensorMeta, array: np.ndarray) -> None:
        if meta.name not in self._shapes:
            raise StrettoError(f"published weight {meta.name!r} is not a parameter of this model")
        if meta.shard != (0, 1):
            raise StrettoError(
                f"published weight {meta.name!r} is shard {meta.shard}: only whole tensors are supported"
            )
        shape = tuple(self._shapes[meta.name])
        if tuple(array.shape) != meta.shape or meta.shape != shape:
            raise StrettoError(
                f"published weight {meta.name!r} has shape {meta.shape} (data {tuple(array.shape)}), the model "
                f"{shape}: actor and engine were built from different model configs"
            )

    def end(self) -> int:
        """The version. Raises StrettoError when a bucket is missing or doubled, or a parameter got no weights."""
        if sorted(self._indexes) != list(range(self._count)):
            raise StrettoError(
                f"weights of version {self._version}: got buckets {sorted(self._indexes)} of {self._count}"
            )
        absent = sorted(self._shapes.keys() - self._seen)
        if absent:
            raise StrettoError(
                f"weights of version {self._version} lack {len(absent)} parameters, the first is {absent[0]!r}"
            )
        return self._version


def check_arrived(buckets: Iterable[WeightBucket], shapes: Mapping[str, Sequence[int]]) -> int:
    """The version that ``buckets`` are, all of it. Raises StrettoError as ``Arrival`` does."""
    arrival = Arrival(shapes)
    for bucket in buckets:
        arrival.take(bucket)
    return arrival.end()


@torch.no_grad()
def load_buckets(model: nn.Module, buckets: Iterable[WeightBucket]) -> int:
    """Copy one published version into the model's parameters, in place (tied ones through the name they have as a
    parameter), and return its version.

    A version holds exactly the parameters that require a gradient: all of a plain model, and of a model with adapters
    those alone, since nothing else of it ever changes.

    Raises StrettoError as ``Arrival`` does; the model may then hold some of the new weights.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arrival = Arrival({name: p.shape for name, p in parameters.items()})
    for bucket in buckets:
        arrival.take(bucket)
        for meta, array in zip(bucket.metas, bucket.data, strict=True):
            parameters[meta.name].copy_(from_host(array, meta.dtype))
    return arrival.end()
