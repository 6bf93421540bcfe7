"""The moving-block bootstrap: what it draws, and against the theory of autocorrelated means."""

from __future__ import annotations

import math

import bench_case
import numpy as np
import pytest

from stretto.bench.plan import Window
from stretto.bench.resample import PairedSteps, Steps, moving_stretches, stretch_length, within_runs


def test_a_stretch_is_the_cube_root_of_the_run():
    assert [stretch_length(steps) for steps in (1, 8, 40, 50, 1000)] == [1, 2, 3, 4, 10]


def test_draws_are_runs_of_consecutive_steps_as_long_as_the_run():
    drawn = moving_stretches([Window(5, 44)], 200, np.random.default_rng(0))
    assert drawn.shape == (200, 40) and drawn.min() == 0 and drawn.max() == 39
    # Stretches of 3: places 0, 1, 2 follow one another, and so do 3, 4, 5 …
    inside = drawn[:, :39].reshape(200, 13, 3)
    assert (np.diff(inside, axis=2) == 1).all()


def test_no_stretch_crosses_from_one_window_into_the_next():
    # Windows of 10 and 20 steps, stretches of 3: no pair of places within a stretch joins step 9 and step 10.
    drawn = moving_stretches([Window(0, 9), Window(30, 49)], 500, np.random.default_rng(0)).reshape(500, 10, 3)
    assert not ((drawn[:, :, :-1] <= 9) & (drawn[:, :, 1:] >= 10)).any()
    assert {*drawn.ravel()} == set(range(30))


def test_a_window_shorter_than_a_stretch_is_drawn_whole():
    drawn = moving_stretches([Window(0, 0), Window(10, 49)], 50, np.random.default_rng(0))
    assert drawn.shape == (50, 41) and (drawn == 0).any()


def test_steady_steps_have_an_interval_of_no_width():
    fast, slow = (Steps(tokens=np.full(40, 10.0), seconds=np.full(40, s)) for s in (1.0, 2.0))
    found = within_runs([PairedSteps(treated=fast, base=(slow, slow))], [Window(0, 39)], draws=50)
    assert found == pytest.approx((math.log(2), math.log(2)))


def test_the_width_is_that_of_the_mean_of_steps_that_resemble_one_another():
    """AR(1) steps of share w and correlation 0.4: their mean has variance w^2 (1 + 0.4) / (1 - 0.4) / n to first order,
    the log-ratio of condition and two B 1.5 of that. Stretches of 9 keep most of the correlation.
    """
    rng, n, within = np.random.default_rng(1), 700, 0.05
    runs = [bench_case.steps(rng, n, within=within) for _ in range(3)]
    low, high = within_runs([PairedSteps(treated=runs[0], base=(runs[1], runs[2]))], [Window(0, n - 1)], draws=500)
    expected = 2 * 1.96 * math.sqrt(1.5 * within**2 * 1.4 / 0.6 / n)
    independent = expected * math.sqrt(0.6 / 1.4)
    assert 0.8 * expected < high - low < 1.15 * expected and high - low > 1.2 * independent
