"""Advantages, loss, importance weights and the learning rate against hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithm_case import laid_out
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.actor.advantage import estimator
from stretto.actor.correction import correction_statistics, effective_sample_share, importance_weights
from stretto.actor.loss import policy_loss, token_weights
from stretto.actor.optim import warmup_constant_decay
from stretto.config import AlgorithmConfig
from stretto.models.logprobs import token_logprobs
from stretto.types import StrettoError


def advantages(rewards, groups, valid=None, eps=1e-4):
    rewards = torch.as_tensor(rewards)
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return estimator(AlgorithmConfig(advantage_eps=eps))(rewards, valid, torch.tensor(groups))


# Advantages (case C4) ------------------------------------------------------------------------------------------------


def test_advantage_is_the_distance_from_the_group_mean_in_unbiased_standard_deviations():
    # 1, 0, 0, 0: mean 1/4, unbiased variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, std 1/2
    result = advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], eps=0.0)
    torch.testing.assert_close(result.advantages_B, torch.tensor([1.5, -0.5, -0.5, -0.5]))
    assert result.advantages_B.dtype == torch.float32
    assert result.mean_reward == 0.25
    with_eps = advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], eps=0.5)
    torch.testing.assert_close(with_eps.advantages_B, torch.tensor([0.75, -0.25, -0.25, -0.25]))


@pytest.mark.parametrize("value", [0.9, 0.1, 1e-30, -3.3])
@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero_and_count_as_no_signal(value, n):
    result = advantages(np.full(n, value, np.float32), [0] * n, eps=1e-6)
    assert (result.advantages_B == 0).all()
    assert (result.groups, result.zero_signal_groups) == (1, 1)


def test_one_valid_sample_gives_zero_and_not_nan():
    assert advantages([5.0], [0]).advantages_B.tolist() == [0.0]
    assert advantages([5.0, 1.0], [0, 0], [True, False]).advantages_B.tolist() == [0.0, 0.0]


def test_groups_are_told_apart_by_id_and_not_by_stride():
    # A loses one of four; rows interleaved: A = [1, 1, 0] mean 2/3, B = [0, 0, 1, 0] mean 1/4
    rewards = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    groups = [4, 9, 4, 9, 4, 9, 9]
    result = advantages(rewards, groups, eps=0.0).advantages_B
    a, b = math.sqrt(1 / 3), 0.5
    expected = [(1 - 2 / 3) / a, -0.25 / b, (1 - 2 / 3) / a, -0.25 / b, (-2 / 3) / a, 0.75 / b, -0.25 / b]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32))


def test_failed_samples_are_outside_their_groups_statistics():
    result = advantages([1.0, 123.0, 0.0, math.nan], [0, 0, 0, 0], [True, False, True, False], eps=0.0)
    s = math.sqrt(0.5)
    torch.testing.assert_close(result.advantages_B, torch.tensor([0.5 / s, 0.0, -0.5 / s, 0.0]))
    assert result.mean_reward == 0.5


def test_a_group_of_failures_only_is_zero_and_nothing_is_nan():
    result = advantages([1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], [True, True, False, False])
    assert torch.isfinite(result.advantages_B).all()
    assert result.zero_signal_groups == 1
    nothing = advantages([0.0, 0.0], [0, 0], [False, False])
    assert nothing.advantages_B.tolist() == [0.0, 0.0]
    assert math.isnan(nothing.mean_reward)


def test_a_reward_that_is_not_finite_but_marked_valid_is_an_error():
    with pytest.raises(StrettoError, match=r"row 1 \(group 3\) is nan"):
        advantages([0.0, math.nan], [3, 3])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.booleans()), min_size=1),
    st.randoms(),
)
def test_advantages_follow_their_rows_in_any_order_and_agree_with_numpy(rows, rng):
    def compute(rows):
        groups, rewards, valid = zip(*rows, strict=True)
        return advantages(list(rewards), list(groups), list(valid)).advantages_B.tolist()

    result = compute(rows)
    order = list(range(len(rows)))
    rng.shuffle(order)
    np.testing.assert_allclose(compute([rows[i] for i in order]), [result[i] for i in order], rtol=1e-6)
    for (group, reward, valid), value in zip(rows, result, strict=True):
        peers = [r for g, r, v in rows if g == group and v]
        expected = 0.0
        if valid and len(set(peers)) > 1:
            expected = (reward - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-4)
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-12)


# Importance weights --------------------------------------------------------------------------------------------------


def importance(kind, lengths, old, rollout, mask=None, level="token", **options):
    """Weights of rows of these lengths, and their statistics."""
    mask = torch.ones(len(old), dtype=torch.bool) if mask is None else mask
    algorithm = AlgorithmConfig.model_validate(options)
    weights = importance_weights(kind, level, old, rollout, mask, laid_out(lengths), algorithm)
    statistics = correction_statistics(kind, old, rollout, weights, mask, algorithm)
    return weights, {k: float(v) for k, v in statistics.items()}


def test_importance_weight_is_the_ratio_cut_at_the_cap():
    old = torch.tensor([-1.0, -1.0, -1.0, -0.5], requires_grad=True)
    rollout = torch.tensor([-1.0, -2.0, -1.5, -200.0])
    weights, _ = importance("tis", [4], old, rollout)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(0.5), 2.0]))
    assert not weights.requires_grad


def test_correction_statistics_by_hand():
    # log-ratios 0, ln 3, -ln 2; the last token is masked out
    old = torch.tensor([0.0, math.log(3), -math.log(2), -77.0])
    rollout = torch.zeros(4)
    mask = torch.tensor([True, True, True, False])
    _, stats = importance("tis", [4], old, rollout, mask)
    assert stats["is_weight_sum"] == pytest.approx(1 + 2 + 0.5)
    assert stats["is_weight_square_sum"] == pytest.approx(1 + 4 + 0.25)
    assert stats["is_weight_max"] == 2.0
    assert stats["is_clipped_sum"] == 1
    assert stats["rollout_kl_k1_sum"] == pytest.approx(-math.log(3) + math.log(2), abs=1e-6)
    assert stats["rollout_kl_k3_sum"] == pytest.approx((3 - 1 - math.log(3)) + (0.5 - 1 + math.log(2)), abs=1e-6)
    assert stats["rollout_gap_sum"] == pytest.approx(math.log(3) + math.log(2))
    assert stats["rollout_gap_max"] == pytest.approx(math.log(3))
    assert effective_sample_share(3.5, 5.25, 3) == pytest.approx(3.5**2 / 5.25 / 3)
    assert effective_sample_share(5.0, 5.0, 5) == 1.0
    assert effective_sample_share(0.0, 0.0, 5) == 0.0  # MIS dropped every token: nothing is left of the five
    assert math.isnan(effective_sample_share(0.0, 0.0, 0))


SEQUENCES = ([3, 0, 2], [math.log(2), math.log(3), -math.log(4), -math.log(8), math.log(2)])
"""Log-ratios old - rollout of rows of 3, 0 and 2 tokens: the rows' products are 2 * 3 / 4 = 1.5 and 2 / 8 = 0.25."""


