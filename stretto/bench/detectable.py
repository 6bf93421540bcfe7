"""The smallest effect that a design could have detected, so that `inconclusive` is not read as `no effect`."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import nctdtrinc, stdtrit

from stretto.bench.arithmetic import LEVEL, SIGNS_BELOW

POWER = 0.8
DRAWS = 20_000


def by_interval(blocks: int, level: float = LEVEL) -> float:
    """The effect, in standard deviations between blocks, whose two-sided t interval lies above 0 with 80 % power: the
    solution d of P(T > t) = 0.8 for the noncentral T with n - 1 degrees of freedom and noncentrality d sqrt(n).

    11.55 with 2 blocks, 3.26, 2.13 with 4, 1.43 with 6, 1.16 with 8; infinite with one. ``level`` / m is that of the
    first of m contrasts by Holm.
    """
    if blocks < 2:
        return math.inf
    critical = stdtrit(blocks - 1, 1 - level / 2)
    return float(nctdtrinc(blocks - 1, 1 - POWER, critical)) / math.sqrt(blocks)


def by_rules(blocks: int, aa_ratio: float, level: float = LEVEL) -> float:
    """The same under every rule of ``stretto.bench.arithmetic.judge``: interval, signs and A/A pairs.

    ``aa_ratio`` is the deviation of A/A log-ratios (root mean square) in deviations between blocks of the effect. Where
    cells scatter independently and alike it is sqrt(2 / 1.5) = 1.155 for an effect over B, and the answers are 11.6
    with 2 blocks, 3.4, 2.6 with 4, 2.5 with 6, 2.6 with 8, 2.9 with 16: of more A/A differences the largest is larger,
    so that beyond 5 blocks more of them detect no smaller effect.

    Of ``DRAWS`` normal campaigns (one fixed seed) each has a least effect at which it is `supported`, for each rule
    holds from some effect on; the answer is the effect that 80 % of them have passed, to about 1 %.
    """
    if blocks < 2:
        return math.inf
    rng = np.random.default_rng(0)
    noise, aa = rng.standard_normal((2, DRAWS, blocks))
    mean, error = noise.mean(1), noise.std(1, ddof=1) / math.sqrt(blocks)
    least = np.maximum(stdtrit(blocks - 1, 1 - level / 2) * error, aa_ratio * np.abs(aa).max(1)) - mean
    if blocks < SIGNS_BELOW:
        least = np.maximum(least, -noise.min(1))
    return float(np.quantile(least, POWER))


def aa_exceeded(blocks: int) -> float:
    """The chance that without an effect the mean over blocks of condition less block baseline lies outside the largest
    A/A difference, in either direction, where cells scatter independently, alike and normally.

    45 % with 1 block, 17.6 % with 2, 6.7 % with 3, 2.5 % with 4, 0.4 % with 6. The mean has variance 1.5 / n and each
    A/A difference 2, independently: the integral over z of 2 phi(z) (2 Phi(z sqrt(0.75 / n)) - 1)^n.
    """
    z, weight = np.polynomial.legendre.leggauss(64)
    z, weight = 5 * (z + 1), 5 * weight  # from 0 to 10
    inside = np.array([math.erf(value * math.sqrt(0.75 / blocks / 2)) for value in z])
    return float(np.sum(weight * math.sqrt(2 / math.pi) * np.exp(-(z**2) / 2) * inside**blocks))
