"""Advantages of every estimator: by hand, against the plain reference and scipy, where there is nothing to learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_grpo
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import zscore

from stretto.actor.advantage import Advantages, estimator
from stretto.config import AlgorithmConfig

KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "none")


def advantages(kind: str, rewards, groups, counted=None, eps: float = 1e-4) -> Advantages:
    counted = [True] * len(rewards) if counted is None else list(counted)
    algorithm = AlgorithmConfig.model_validate({"advantage": kind, "advantage_eps": eps})
    return estimator(algorithm)(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(counted, dtype=torch.bool), torch.tensor(groups)
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # rewards 1, 0, 0, 0 and 2, 4: means 1/4 and 3, differences 3/4, -1/4 (three times), -1, 1
        ("grpo", [1.5, -0.5, -0.5, -0.5, -math.sqrt(0.5), math.sqrt(0.5)]),  # unbiased deviations 1/2 and sqrt 2
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, -1, 1]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3, -2, 2]),  # 1 - 0, 0 - 1/3, 2 - 4, 4 - 2
        # squares 9/16 + 3/16 + 1 + 1 = 11/4 over 6 - 1 samples: deviation sqrt(11/20)
        ("reinforce_pp_baseline", (np.array([0.75, -0.25, -0.25, -0.25, -1, 1]) / math.sqrt(11 / 20)).tolist()),
        ("none", [0.0] * 6),
    ],
)
def test_advantages_by_hand(kind, expected):
    result = advantages(kind, [1.0, 0.0, 0.0, 0.0, 2.0, 4.0], [0, 0, 0, 0, 1, 1], eps=0.0)
    np.testing.assert_allclose(result.advantages_B, expected, rtol=1e-6)
    assert result.advantages_B.dtype == torch.float32
    assert (result.groups, result.zero_signal_groups) == (2, 0)


def test_the_domain_says_what_an_advantage_depends_on():
    one, two = ([1.0, 0.0, 0.5], [0, 0, 0]), ([1.0, 0.0, 0.5, 9.0, -9.0], [0, 0, 0, 1, 1])
    for kind in KINDS:
        same = torch.equal(advantages(kind, *one).advantages_B, advantages(kind, *two).advantages_B[:3])
        domain = estimator(AlgorithmConfig.model_validate({"advantage": kind})).domain
        assert same == (domain == "group"), kind


def test_of_one_group_the_batch_is_the_group():
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = zscore(rewards, ddof=1)
    for kind in ("grpo", "reinforce_pp_baseline"):
        np.testing.assert_allclose(advantages(kind, rewards, [3] * 4, eps=0.0).advantages_B, expected, rtol=1e-6)


def test_a_group_without_signal_widens_the_batch_and_stays_exactly_zero():
    """Its differences are 0 and count among those of the batch: 1/2, -1/2, 0, 0, 0 have the deviation sqrt(1/2 / 4)."""
    result = advantages("reinforce_pp_baseline", [1.0, 0.0, 0.1, 0.1, 0.1], [0, 0, 1, 1, 1], eps=0.0)
    expected = 0.5 / math.sqrt(0.125)
    np.testing.assert_allclose(result.advantages_B[:2], [expected, -expected], rtol=1e-6)
    assert result.advantages_B[2:].tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.9, 0.1, -3.3, 1e-30, 1e30])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(kind, value, n, eps):
    rewards = np.full(n, value, np.float32).tolist()
    alone = advantages(kind, rewards, [0] * n, eps=eps)
    assert alone.advantages_B.tolist() == [0.0] * n and alone.zero_signal_groups == 1
    beside = advantages(kind, [*rewards, 1.0, 0.0], [0] * n + [5, 5], eps=eps)
    assert beside.advantages_B[:n].tolist() == [0.0] * n
    assert (beside.advantages_B[n:].abs() > 0).all() == (kind != "none")


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_counts_advantages_are_zero(kind):
    nothing = advantages(kind, [math.nan, 1.0, 0.0], [0, 0, 1], [False, False, False])
    assert nothing.advantages_B.tolist() == [0.0] * 3 and math.isnan(nothing.mean_reward)
    one = advantages(kind, [1.0, 0.0, math.nan], [0, 0, 1], [True, False, False], eps=0.0)
    assert one.advantages_B.tolist() == [0.0] * 3 and one.mean_reward == 1.0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.35, 0.95, 1.0, -2.0]), st.booleans()), min_size=1
    ),
    rng=st.randoms(),
)
def test_advantages_are_those_of_the_reference_in_any_order(kind, rows, rng):
    rng.shuffle(rows)
    groups, rewards, counted = zip(*rows, strict=True)
    result = advantages(kind, rewards, groups, counted).advantages_B
    samples = [{"group": g, "reward": r, "valid": True, "counted": c} for g, r, c in rows]
    np.testing.assert_allclose(result, reference_grpo.advantages(samples, 1e-4, kind), rtol=1e-6, atol=1e-12)
    assert bool(torch.isfinite(result).all())
