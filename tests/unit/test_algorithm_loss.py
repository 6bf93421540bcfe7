"""Every objective against the plain reference in float64, in any split, and with what must not count."""

from __future__ import annotations

import math
from itertools import pairwise

import algorithm_case
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto.actor.objective import MicrobatchRows, policy_objective
from stretto.config import Config
from stretto.schedule import loss_normaliser
from stretto.types import GroupRecord, StrettoError

LOSSES = ("ppo_clip", "gspo", "cispo")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length")
CORRECTIONS = (("none", "token"), ("tis", "token"), ("tis", "sequence"), ("mis", "token"), ("mis", "sequence"))
TEACHER = {"teacher": "some/model", "teacher_coef": 0.5}


def normaliser(case: algorithm_case.Responses, config) -> int:
    lengths = tuple(case.lengths)
    n = len(lengths)
    same = {"version_start": (0,) * n, "version_end": (0,) * n, "rewards": (0.0,) * n, "truncated": (False,) * n}
    group = {"partition": 0, "group": 0, "row_id": "", "prompt_tokens": 1, "patches": 0, "images": 0}
    record = GroupRecord(**group, **same, response_tokens=lengths, valid=tuple(case.trained))
    return loss_normaliser([record], config.algorithm, config.rollout.max_response_tokens)


def near_an_edge(case: algorithm_case.Responses, config) -> bool:
    """Whether float32 and float64 could fall on two sides of a clip or a mask."""
    a = config.algorithm
    low, high = a.clip_range
    for new, old, rollout in zip(case.new, case.old, case.rollout, strict=True):
        ratio, weight = (new.detach() - old).double(), (old - rollout).double()
        if a.policy_loss == "gspo" and len(new):
            ratio = ratio.mean(0, keepdim=True)
        if a.importance_level == "sequence":
            weight = weight.sum(0, keepdim=True)
        for values, edges in ((ratio, (1 - low, 1 + high)), (weight, (a.tis_cap, a.mis_low, a.mis_high))):
            if any(bool(((values.exp() - edge).abs() < 1e-5).any()) for edge in edges):
                return True
    return False


@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("correction", "level"), CORRECTIONS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([True, True, True, False])), min_size=1, max_size=7),
    cuts=st.sets(st.integers(0, 7)),
    kl=st.sampled_from([None, "auto", "k1", "k2", "k3"]),
    teacher=st.booleans(),
)
def test_loss_and_gradient_are_those_of_the_papers_in_any_split(
    policy_loss, aggregation, correction, level, seed, rows, cuts, kl, teacher
):
    options = {"policy_loss": policy_loss, "aggregation": aggregation, "importance_correction": correction}
    options |= {"importance_level": level, "clip_low": 0.15, "clip_high": 0.25}
    options |= {"kl_loss_coef": 0.3, "kl_estimator": kl} if kl else {}
    config = algorithm_case.config(**options, **(TEACHER if teacher else {}))
    lengths, trained = zip(*rows, strict=True)
    assume(any(length and t for length, t in rows))
    case = algorithm_case.responses(seed, lengths, trained)
    assume(not near_an_edge(case, config))
    expected, expected_gradient = case.reference(config)
    divide = normaliser(case, config)

    whole, whole_statistics = case.run(config, range(len(rows)))
    whole_gradient = case.gradient() / divide
    edges = sorted({0, len(rows)} | {c for c in cuts if c < len(rows)})
    parts = [case.run(config, range(a, b)) for a, b in pairwise(edges)]
    scale = max(float(expected_gradient.abs().max()), 1e-3)
    sizes = max(abs(loss) for loss, _ in parts) / divide + scale  # a sum of terms of both signs is exact to their size
    for loss, gradient in ((whole, whole_gradient), (sum(p[0] for p in parts), case.gradient() / divide)):
        assert loss / divide == pytest.approx(expected, rel=1e-6, abs=1e-6 * sizes)
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-6 * scale)
    for name, value in whole_statistics.items():
        merged = [statistics[name] for _, statistics in parts]
        assert (max(merged) if name.endswith("_max") else sum(merged)) == pytest.approx(value, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize(("correction", "level"), CORRECTIONS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, -1e30])
