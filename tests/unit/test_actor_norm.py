"""The gradient norm, taken piece by piece."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stretto.actor.trainer import l2_norm


@pytest.mark.parametrize("piece", [1, 7, 1000, 10**6])
def test_the_norm_is_numpys_in_float64_for_any_piece(piece):
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32) * 1e3
    expected = np.linalg.norm(values.astype(np.float64))
    assert l2_norm(torch.from_numpy(values), piece) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_in_any_piece_makes_the_norm_not_finite(bad):
    values = torch.ones(10)
    values[8] = bad
    assert not math.isfinite(l2_norm(values, 3))


def test_large_and_small_values_neither_overflow_nor_vanish():
    assert l2_norm(torch.full((4,), 1e38), 2) == pytest.approx(2 * float(np.float32(1e38)))
    assert l2_norm(torch.full((4,), 1e-38), 3) == pytest.approx(2 * float(np.float32(1e-38)))
