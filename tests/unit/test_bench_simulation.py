"""Campaigns with known effects: how often each conclusion is wrong. Counts are from fixed seeds; the bounds leave three
standard deviations of the binomial.
"""

from __future__ import annotations

import math

import bench_case
import numpy as np
import pytest

from stretto.bench.arithmetic import BlockValues, Judgement, judge
from stretto.bench.attribution import factorial
from stretto.bench.detectable import aa_exceeded, by_rules
from stretto.bench.guardrails import GIB, CellFacts, PairedFacts, check_guardrails, p95_ratio
from stretto.bench.plan import Contrast, Guardrails, Window
from stretto.bench.resample import PairedSteps

PRIMARY = Contrast("P+S", "B")
OTHERS = [Contrast("P", "B"), Contrast("P+R", "B"), Contrast("B(c=1)", "B"), Contrast("P+S", "B(c=1)")]
NULL = {"P": 0.0, "P+R": 0.0, "P+S": 0.0, "B(c=1)": 0.0}


def slack(p: float, n: int) -> float:
    return 3 * math.sqrt(p * (1 - p) / n)


def judged(rng: np.random.Generator, runs: int, blocks: int, **case) -> list[tuple[Judgement, ...]]:
    effects = case.pop("effects", NULL)
    return [judge(bench_case.campaign(rng, effects, blocks, **case), PRIMARY, OTHERS, {}) for _ in range(runs)]


def share_supported(found: list[tuple[Judgement, ...]], null: set[str] = frozenset(NULL)) -> float:
    """Of campaigns in which any contrast without an effect is called supported."""
    return float(np.mean([any(j.finding == "supported" and j.contrast.treated in null for j in js) for js in found]))


def share_above_zero(found: list[tuple[Judgement, ...]]) -> float:
    """The same by p alone, without signs and A/A pairs."""
    return float(np.mean([any(j.p_adjusted <= 0.05 and j.estimate.mean > 0 for j in js) for js in found]))


# No effect -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_without_an_effect_at_most_one_plan_in_twenty_calls_anything_supported(blocks):
    runs = 3000
    found = judged(np.random.default_rng(blocks), runs, blocks)
    assert share_supported(found) <= 0.05
    assert share_above_zero(found) <= 0.05 + slack(0.05, runs)
    primary = np.mean([js[0].estimate.low > 0 for js in found])
    assert abs(primary - 0.025) <= slack(0.025, runs)
    # Of the interval, in either direction: 95 % cover the truth.
    cover = np.mean([js[0].estimate.low <= 0 <= js[0].estimate.high for js in found])
    assert abs(cover - 0.95) <= slack(0.95, runs)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"degrees": 3},
        {"effects": NULL | {"P": 0.5, "P+R": 0.5}},
        {"effects": NULL | {"P": -0.5, "P+R": 0.5}},
    ],
    ids=["normal", "heavy tails", "beside true effects", "beside a loss"],
)
def test_long_no_more_than_one_plan_in_twenty_is_wrong(blocks, case):
    runs = 6000
    found = judged(np.random.default_rng(100 + blocks), runs, blocks, **case)
    assert share_supported(found, null={"P+S", "B(c=1)"} if "effects" in case else set(NULL)) <= 0.05


def test_a_cold_first_cell_fools_the_interval_and_not_the_aa_rule():
    # The first B of each block is 5 % slower, so that every condition seems 2.5 % faster than the mean of both B.
    found = judged(np.random.default_rng(3), 1000, 6, cold=0.05)
    assert share_above_zero(found) > 0.3
    assert share_supported(found) <= 0.05


# Effects -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [2, 4, 6])
def test_the_stated_effect_is_supported_with_the_stated_power(blocks):
    runs, deviation = 2000, bench_case.CELL * math.sqrt(1.5)
    effect = deviation * by_rules(blocks, math.sqrt(2 / 1.5))
    found = judged(np.random.default_rng(10 + blocks), runs, blocks, effects=NULL | {"P+S": effect})
    assert abs(np.mean([js[0].finding == "supported" for js in found]) - 0.8) <= slack(0.8, runs)