def test_what_is_not_trained_adds_nothing_whatever_it_holds(policy_loss, correction, level, bad):
    options = {"policy_loss": policy_loss, "importance_correction": correction, "importance_level": level}
    config = algorithm_case.config(**options, kl_loss_coef=0.1, **TEACHER)
    case = algorithm_case.responses(3, [4, 3, 0, 5], [True, False, False, True])
    kept = case.run(config, [0, 3])
    kept_gradient = case.gradient()
    with torch.no_grad():
        for values in (case.new, case.old, case.rollout, case.ref, case.teacher):
            values[1].fill_(bad)
    case.advantages[1] = bad
    loss, statistics = case.run(config, [0, 1, 2, 3])
    assert (loss, statistics) == (pytest.approx(kept[0], rel=1e-6), pytest.approx(kept[1], rel=1e-6))
    torch.testing.assert_close(case.gradient(), kept_gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize(("correction", "level"), CORRECTIONS)
@pytest.mark.parametrize("lengths", [[1], [0], [0, 0], [3, 2]])
def test_a_microbatch_without_any_trained_token_is_zero_with_the_same_statistics(
    policy_loss, correction, level, lengths
):
    options = {"policy_loss": policy_loss, "importance_correction": correction, "importance_level": level}
    config = algorithm_case.config(**options, kl_loss_coef=0.1, **TEACHER)
    case = algorithm_case.responses(0, lengths, [False] * len(lengths))
    loss, statistics = case.run(config, range(len(lengths)))
    assert loss == 0.0 and not case.gradient().any() and not any(statistics.values())
    some = algorithm_case.responses(0, [2])
    _, others = some.run(config, [0])
    assert statistics.keys() == others.keys()
    # an inert microbatch may come without the log-probs of reference and teacher
    batch = algorithm_case.laid_out([2])
    rows = MicrobatchRows(torch.zeros(1), torch.tensor([False]), some.rollout[0], lambda new: new)
    loss_T, found = policy_objective(config, batch, rows)(some.new[0], torch.zeros(2))
    assert float(loss_T.detach()) == 0.0 and found.keys() == others.keys()
    trained = MicrobatchRows(torch.zeros(1), torch.tensor([True]), some.rollout[0], lambda new: new)
    with pytest.raises(StrettoError, match="no teacher log-probs"):
        policy_objective(config, batch, trained)(some.new[0], torch.zeros(2))


@pytest.mark.parametrize("policy_loss", LOSSES)
@pytest.mark.parametrize(("correction", "level"), CORRECTIONS)
@pytest.mark.parametrize(("new", "old", "rollout"), [(-200, -1, -1), (-1, -200, -1), (-1, -1, -200), (-1, -200, -200)])
def test_log_probs_far_apart_give_finite_numbers(policy_loss, correction, level, new, old, rollout):
    options = {"policy_loss": policy_loss, "importance_correction": correction, "importance_level": level}
    config = algorithm_case.config(**options, kl_loss_coef=0.1, **TEACHER)
    for advantage in (1.0, -1.0):
        case = algorithm_case.responses(0, [3])
        with torch.no_grad():
            for values, value in ((case.new, new), (case.old, old), (case.rollout, rollout)):
                values[0][1] = value
        case.advantages = [advantage]
        loss, statistics = case.run(config, [0])
        assert math.isfinite(loss) and bool(torch.isfinite(case.gradient()).all())
        assert all(math.isfinite(v) for v in statistics.values())


# By hand -------------------------------------------------------------------------------------------------------------


def one(config, new, old, advantage) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient and statistics of one response."""
    case = algorithm_case.responses(0, [len(new)])
    case.new, case.old = [torch.tensor(new, requires_grad=True)], [torch.tensor(old)]
    case.rollout = case.old
    case.advantages = [advantage]
    loss, statistics = case.run(config, [0])
    return loss, case.gradient().tolist(), statistics


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "surrogate", "passes"),
    [
        ([math.log(2), -math.log(2)], 2.0, 2.0, True),  # s = 1 although both tokens are far outside the bounds
        ([math.log(1.21), 0.0], 2.0, 2.2, True),  # s = sqrt(1.21) = 1.1
        ([math.log(4), 0.0], 2.0, 2.6, False),  # s = 2: clipped at 1.3
        ([math.log(4), 0.0], -2.0, -4.0, True),
        ([-math.log(4), 0.0], -2.0, -1.6, False),  # s = 1/2: clipped at 0.8
    ],
)
def test_gspo_clips_a_response_as_a_whole(log_ratios, advantage, surrogate, passes):
    config = algorithm_case.config(
        policy_loss="gspo", aggregation="sequence_mean", clip_low=0.2, clip_high=0.3, importance_correction="none"
    )
    loss, gradient, statistics = one(config, log_ratios, [0.0, 0.0], advantage)
    assert loss == pytest.approx(-surrogate, rel=1e-6)
    # d s / d new_t = s / 2
    assert gradient == pytest.approx([-surrogate / 2] * 2 if passes else [0.0, 0.0], rel=1e-6)
    assert statistics["clip_low_sum"] + statistics["clip_high_sum"] == (0 if passes else 2)


def test_gspo_is_equation_five_with_its_gradient_through_the_sequence_ratio():
    """arXiv:2507.18071, equations 5 and 7: the mean over responses of min(s A, clip(s) A), differentiated as it is."""
    config = algorithm_case.config(
        policy_loss="gspo",
        aggregation="sequence_mean",
        clip_low=0.1,
        clip_high=0.1,
        importance_correction="tis",
        importance_level="sequence",
    )
    case = algorithm_case.responses(11, [5, 1, 8, 3, 2], spread=0.15)
    loss, _ = case.run(config, range(5))
    gradient = case.gradient()
    total = torch.zeros((), dtype=torch.float64)
    leaves = [t.detach().double().requires_grad_() for t in case.new]
    for new, old, rollout, a in zip(leaves, case.old, case.rollout, case.advantages, strict=True):
        s = torch.exp((new - old).mean())
        weight = min(math.exp(float((old - rollout).double().sum())), 2.0)
        total = total - weight * torch.min(s * a, s.clamp(0.9, 1.1) * a)
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-6)
    torch.testing.assert_close(gradient.double(), torch.cat([t.grad for t in leaves]), rtol=1e-6, atol=1e-7)
    assert 0 < int((gradient == 0).sum()) < len(gradient)  # some of the responses were clipped, and not all


def test_with_a_teacher_gspo_keeps_what_is_said_of_a_token_at_that_token():
    config = algorithm_case.config(
        policy_loss="gspo", importance_correction="none", advantage="none", clip_low=0.5, clip_high=0.5, **TEACHER
    )
    case = algorithm_case.responses(0, [2])
    case.new, case.old = [torch.tensor([-1.0, -1.0], requires_grad=True)], [torch.tensor([-1.0, -1.0])]
    case.teacher, case.advantages = [torch.tensor([-1.0, -3.0])], [0.0]
    case.run(config, [0])
    assert case.gradient().tolist() == pytest.approx([0.0, 1.0])  # -(0.5 * (-3 + 1)) at the second token alone


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (0.01, 0.01), (4.0, 4.0), (9.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_weighs_the_log_prob_and_every_token_keeps_its_gradient(ratio, weight, advantage):
    config = algorithm_case.config(policy_loss="cispo", importance_correction="none")  # weights up to 5
    new = -0.5
    loss, gradient, statistics = one(config, [new], [new - math.log(ratio)], advantage)
    assert loss == pytest.approx(-weight * advantage * new, rel=1e-6)
    assert gradient == pytest.approx([-weight * advantage], rel=1e-6)
    assert statistics["clip_high_sum"] == float(ratio == 9.0)  # clipped whatever the sign of the advantage


def test_a_teacher_adds_its_log_ratio_to_the_advantage_of_each_token():
    config = algorithm_case.config(importance_correction="none", **TEACHER)
    case = algorithm_case.responses(0, [2])
    case.new, case.old = [torch.tensor([-1.0, -2.0], requires_grad=True)], [torch.tensor([-1.0, -2.0])]
    case.teacher, case.advantages = [torch.tensor([-3.0, -0.5])], [0.25]
    loss, statistics = case.run(config, [0])
    # 0.25 + 0.5 * (-3 + 1) = -0.75 and 0.25 + 0.5 * (-0.5 + 2) = 1
    assert loss == pytest.approx(0.75 - 1.0)
    assert case.gradient().tolist() == pytest.approx([0.75, -1.0])
    assert statistics["teacher_kl_sum"] == pytest.approx(2.0 - 1.5)


def test_on_policy_samples_and_a_snapshot_that_lags_give_the_policy_gradient():
    """One token, three choices, s = 0: over all samples of the newest policy, sum of p (A - mean A) at its logits
    (REINFORCE), wherever the ratio starts from. Without a correction the snapshot's part in the ratio would stay.
    """
    options = {"old_policy": "old_actor", "old_actor_every": 4, "clip_low": 1.0, "clip_high": 100.0, "tis_cap": 100.0}
    config = Config.model_validate({"algorithm": options, "staleness": {"max": 0}})
    advantages = [1.0, 0.0, -0.5]
    logits = torch.tensor([1.2, -0.4, 0.3], requires_grad=True)
    new, snapshot = torch.log_softmax(logits, 0), torch.log_softmax(torch.zeros(3), 0)
    sampled = new.detach()
    total = torch.zeros(())
    for choice, advantage in enumerate(advantages):
        at = slice(choice, choice + 1)
        rows = MicrobatchRows(
            torch.tensor([advantage]), torch.tensor([True]), sampled[at], lambda _, at=at: snapshot[at]
        )
        loss, _ = policy_objective(config, algorithm_case.laid_out([1]), rows)(new[at], torch.zeros(1))
        total = total + float(sampled[choice].exp()) * loss
    total.backward()
    p = np.exp([1.2, -0.4, 0.3]) / np.exp([1.2, -0.4, 0.3]).sum()
    np.testing.assert_allclose(-logits.grad, p * (advantages - p @ advantages), rtol=1e-5, atol=1e-7)


def test_the_kl_is_weighted_by_the_aggregation_and_not_by_importance():
    config = algorithm_case.config(
        aggregation="sequence_mean", importance_correction="tis", kl_loss_coef=0.5, kl_estimator="k2"
    )
    case = algorithm_case.responses(0, [2, 1])
    case.new = [torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)]
    case.ref = [torch.tensor([-2.0, -2.0]), torch.tensor([-4.0])]
    case.advantages = [0.0, 0.0]
    loss, statistics = case.run(config, [0, 1])
    assert loss == pytest.approx(0.5 * ((0.5 * 1 + 0) / 2 + 0.5 * 9))
    assert case.gradient().tolist() == pytest.approx([0.5 / 2, 0.0, 0.5 * 3])
    assert statistics["ref_kl_sum"] == pytest.approx(0.5 + 0 + 4.5)


def test_a_token_weighs_the_same_in_every_response_under_a_constant_length():
    config = algorithm_case.config(aggregation="constant_length", importance_correction="none")
    case = algorithm_case.responses(5, [1, 8, 0, 3], [True, True, True, False])
    case.new = [t.clone().requires_grad_() for t in case.old]
    case.advantages = [1.0, 1.0, 1.0, 1.0]
    case.run(config, range(4))
    gradient = case.gradient() / normaliser(case, config)
    np.testing.assert_allclose(gradient, [-1 / 32] * 9 + [0.0] * 3, rtol=1e-6)  # 4 samples of at most 8 tokens
