"""The smallest detectable effect: published figures, the noncentral t by quadrature, and simulated campaigns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from stretto.bench.detectable import aa_exceeded, by_interval, by_rules

ALIKE = math.sqrt(2 / 1.5)
"""A/A deviation over an effect's where all cells scatter alike: variances 2 of B1 - B2, 1.5 of X - (B1 + B2) / 2."""


def power_by_quadrature(blocks: int, effect: float, level: float = 0.05) -> float:
    """P(T > t): the normal tail averaged over the quantiles of the sample deviation, sqrt(chi2 / df)."""
    df, critical = blocks - 1, stats.t.ppf(1 - level / 2, blocks - 1)
    deviation = np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, df) / df)
    return float(np.mean(stats.norm.cdf(effect * math.sqrt(blocks) - critical * deviation)))


@pytest.mark.parametrize(("blocks", "published"), [(2, 11.6), (4, 2.1)])
def test_the_published_figures(blocks, published):
    assert by_interval(blocks) == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize("blocks", [2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("level", [0.05, 0.05 / 3])
def test_the_interval_has_eighty_percent_power_there(blocks, level):
    assert power_by_quadrature(blocks, by_interval(blocks, level), level) == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_without_aa_scatter_the_interval_decides_alone(blocks):
    # Signs cost nothing below five blocks: where the interval is above 0, all blocks are nearly always.
    assert by_rules(blocks, aa_ratio=0.0) == pytest.approx(by_interval(blocks), rel=0.01)


def test_at_five_blocks_the_signs_cost_some_power_and_at_six_there_is_no_such_rule():
    # 80 % of the least of five normal deviates lie above -1.71: P(all > -x) = Phi(x)^5 = 0.8 at x = 1.710; with the
    # interval's own 1.68 both must hold, which takes a little more.
    assert 1.75 < by_rules(5, aa_ratio=0.0) < 1.90
    assert by_rules(6, aa_ratio=0.0) == pytest.approx(by_interval(6), rel=0.01)


def test_more_blocks_detect_no_smaller_effect_once_the_largest_aa_difference_decides():
    found = [by_rules(blocks, ALIKE) for blocks in (2, 3, 4, 5, 6, 8, 16)]
    assert found == pytest.approx([11.6, 3.36, 2.59, 2.52, 2.53, 2.64, 2.89], rel=0.02)
    assert by_interval(16) < 0.76


def test_one_block_detects_nothing():
    assert by_interval(1) == by_rules(1, ALIKE) == math.inf


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 6])
def test_the_chance_of_leaving_the_aa_spread_is_its_integral(blocks):
    def density(z: float) -> float:
        return 2 * stats.norm.pdf(z) * (2 * stats.norm.cdf(z * math.sqrt(0.75 / blocks)) - 1) ** blocks

    assert aa_exceeded(blocks) == pytest.approx(integrate.quad(density, 0, 10)[0], rel=1e-6)


def test_the_chance_with_one_block_by_hand():
    # |Z1 sqrt 1.5| > |Z2 sqrt 2| with a ratio Z1 / Z2 that is Cauchy: 1 - (2 / pi) atan(sqrt(2 / 1.5)) = 0.45437.
    assert aa_exceeded(1) == pytest.approx(1 - 2 / math.pi * math.atan(ALIKE), abs=1e-9)
