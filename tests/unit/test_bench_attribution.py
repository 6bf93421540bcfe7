"""Factorial effects and sequential increments, by hand and against least squares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.bench.arithmetic import BlockValues
from stretto.bench.attribution import factorial, factorials, increments


def block(b: float, **logs: float) -> BlockValues:
    """``b`` and the conditions as logs; P_R is P+R."""
    others = {name.replace("_", "+"): math.exp(value) for name, value in logs.items()}
    return BlockValues(baseline=(math.exp(b), math.exp(b)), others=others)


def test_effects_and_shares_by_hand():
    # b 0, P 0.10, R 0.20, P+R 0.36. P: (0.10 + 0.16) / 2 = 0.13; R: (0.20 + 0.26) / 2 = 0.23; together 0.36 = total.
    # Interaction: 0.36 - 0.10 - 0.20 + 0 = 0.06. The second block is one of all values 1 higher: a faster machine.
    found = factorial([block(0, P=0.10, R=0.20, P_R=0.36), block(1, P=1.10, R=1.20, P_R=1.36)], ("P", "R"))
    assert (found.first.mean, found.second.mean) == pytest.approx((0.13, 0.23))
    assert (found.interaction.mean, found.total.mean) == pytest.approx((0.06, 0.36))
    assert found.first.deviation == pytest.approx(0, abs=1e-12)


def test_the_factorial_is_least_squares_with_effect_coding():
    # y = m + P x + R z + I x z / 2 with x, z = -1/2 or +1/2, the textbook parametrisation of a 2 x 2.
    rng = np.random.default_rng(5)
    logs = rng.normal(size=(1, 4))
    x, z = np.array([-0.5, 0.5, -0.5, 0.5]), np.array([-0.5, -0.5, 0.5, 0.5])
    design = np.column_stack([np.ones(4), x, z, x * z])
    _, p, s, interaction = np.linalg.lstsq(design, logs[0], rcond=None)[0]
    b, f, g, both = logs[0]
    found = factorial([block(b, P=f, S=g, P_S=both)], ("P", "S"))
    assert (found.first.mean, found.second.mean, found.interaction.mean) == pytest.approx((p, s, interaction))


def test_shares_sum_to_their_own_total_in_every_block():
    rng = np.random.default_rng(6)
    found = [
        block(*rng.normal(size=1), **dict(zip(("P", "R", "P_R"), rng.normal(size=3), strict=True))) for _ in range(5)
    ]
    shares = factorial(found, ("P", "R"))
    sums = np.add(shares.first.values, shares.second.values)
    assert sums == pytest.approx(shares.total.values, abs=1e-12)
    assert shares.first.mean + shares.second.mean == pytest.approx(shares.total.mean, abs=1e-12)


def test_a_block_without_one_of_the_four_cells_is_left_out():
    whole, part = block(0, P=0.1, R=0.2, P_R=0.3), block(0, P=9.0, P_R=9.0)
    assert factorial([whole, part], ("P", "R")).total.blocks == 1
    assert factorial([part], ("P", "R")) is None


def test_six_conditions_tell_two_factorials_and_need_no_increments():
    found = [block(0, P=0.1, R=0.2, S=0.3, P_R=0.3, P_S=0.4)]
    assert [each.names for each in factorials(found)] == [("P", "R"), ("P", "S")]
    assert increments(found) == ()


def test_four_conditions_tell_sequential_increments_that_are_called_so():
    found = [block(0, P=0.1, P_R=0.4, P_S=0.3), block(0, P=0.3, P_R=0.8, P_S=0.3)]
    assert factorials(found) == ()
    told = increments(found)
    assert [each.name for each in told] == ["sequential: P after B", "sequential: R after P", "sequential: S after P"]
    # P over B: (0.1 + 0.3) / 2; R after P: (0.3 + 0.5) / 2; S after P: (0.2 + 0.0) / 2.
    assert [each.estimate.mean for each in told] == pytest.approx([0.2, 0.4, 0.1])


def test_what_no_factorial_tells_is_told_as_an_increment():
    found = [block(0, P=0.1, R=0.2, P_R=0.3, P_S=0.4)]
    assert [each.names for each in factorials(found)] == [("P", "R")]
    assert [each.name for each in increments(found)] == ["sequential: P after B", "sequential: S after P"]