@pytest.mark.parametrize("degrees", [None, 3])
def test_intervals_cover_the_true_effect(degrees):
    runs = 2000
    found = judged(np.random.default_rng(20), runs, 4, effects=NULL | {"P+S": 0.3}, degrees=degrees)
    cover = np.mean([js[0].estimate.low <= 0.3 <= js[0].estimate.high for js in found])
    assert cover >= 0.95 - slack(0.95, runs)


def test_a_planted_interaction_is_recovered_and_the_shares_add_up():
    # P 0.10 and R 0.20 alone, 0.05 more together: shares 0.125 and 0.225 of 0.35.
    rng, truth = np.random.default_rng(30), (0.125, 0.225, 0.05, 0.35)
    runs, found = 2000, []
    for _ in range(runs):
        blocks: list[BlockValues] = bench_case.campaign(rng, {"P": 0.10, "R": 0.20, "P+R": 0.35}, 5)
        found.append(factorial(blocks, ("P", "R")))
    for name, true in zip(("first", "second", "interaction", "total"), truth, strict=True):
        estimates = [getattr(each, name) for each in found]
        error = np.std([e.mean for e in estimates]) / math.sqrt(runs)
        assert abs(np.mean([e.mean for e in estimates]) - true) <= 3 * error
        assert abs(np.mean([e.low <= true <= e.high for e in estimates]) - 0.95) <= slack(0.95, runs)
    assert all(each.first.mean + each.second.mean == pytest.approx(each.total.mean) for each in found)


# Guardrails ----------------------------------------------------------------------------------------------------------


def noisy_steps(rng: np.random.Generator, blocks: int, between: float, factor: float = 1.0) -> list[PairedSteps]:
    found = []
    for _ in range(blocks):
        runs = np.exp(between * rng.standard_normal(3)) * (factor, 1.0, 1.0)
        treated, *base = (bench_case.steps(rng, 40, seconds) for seconds in runs)
        found.append(PairedSteps(treated=treated, base=tuple(base)))
    return found


def share_slow(seed: int, runs: int, blocks: int, between: float, factor: float = 1.0) -> float:
    rng = np.random.default_rng(seed)
    lower = [p95_ratio(noisy_steps(rng, blocks, between, factor), [Window(0, 39)], 200)[1] for _ in range(runs)]
    return float(np.mean(np.array(lower) > 1.05))


def test_the_step_guardrail_seldom_fails_without_an_effect_and_finds_one():
    assert share_slow(40, 200, 4, between=0.05) <= 0.05
    assert share_slow(41, 20, 4, between=0.02, factor=1.2) >= 0.8


@pytest.mark.long
@pytest.mark.parametrize("blocks", [2, 3, 4, 6])
@pytest.mark.parametrize("between", [0.01, 0.05, 0.1, 0.2])
def test_long_the_step_guardrail_fails_at_most_one_time_in_twenty_without_an_effect(blocks, between):
    runs = 500
    assert share_slow(blocks, runs, blocks, between) <= 0.05 + slack(0.05, runs)


@pytest.mark.parametrize("blocks", [2, 4])
def test_reward_and_truncation_leave_the_aa_spread_as_often_as_stated(blocks):
    rng, runs, failed = np.random.default_rng(50 + blocks), 800, {"reward": 0, "truncation": 0}
    step = bench_case.steps(rng, 1)

    def cell() -> CellFacts:
        reward, truncated = 0.5 + 0.01 * rng.standard_normal(2)
        return CellFacts(
            steps=step, peak_memory_bytes={"host": GIB}, multimodal_bytes=1.0, reward=reward, truncated=truncated
        )

    for _ in range(runs):
        paired = [PairedFacts(treated=cell(), base=(cell(), cell())) for _ in range(blocks)]
        for row in check_guardrails(paired, [Window(0, 0)], Guardrails()):
            if row.name in failed:
                failed[row.name] += row.status == "failed"
            else:
                assert row.status == "passed"
    for count in failed.values():
        assert abs(count / runs - aa_exceeded(blocks)) <= slack(aa_exceeded(blocks), runs)
