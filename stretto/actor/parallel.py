"""Collectives over data-parallel actor ranks, and which rank owns which parameter.

Gradients are one SUM over one flat buffer with a fixed layout: no averaging wrapper and no buckets that are rebuilt
after the first step, which would make a resumed run differ from a straight one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.types import CollectiveError, StrettoError

BROADCAST_BYTES = 256 * 2**20
"""Parameters are broadcast in runs of about this size: few calls, and little memory beyond the model."""


@dataclass(frozen=True)
class RankGroup:
    """This rank's place among the data-parallel ranks. ``process_group`` is None for the default group; a world of
    one needs no torch.distributed at all.
    """

    rank: int = 0
    world: int = 1
    process_group: dist.ProcessGroup | None = None

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Raises CollectiveError, naming this rank, where the siblings do not answer in the body."""
        begun = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what every backend of torch.distributed raises, time-outs included
            raise CollectiveError(
                f"actor rank {self.rank} of {self.world} could not finish {what} with the other ranks "
                f"({time.monotonic() - begun:.1f} s): {_said(error)}; resume from the last "
                "checkpoint"
            ) from error


def _said(error: RuntimeError) -> str:
    """The first line of a backend's error, without the source file that it names."""
    return re.sub(r"^\[[^]]*:\d+\] ", "", (str(error).strip() or type(error).__name__).splitlines()[0])


def reduce_sum(flat: Tensor, group: RankGroup, what: str) -> None:
    """Sum ``flat`` over the ranks, in place and in its own dtype; all ranks end with the same bits."""
    if group.world > 1:
        with group.collective(what):
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group.process_group)


def reduce_max(flat: Tensor, group: RankGroup, what: str) -> None:
    """Element-wise maximum of ``flat`` over the ranks, in place."""
    if group.world > 1:
        with group.collective(what):
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group.process_group)


def owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The rank that owns each parameter, given elements by name: the largest first (equal ones by name), each to the
    rank that has the fewest elements so far (equal ones to the lowest). A pure function, the same on every rank.

    Raises:
        StrettoError: there are fewer parameters than ranks.
    """
    if len(sizes) < world:
        raise StrettoError(
            f"actor.data_parallel = {world}: the model has {len(sizes)} trainable parameters, and every rank owns at "
            "least one; lower it"
        )
    load = [0] * world
    result: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        result[name] = rank
        load[rank] += max(sizes[name], 1)
    return result


@torch.no_grad()
def broadcast_from_owners(
    parameters: Mapping[str, Tensor],
    owner: Mapping[str, int],
    group: RankGroup,
    run_bytes: int = BROADCAST_BYTES,
) -> None:
    """Give every rank the owner's bits of each parameter, flattened into runs of about ``run_bytes``."""
    if group.world == 1:
        return
    for rank in range(group.world):
        names = sorted(name for name in parameters if owner[name] == rank)
        for run in _runs([parameters[name].detach() for name in names], run_bytes):
            # As bytes: bits travel whatever the dtype, also those that a backend has no arithmetic for.
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in run])
            with group.collective(f"the broadcast of rank {rank}'s parameters"):
                dist.broadcast(flat, group_src=rank, group=group.process_group)
            if rank != group.rank:
                for tensor, part in zip(run, flat.split([t.nbytes for t in run]), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _runs(tensors: Sequence[Tensor], run_bytes: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, of at most ``run_bytes`` together; a larger one is a run of its own."""
    run: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if run and (filled + tensor.nbytes > run_bytes or tensor.dtype != run[0].dtype):
            yield run
            run, filled = [], 0
        run.append(tensor)
        filled += tensor.nbytes
    if run:
        yield run


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
        for names, reduce, what in ((sums, reduce_sum, "sum"), (maxima, reduce_max, "maximum")):
            if names:
                flat = torch.stack([self._values[name] for name in names])
                reduce(flat, group, f"the {what} of statistics")
                result |= dict(zip(names, flat.tolist(), strict=True))
        return result