def test_a_sequence_has_one_weight_from_the_product_of_its_tokens_ratios():
    lengths, gaps = SEQUENCES
    old, rollout = torch.tensor(gaps) - 1, torch.full((5,), -1.0)
    weights, _ = importance("tis", lengths, old, rollout, level="sequence", tis_cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.5] * 3 + [0.25] * 2))
    weights, stats = importance("tis", lengths, old, rollout, level="sequence", tis_cap=1.25)
    torch.testing.assert_close(weights, torch.tensor([1.25] * 3 + [0.25] * 2))
    assert stats["is_clipped_sum"] == 3
    assert stats["is_weight_sum"] == pytest.approx(3 * 1.25 + 2 * 0.25)
    long = torch.full((4000,), 0.5)  # a response whose product of ratios overflows has the cap, and not infinity or NaN
    assert set(importance("tis", [4000], long, -long, level="sequence")[0].tolist()) == {2.0}
    assert set(importance("mis", [4000], long, -long, level="sequence")[0].tolist()) == {0.0}


def test_masked_importance_weights_are_kept_inside_the_bounds_and_zero_outside():
    lengths, gaps = SEQUENCES
    old, rollout = torch.tensor(gaps) - 1, torch.full((5,), -1.0)
    weights, stats = importance("mis", lengths, old, rollout, mis_low=0.2, mis_high=2.5)
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.0, 0.25, 0.0, 2.0]))  # ratios 2, 3, 1/4, 1/8, 2
    assert stats["is_masked_sum"] == 2
    assert stats["is_weight_square_sum"] == pytest.approx(4 + 1 / 16 + 4)
    assert "is_clipped_sum" not in stats
    weights, stats = importance("mis", lengths, old, rollout, level="sequence", mis_low=0.5, mis_high=5.0)
    torch.testing.assert_close(weights, torch.tensor([1.5] * 3 + [0.0] * 2))
    mask = torch.tensor([True, True, True, False, False])
    assert importance("mis", lengths, old, rollout, mask, level="sequence")[1]["is_masked_sum"] == 0


