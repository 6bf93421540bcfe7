"""Which rows a partition trains on: a pure function of the partition's number, which therefore *is* the data cursor.

Partition k holds the positions ``k * prompts .. (k + 1) * prompts - 1`` of an endless sequence of epochs. Each epoch
has every row exactly once, in an order of its own; a partition may straddle two epochs. Under dynamic sampling a
partition takes more of them, and the position that the next one starts at is the cursor.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=8)
def permutation(length: int, stream: int, index: int) -> np.ndarray:
    """A permutation of ``range(length)``, int64 [length], read-only, fixed for ever by its three arguments.

    Made from the raw output of Philox under the key (``stream``, ``index``): numpy guarantees that raw output across
    versions and machines, which it does not for ``Generator.permutation``.
    """
    noise = np.random.Philox(key=np.array([stream, index], dtype=np.uint64)).random_raw(length)
    order = np.argsort(noise, kind="stable")
    order.flags.writeable = False
    return order


def row_at(position: int, length: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """``(epoch, row)`` at a position of the sequence, of a source with ``length`` rows. Without ``shuffle`` every epoch
    is in row order.
    """
    epoch, offset = divmod(position, length)
    return epoch, int(permutation(length, seed, epoch)[offset]) if shuffle else offset


def rows_of_partition(
    k: int, prompts_per_partition: int, length: int, seed: int, shuffle: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompts of partition ``k``, one entry per group, in group order.

    Returns ``(epochs, rows)``: group g shows row ``rows[g]`` of the source, which has ``length`` rows, as part of epoch
    ``epochs[g]``.

    Example: 10 rows, 4 prompts, no shuffle; partition 2 is ``((0, 0, 1, 1), (8, 9, 0, 1))``.

    Raises:
        ValueError: ``length`` or ``prompts_per_partition`` below 1, or negative ``k``.
    """
    if length < 1 or prompts_per_partition < 1 or k < 0:
        raise ValueError(f"no partition {k} of {prompts_per_partition} prompts from a source of {length} rows")
    first = k * prompts_per_partition
    places = [row_at(first + group, length, seed, shuffle) for group in range(prompts_per_partition)]
    return tuple(epoch for epoch, _ in places), tuple(row for _, row in places)
