"""Reductions over data-parallel actor ranks.

One SUM over one flat buffer with a fixed layout: no averaging wrapper and no buckets that are rebuilt after the
first step, which would make a resumed run differ from a straight one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """This rank's place among the data-parallel ranks. ``process_group`` is None for the default group; a world of
    one needs no torch.distributed at all.
    """

    rank: int = 0
    world: int = 1
    process_group: dist.ProcessGroup | None = None


def reduce_sum(flat: Tensor, group: RankGroup) -> None:
    """Sum ``flat`` over the ranks, in place and in its own dtype; all ranks end with the same bits."""
    if group.world > 1:
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group.process_group)


def reduce_max(flat: Tensor, group: RankGroup) -> None:
    """Element-wise maximum of ``flat`` over the ranks, in place."""
    if group.world > 1:
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group.process_group)


class Statistics:
    """Named scalars of a step. Names in ``_max`` are maxima, all others sums; so they add up over microbatches in any
    split, and over ranks by one SUM and one MAX. Every rank must add the same names.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Scalars of one microbatch, on the device; nothing is synchronised."""
        for name, value in values.items():
            value = value.detach().to(torch.float64)
            if name not in self._values:
                self._values[name] = value
            elif name.endswith("_max"):
                self._values[name] = torch.maximum(self._values[name], value)
            else:
                self._values[name] = self._values[name] + value

    def reduce(self, group: RankGroup) -> dict[str, float]:
        """The values over all ranks, as Python floats."""
        sums = sorted(name for name in self._values if not name.endswith("_max"))
        maxima = sorted(name for name in self._values if name.endswith("_max"))
        result: dict[str, float] = {}
        for names, reduce in ((sums, reduce_sum), (maxima, reduce_max)):
            if names:
                flat = torch.stack([self._values[name] for name in names])
                reduce(flat, group)
                result |= dict(zip(names, flat.tolist(), strict=True))
        return result
