"""Campaigns with known effects, for the tests of ``stretto.bench``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stretto.bench.arithmetic import BlockValues
from stretto.bench.resample import Steps

CELL = 0.03
"""Standard deviation of a cell's log throughput."""


def campaign(
    rng: np.random.Generator,
    effects: Mapping[str, float],
    blocks: int,
    cold: float = 0.0,
    degrees: float | None = None,
) -> list[BlockValues]:
    """Blocks of B, the conditions of ``effects`` (log-ratios over B), B; each block is its own machine and seed.

    ``cold``: log-ratio by which the first cell of each block is slower; ``degrees``: of t noise in place of normal.
    """
    found = []
    for _ in range(blocks):
        shared = 7 + 0.15 * rng.standard_normal()
        noise = rng.standard_normal(2 + len(effects)) if degrees is None else rng.standard_t(degrees, 2 + len(effects))
        first, last, *others = np.exp(shared + CELL * noise + np.array([-cold, 0.0, *effects.values()]))
        found.append(BlockValues(baseline=(first, last), others=dict(zip(effects, others, strict=True))))
    return found


def steps(rng: np.random.Generator, updates: int, seconds: float = 1.0, within: float = 0.1) -> Steps:
    """Steps of a run whose seconds scatter by the share ``within``, each like the one before to some degree."""
    noise = np.empty(updates)
    noise[0] = rng.standard_normal()
    for update in range(1, updates):
        noise[update] = 0.4 * noise[update - 1] + np.sqrt(1 - 0.4**2) * rng.standard_normal()
    return Steps(tokens=np.full(updates, 1000.0), seconds=seconds * np.exp(within * noise))
