"""Moving-block bootstrap of the steps within runs: consecutive steps resemble one another, so they are drawn in blocks.

Here a *stretch* is what the literature calls a block: a few consecutive steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stretto.bench.plan import Window

DRAWS = 2000
SEED = 0
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The measured steps of one run, those of all its windows one after another.

    tokens   float [steps]
    seconds  float [steps]
    """

    tokens: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PairedSteps:
    """Of one block of a campaign: the run of a condition, and the runs of what it is compared with (both B)."""

    treated: Steps
    base: tuple[Steps, ...]


def stretch_length(steps: int) -> int:
    """Steps of a stretch: the cube root of the run's, rounded (Hall, Horowitz and Jing 1995, Biometrika 82:561, for
    variances); 3 of 40.
    """
    return max(1, round(steps ** (1 / 3)))


def moving_stretches(windows: Sequence[Window], draws: int, rng: np.random.Generator) -> np.ndarray:
    """Indices [draws, steps] into the measured steps of a run: each row is as long as the run, made of stretches
    (Kuensch 1989, Ann. Stat. 17:1217). No stretch crosses from one window into the next.
    """
    sizes = [window.updates for window in windows]
    length = min(stretch_length(sum(sizes)), *sizes)
    ends = np.cumsum(sizes)
    starts = np.concatenate([np.arange(end - size, end - length + 1) for end, size in zip(ends, sizes, strict=True)])
    chosen = rng.choice(starts, size=(draws, math.ceil(ends[-1] / length)))
    return (chosen[:, :, None] + np.arange(length)).reshape(draws, -1)[:, : ends[-1]]


def within_runs(blocks: Sequence[PairedSteps], windows: Sequence[Window], draws: int = DRAWS) -> tuple[float, float]:
    """The 2.5 % and 97.5 % points of the mean log-ratio of throughputs when the steps within each run are drawn anew.

    It shows how steady the steps were. It knows nothing of how runs differ, is mostly far narrower than the interval
    over blocks, and decides nothing. ``windows`` are those of every run. The same steps give the same interval.
    """
    rng = np.random.default_rng(SEED)

    def log_throughput(steps: Steps) -> np.ndarray:
        drawn = moving_stretches(windows, draws, rng)
        return np.log(steps.tokens[drawn].sum(1) / steps.seconds[drawn].sum(1))

    effects = [
        log_throughput(block.treated) - np.mean([log_throughput(steps) for steps in block.base], axis=0)
        for block in blocks
    ]
    low, high = np.quantile(np.mean(effects, axis=0), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)