@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_prob_that_is_nan_is_not_masked_away_where_it_carries_loss(kind, level):
    old, rollout = torch.tensor([-1.0, math.nan, -1.0]), torch.tensor([-1.0, -1.0, -1.0])
    weights, _ = importance(kind, [2, 1], old, rollout, level=level)
    assert math.isnan(weights[1]) and weights[2] == 1.0
    mask = torch.tensor([False, False, True])
    _, stats = importance(kind, [2, 1], old, rollout, mask, level=level)
    assert stats["is_weight_sum"] == 1.0 and all(math.isfinite(v) for v in stats.values())


def test_without_correction_every_weight_is_one():
    weights, stats = importance("none", [2], torch.tensor([-1.0, -9.0]), torch.tensor([-5.0, -1.0]), level="sequence")
    assert weights.tolist() == [1.0, 1.0] and stats["rollout_gap_max"] == 8.0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_ratio_is_one_at_equal_weights_for_every_temperature(temperature):
    # D6: logits [2, 0], T = 0.5, token 0: -0.0181 (raw -0.1269 would make the ratio 1.115)
    logits = torch.tensor([[2.0, 0.0]])
    value = token_logprobs(logits, torch.tensor([0]), torch.zeros(2, dtype=torch.bool), temperature)
    assert float(value) == pytest.approx(-math.log1p(math.exp(-2 / temperature)), abs=1e-7)
    assert importance("tis", [1], value, value.clone())[0].tolist() == [1.0]
    if temperature == 0.5:
        assert float(value) == pytest.approx(-0.0181, abs=5e-5)


# Loss ----------------------------------------------------------------------------------------------------------------


def loss(new, old, advantage, mask=None, weights=None, is_weights=None, low=0.2, high=0.3):
    new = torch.tensor(new, requires_grad=True)
    ones = torch.ones(len(new))
    value, stats = policy_loss(
        "ppo_clip",
        new,
        torch.tensor(old),
        torch.tensor(advantage),
        ones if is_weights is None else torch.tensor(is_weights),
        ones if weights is None else torch.tensor(weights),
        ones.bool() if mask is None else torch.tensor(mask),
        [len(new)],
        clip_low=low,
        clip_high=high,
    )
    value.backward()
    return float(value.detach()), new.grad.tolist(), {k: float(v) for k, v in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # d(-rA)/d new = -rA
        (1.0, -2.0, 2.0, 2.0),
        (1.5, 2.0, -2.6, 0.0),  # above 1 + high with A > 0: clipped at 1.3
        (1.5, -2.0, 3.0, 3.0),  # the pessimistic side is not clipped
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # below 1 - low with A < 0: clipped at 0.8
        (1.25, 1.0, -1.25, -1.25),  # between: low and high are different bounds
        (0.85, -1.0, 0.85, 0.85),
    ],
)
def test_clipped_loss_and_its_gradient_by_hand(ratio, advantage, expected, gradient):
    value, grad, stats = loss([math.log(ratio)], [0.0], [advantage])
    assert value == pytest.approx(expected, rel=1e-6)
    assert grad[0] == pytest.approx(gradient, rel=1e-6)
    assert stats["clip_high_sum"] == float(ratio == 1.5 and advantage > 0)
    assert stats["clip_low_sum"] == float(ratio == 0.5 and advantage < 0)
    assert stats["ratio_deviation_max"] == pytest.approx(abs(ratio - 1), abs=1e-6)
    assert stats["ppo_kl_k1_sum"] == pytest.approx(-math.log(ratio), abs=1e-7)
    assert stats["ppo_kl_k3_sum"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-7)


