"""Which values of a version's weights are compared after it was taken, and what they must be.

A sample of tensors, of each a vector, chosen by version and name: over a run every tensor and many parts of it have
their turn. Exact values rather than sums: what an engine holds in another layout, or spread over GPUs, can still be
compared bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stretto.models.weights_io import dtype_name, to_host
from stretto.types import TensorMeta, WeightBucket

TENSORS = 64
"""Most tensors of a sample."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One vector: tensor ``name`` itself where it has one dimension, else ``tensor.reshape(shape[0], -1)[:, column]``.

    ``values`` are its bytes in ``dtype`` (float32 or bfloat16).
    """

    name: str
    column: int
    dtype: str
    values: bytes


def chosen(shapes: Mapping[str, Sequence[int]], version: int) -> dict[str, int]:
    """Names of the sample, each with its column."""
    keys = {name: _key(name, version) for name in shapes}
    names = sorted(keys, key=lambda name: keys[name])[:TENSORS]
    return {name: keys[name] % _columns(shapes[name]) for name in names}


def _key(name: str, version: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{version} {name}".encode(), digest_size=8).digest())


def _columns(shape: Sequence[int]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64))


def sample(shapes: Mapping[str, Sequence[int]], version: int, buckets: Iterable[WeightBucket]) -> list[Sampled]:
    """The sample of a version, from its buckets."""
    columns = chosen(shapes, version)
    return [
        _sampled(meta, array, columns[meta.name])
        for bucket in buckets
        for meta, array in zip(bucket.metas, bucket.data, strict=True)
        if meta.name in columns
    ]


def sample_tensors(tensors: Mapping[str, Tensor], version: int) -> list[Sampled]:
    """The same of tensors on any device, in the dtype that weights travel in."""
    columns = chosen({name: tensor.shape for name, tensor in tensors.items()}, version)
    return [
        Sampled(
            name=name,
            column=column,
            dtype=dtype_name(tensors[name].dtype),
            values=to_host(_vector(tensors[name], column), tensors[name].dtype).tobytes(),
        )
        for name, column in columns.items()
    ]


def _vector(tensor: Tensor, column: int) -> Tensor:
    return tensor if tensor.ndim == 1 else tensor.reshape(tensor.shape[0], -1)[:, column]


def _sampled(meta: TensorMeta, array: np.ndarray, column: int) -> Sampled:
    vector = array if array.ndim == 1 else array.reshape(array.shape[0], -1)[:, column]
    return Sampled(name=meta.name, column=column, dtype=meta.dtype, values=vector.tobytes())
