"""Throughputs, estimates, Holm and verdicts, by hand and against scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from stretto.bench.arithmetic import (
    BlockValues,
    aa_values,
    against_target,
    estimate,
    holm,
    judge,
    paired,
    percent,
    pipeline_efficiency,
    windowed,
)
from stretto.bench.plan import Contrast, Window
from stretto.types import StrettoError

P_B = Contrast("P", "B")
PR_B = Contrast("P+R", "B")


def pair(base: float, treated: float, name: str = "P+R") -> BlockValues:
    return BlockValues(baseline=(base,), others={name: treated})


def blocks(gains: list[float], aa: float = 0.0) -> list[BlockValues]:
    """B of 100 with an A/A log-ratio of ``aa``, and P at these log-ratios over their geometric mean."""
    first, last = 100 * math.exp(-aa / 2), 100 * math.exp(aa / 2)
    return [BlockValues(baseline=(first, last), others={"P": 100 * math.exp(gain)}) for gain in gains]


# Throughput ----------------------------------------------------------------------------------------------------------


def test_a_window_is_all_its_tokens_over_all_its_seconds():
    # (1000 + 1000 + 4000) tokens / (1 + 1 + 10) s = 500; the mean of rates would be (1000 + 1000 + 400) / 3 = 800.
    tokens, seconds = [1000.0] * 4 + [4000.0], [30.0, 30.0, 1.0, 1.0, 10.0]
    found = windowed(tokens, seconds, [Window(2, 4)])
    assert (found.per_s, found.tokens, found.seconds, found.first, found.steps) == (500.0, 6000.0, 12.0, 2, 3)


def test_windows_are_measured_together_without_what_lies_between():
    # updates 0 and 2: (100 + 300) / (1 + 3) = 100
    assert windowed([100.0, 999.0, 300.0], [1.0, 1.0, 3.0], [Window(0, 0), Window(2, 2)]).per_s == 100.0


@pytest.mark.parametrize(
    ("tokens", "seconds", "said"),
    [
        ([1.0, math.nan, 1.0], [1.0, 1.0, 1.0], "update 1 has nan tokens"),
        ([1.0, 1.0, 1.0], [1.0, 1.0, math.inf], "update 2 has 1.0 tokens in inf s"),
        ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0], "update 1 has 1.0 tokens in 0.0 s"),
        ([1.0, 1.0], [1.0, 1.0], "do not lie in 2 updates"),
    ],
)
def test_a_value_that_is_no_number_is_found_not_averaged(tokens, seconds, said):
    with pytest.raises(StrettoError, match=said):
        windowed(tokens, seconds, [Window(1, 2)])


def test_the_efficiency_is_the_slowest_resource_over_the_step():
    # Rollout needs 1.5 s of a step of 2 s, the others less: 1.5 / 2.
    assert pipeline_efficiency(0.4, 1.5, 1.2, 2.0, staleness_max=1) == 0.75
    assert pipeline_efficiency(0.4, 1.5, 1.2, 2.0, staleness_max=0) is None


# Estimates -----------------------------------------------------------------------------------------------------------


def test_the_published_example_is_inconclusive():
    # ln(1475.1722 / 964.6778) = 0.42474, ln(1568.9149 / 1241.8265) = 0.23380: mean 0.32927, deviation
    # 0.19094 / sqrt 2 = 0.13501, half width t(0.975; 1) = 12.7062 times 0.13501 / sqrt 2 = 1.2130.
    published = [pair(964.6778, 1475.1722), pair(1241.8265, 1568.9149)]
    assert [percent(value) for value in paired(published, PR_B)] == pytest.approx([52.92, 26.34], abs=0.005)
    found = estimate(paired(published, PR_B))
    assert percent(found.mean) == pytest.approx(39.00, abs=0.005)
    assert found.deviation == pytest.approx(0.13501, abs=1e-5)
    assert (percent(found.low), percent(found.high)) == pytest.approx((-58.68, 367.53), abs=0.01)
    (judged,) = judge(published, PR_B, [], {})
    assert judged.finding == "inconclusive"
    assert judged.reasons[0] == "the 95 % interval holds 0"
    assert judged.reasons[1].startswith("no A/A pair")


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20])
def test_an_estimate_is_a_one_sample_t_test(n):
    values = np.random.default_rng(n).normal(0.1, 0.2, n)
    found, reference = estimate(values), stats.ttest_1samp(values, 0)
    interval = reference.confidence_interval(0.95)
    assert (found.mean, found.deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, reference.pvalue), rel=1e-9)


def test_one_block_says_nothing_about_spread():
    found = estimate([0.3])
    assert (found.mean, found.low, found.high, found.p) == (0.3, -math.inf, math.inf, 1.0)
    assert math.isnan(found.deviation) and percent(found.high) == math.inf and percent(found.low) == -100
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


def test_equal_values_have_an_interval_of_no_width():
    assert (estimate([0.0, 0.0]).p, estimate([0.5, 0.5]).p, estimate([0.5, 0.5]).low) == (1.0, 0.0, 0.5)


def test_the_baseline_of_a_block_is_the_geometric_mean_of_its_two_b():
    # sqrt(80 * 125) = 100, so P of 110 is +10 %; A/A is ln(125 / 80) = 0.4463.
    block = BlockValues(baseline=(80.0, 125.0), others={"P": 110.0, "P+R": 121.0})
    assert paired([block], P_B) == pytest.approx([math.log(1.1)])
    assert paired([block], Contrast("P+R", "P")) == pytest.approx([math.log(1.1)])
    assert aa_values([block]) == pytest.approx([0.4463], abs=1e-4)


def test_a_block_without_one_of_the_cells_is_left_out_of_that_contrast_alone():
    whole = BlockValues(baseline=(100.0, 100.0), others={"P": 110.0, "P+R": 120.0})
    rejected = BlockValues(baseline=(100.0, 100.0), others={"P": 130.0})
    assert len(paired([whole, rejected], P_B)) == 2 and len(paired([whole, rejected], PR_B)) == 1
    assert paired([BlockValues(baseline=(), others={"P": 1.0})], P_B) == ()


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04, and none below the one before: last 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == (1.0, 1.0)
    assert holm([]) == ()


# Verdicts ------------------------------------------------------------------------------------------------------------


def one(gains: list[float], aa: float = 0.0):
    return judge(blocks(gains, aa), P_B, [], {})[0]


def test_an_effect_that_every_rule_holds_is_supported_and_its_mirror_negative():
    assert one([0.10, 0.11, 0.12, 0.11], aa=0.02).finding == "supported"
    assert one([-0.10, -0.11, -0.12, -0.11], aa=0.02).finding == "negative"
    assert one([0.10, 0.11, 0.12, 0.11], aa=0.02).reasons == ()


def test_an_effect_within_the_largest_aa_difference_is_inconclusive_in_either_direction():
    gains = [0.10, 0.11, 0.12, 0.11]
    assert one(gains, aa=-0.12).reasons == ("the effect is within the largest A/A difference, 12.7 %",)
    assert one([-gain for gain in gains], aa=0.12).finding == "inconclusive"


def test_below_six_blocks_every_block_has_the_sign_of_the_effect():
    # Five of 0.3 and one below 0: mean 0.24, deviation 0.147, error 0.06, t = 4.0 > t(0.975; 5) = 2.57.
    six = one([0.30, 0.30, 0.30, 0.30, 0.30, -0.06])
    assert six.finding == "supported" and six.estimate.signs == (5, 1)
    # Four of 0.3 and one of -0.01: mean 0.238, error 0.062, t = 3.84 > t(0.975; 4) = 2.78, but one sign is other.
    five = one([0.30, 0.30, 0.30, 0.30, -0.01])
    assert five.estimate.low > 0 and five.reasons == ("1 of 5 blocks do not have the sign of the mean",)


def test_one_block_supports_nothing():
    assert one([0.5]).reasons == ("one block has no interval",)


def test_all_but_the_primary_contrast_are_adjusted_together():
    # p of (0.1, 0.102) is 0.0063: also four times that is under 5 %. p of (0.1, 0.111) is 0.033: under 5 % alone, and
    # over it as the first of four.
    names = ("P", "Q", "V", "W", "X")
    gains = {"P": (0.1, 0.102), "Q": (0.1, 0.111), "V": (0.1, -0.1), "W": (0.1, -0.2), "X": (0.2, -0.1)}
    found = [
        BlockValues(baseline=(1.0, 1.0), others={name: math.exp(gains[name][block]) for name in names})
        for block in (0, 1)
    ]
    contrasts = [Contrast(name, "B") for name in names]
    p_raw, q_raw = (stats.ttest_1samp(gains[name], 0).pvalue for name in ("P", "Q"))
    alone = judge(found, contrasts[1], [contrasts[0], *contrasts[2:]], {})
    assert alone[0].primary and alone[0].p_adjusted == pytest.approx(q_raw) and alone[0].finding == "supported"
    assert alone[1].p_adjusted == pytest.approx(4 * p_raw) and alone[1].finding == "supported"
    beside = judge(found, contrasts[0], contrasts[1:], {})
    assert beside[1].p_adjusted == pytest.approx(4 * q_raw) and beside[1].finding == "inconclusive"
    assert beside[1].estimate.low > 0  # the interval is that of the contrast alone
    assert beside[1].reasons[0].startswith("Holm's p is 0.13")


def test_a_failed_guardrail_decides_the_verdict_on_its_condition():
    found = blocks([0.10, 0.11, 0.12, 0.11])
    (judged,) = judge(found, P_B, [], {"P": ("peak memory",)})
    assert (judged.finding, judged.reasons) == ("guardrail failed", ("P, peak memory",))
    assert judge(found, P_B, [], {"P+S": ("peak memory",)})[0].finding == "supported"


def test_a_condition_that_failed_is_no_base_to_be_better_than():
    found = [BlockValues(baseline=(1.0, 1.0), others={"P": 0.5 + 0.01 * block, "P+R": 1.0}) for block in range(4)]
    failed = {"P": ("step p95", "tokens"), "P+R": ("reward",)}
    (judged,) = judge(found, Contrast("P+R", "P"), [], failed)
    assert (judged.finding, judged.reasons) == ("guardrail failed", ("P+R, reward", "P, step p95", "P, tokens"))
    assert judge(found, Contrast("P+R", "P"), [], {"P": ("step p95",)})[0].finding == "guardrail failed"


@pytest.mark.parametrize(
    ("treated", "base", "idle", "finding"),
    [
        ("P", "B", {}, "supported"),
        ("P", "B", {"P": ("P",)}, "inconclusive"),
        ("P", "B", {"P+R": ("P",)}, "supported"),  # of another condition
        ("P+R", "P", {"P+R": ("R",)}, "inconclusive"),
        ("P+R", "P", {"P+R": ("P",)}, "supported"),  # on in both: it makes no difference between them
        ("P+R(x)", "P(x)", {"P+R(x)": ("P",)}, "supported"),
        ("P+R(x)", "P(x)", {"P+R(x)": ("R",)}, "inconclusive"),
    ],
)
def test_a_switch_without_work_has_no_effect(treated, base, idle, finding):
    gains = [0.10, 0.11, 0.12, 0.11]
    logs = [{"P": gain, "P(x)": gain, "P+R": 2 * gain, "P+R(x)": 2 * gain} for gain in gains]
    found = [BlockValues(baseline=(1.0, 1.0), others={k: math.exp(v) for k, v in row.items()}) for row in logs]
    (judged,) = judge(found, Contrast(treated, base), [], {}, idle)
    assert judged.finding == finding
    told = [f"switch {idle[treated][0]} had nothing to do in any cell of {treated}"] if treated in idle else []
    assert list(judged.reasons) == (told if finding == "inconclusive" else [])


def test_a_contrast_without_cells_is_inconclusive():
    (judged,) = judge(blocks([0.1, 0.1]), PR_B, [], {})
    assert (judged.finding, judged.estimate, judged.reasons) == (
        "inconclusive",
        None,
        ("no block has both conditions",),
    )


def test_a_target_is_reached_missed_or_open():
    found = estimate([math.log(1.2), math.log(1.22), math.log(1.21), math.log(1.21)])  # 95 %: about +19.7 to +22.3 %
    assert [against_target(found, target) for target in (19, 21, 23)] == ["reached", "open", "missed"]
