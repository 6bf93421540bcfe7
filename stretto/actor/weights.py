"""Weights on their way out of the actor (buckets), and the weight tags that it keeps in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.models.weights_io import Sendable, dtype_name, to_host
from stretto.types import StrettoError, TensorMeta, WeightBucket

BUCKET_BYTES = 64 * 2**20
Tag = Literal["actor", "ref", "old_actor", "teacher"]


def iter_buckets(
    tensors: Mapping[str, Sendable], version: int, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Buckets of at most ``bucket_bytes`` (one larger tensor is a bucket of its own), tensors sorted by name.

    ``tensors``: parameter name -> tensor, tied ones once (``models.lora.published``). Each bucket is a copy, made when
    it is asked for: memory beyond the model is one bucket, not a state dict.
    """
    plan: list[list[str]] = []
    filled = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * dtype.itemsize
        if not plan or filled + size > bucket_bytes:
            plan.append([])
            filled = 0
        plan[-1].append(name)
        filled += size
    for index, names in enumerate(plan):
        yield WeightBucket(
            version=version,
            index=index,
            count=len(plan),
            metas=tuple(TensorMeta(name=n, dtype=dtype_name(dtype), shape=tuple(tensors[n].shape)) for n in names),
            data=tuple(to_host(tensors[n], dtype) for n in names),
        )


class WeightTags:
    """Named sets of the trainable weights of one module, of which one is resident in it and the others lie in host
    memory; what is frozen is the same in all of them.

    The actor's own weights are resident outside ``active``. Optimizer and gradients are not touched: a forward without
    gradient is all that another tag is for.
    """

    def __init__(self, model: nn.Module):
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._host: dict[Tag, dict[str, Tensor]] = {}
        self.resident: Tag = "actor"

    def save(self, tag: Tag) -> None:
        """Keep a copy of the resident weights in host memory as ``tag``, over an earlier one."""
        self._host[tag] = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    def kept(self, tag: Tag) -> dict[str, Tensor]:
        """The weights of ``tag`` in host memory, not copied. Raises StrettoError for a tag that was never saved."""
        if tag not in self._host:
            raise StrettoError(f"weight tag {tag!r} was never saved; saved are {sorted(self._host)}")
        return self._host[tag]

    def restore(self, tag: Tag, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Set ``tag`` from tensors on the host that together hold every name, in the form of ``kept``."""
        self._host[tag] = {name: tensor for part in parts for name, tensor in part.items()}

    @contextmanager
    def active(self, tag: Tag) -> Iterator[None]:
        """Inside, the module holds the weights of ``tag``; afterwards those that it held before, bit for bit.

        Nothing is copied where ``tag`` is resident already. Raises StrettoError for a tag that was never saved.
        """
        if tag == self.resident:
            yield
            return
        self.kept(tag)
        before = self.resident
        self.save(before)
        self._load(tag)
        try:
            yield
        finally:
            self._load(before)

    @torch.no_grad()
    def _load(self, tag: Tag) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._host[tag][name])
        self.resident = tag