def test_masked_tokens_add_nothing_whatever_they_hold():
    value, grad, stats = loss(
        [0.0, math.nan, -math.inf], [0.0, 0.0, -math.inf], [1.0, math.nan, 1.0], mask=[True, False, False]
    )
    assert value == -1.0
    assert grad == [-1.0, 0.0, 0.0]
    assert stats["tokens_sum"] == 1
    assert stats["ratio_sum"] == 1
    assert stats["ratio_deviation_max"] == 0


@pytest.mark.parametrize(("new", "old"), [(-120.0, -1.0), (-1.0, -120.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_leaves_loss_gradient_and_statistics_finite(new, old, advantage):
    value, grad, stats = loss([new], [old], [advantage])  # D5
    assert math.isfinite(value)
    assert math.isfinite(grad[0])
    assert all(math.isfinite(v) for v in stats.values())


def test_an_empty_microbatch_has_zero_loss_and_statistics():
    value, grad, stats = loss([], [], [])
    assert value == 0.0
    assert grad == []
    assert not any(stats.values())


def test_importance_and_token_weights_scale_each_tokens_loss():
    value, grad, _ = loss([0.0, 0.0], [0.0, 0.0], [1.0, 1.0], weights=[0.5, 1.0], is_weights=[2.0, 0.25])
    assert value == pytest.approx(-1.25)
    assert grad == pytest.approx([-1.0, -0.25])


def test_sequence_mean_weighs_tokens_by_the_length_of_their_sample():
    assert token_weights([1, 0, 4], "sequence_mean").tolist() == [1.0, 0.25, 0.25, 0.25, 0.25]
    assert token_weights([1, 0, 4], "token_mean").tolist() == [1.0] * 5
    assert token_weights([1, 0, 4], "constant_length").tolist() == [1.0] * 5


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("splits", [[100, 900], [1000], [1, 499, 500], [100, 100, 800]])
def test_the_mean_loss_is_the_same_in_every_split(aggregation, splits):
    """D1: 100 tokens of loss 2.0 and 900 of loss 0.5; the token mean is 0.65 and not 1.25. As samples of 100 and 900
    tokens the sequence mean is 1.25. Microbatches are cut at samples in life; the loss does not care where.
    """
    weights = token_weights([100, 900], aggregation)
    advantage = torch.tensor([-2.0] * 100 + [-0.5] * 900)
    new = torch.zeros(1000, requires_grad=True)
    total = 0.0
    for part in torch.arange(1000).split(splits):
        value, _ = policy_loss(
            "ppo_clip",
            new[part],
            torch.zeros(len(part)),
            advantage[part],
            torch.ones(len(part)),
            weights[part],
            torch.ones(len(part), dtype=torch.bool),
            [len(part)],
            clip_low=0.2,
            clip_high=0.2,
        )
        value.backward()
        total += float(value.detach())
    normaliser = 1000 if aggregation == "token_mean" else 2
    assert total / normaliser == pytest.approx(0.65 if aggregation == "token_mean" else 1.25, rel=1e-6)
    torch.testing.assert_close(new.grad / normaliser, -advantage * weights / normaliser, rtol=1e-6, atol=0)


# Learning rate -------------------------------------------------------------------------------------------------------


def test_learning_rate_ramps_holds_and_falls_to_its_share_at_the_last_update():
    lr = warmup_constant_decay(peak=4e-4, warmup=5, updates=150, decay_fraction=0.3, decay_to=0.1)
    assert [lr(t) for t in range(5)] == pytest.approx([0.8e-4, 1.6e-4, 2.4e-4, 3.2e-4, 4e-4])
    assert lr(5) == lr(104) == 4e-4
    assert lr(105) == pytest.approx(4e-4 * (1 - 0.9 / 45))
    assert lr(149) == pytest.approx(4e-5) == lr(1000)
    assert warmup_constant_decay(peak=1.0, warmup=0, updates=3, decay_fraction=0.0, decay_to=0.1)(2) == 1.0
