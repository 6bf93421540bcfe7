"""Each guardrail at its bound, by hand; what was not measured is no pass; a slow tail is found."""

from __future__ import annotations

from dataclasses import replace

import bench_case
import numpy as np
import pytest

from stretto.bench.guardrails import GIB, CellFacts, Guardrail, PairedFacts, check_guardrails, p95_ratio
from stretto.bench.plan import Guardrails, Window
from stretto.bench.resample import PairedSteps, Steps

WINDOW = [Window(5, 44)]


def cell(**changes) -> CellFacts:
    steps = Steps(tokens=np.full(40, 1000.0), seconds=np.ones(40))
    facts = {"steps": steps, "peak_memory_bytes": {"gpu": 40.0 * GIB}, "multimodal_bytes": 1e9}
    return CellFacts(**facts | {"reward": 0.5, "truncated": 0.1} | changes)


def status(*blocks: PairedFacts, **limits) -> dict[str, str]:
    return {row.name: row.status for row in check_guardrails(blocks, WINDOW, Guardrails(**limits))}


def against(treated: CellFacts, first: CellFacts | None = None, last: CellFacts | None = None) -> PairedFacts:
    return PairedFacts(treated=treated, base=(first or cell(), last or cell()))


EQUAL = against(cell())
NAMES = ("step p95", "peak memory", "tokens", "multimodal bytes", "reward", "truncation")


def test_equal_runs_pass_all():
    assert status(EQUAL, EQUAL) == dict.fromkeys(NAMES, "passed")


def test_memory_may_grow_by_a_gibibyte_or_three_percent_whichever_is_more():
    # 3 % of 40 GiB is 1.2 GiB; 3 % of 10 GiB is 0.3 GiB, so that 1 GiB counts.
    of = {base: [cell(peak_memory_bytes={"gpu": base * GIB})] * 2 for base in (10, 40)}
    for base, peak, expected in (
        (40, 41.19, "passed"),
        (40, 41.21, "failed"),
        (10, 11, "passed"),
        (10, 11.01, "failed"),
    ):
        block = against(cell(peak_memory_bytes={"gpu": peak * GIB}), *of[base])
        assert status(EQUAL, block)["peak memory"] == expected
    assert status(against(cell(peak_memory_bytes={"gpu": 42 * GIB})), peak_memory_percent=6)["peak memory"] == "passed"


def test_memory_is_held_device_by_device():
    base = cell(peak_memory_bytes={"gpu 0": 40 * GIB, "host": 4 * GIB})
    moved = cell(peak_memory_bytes={"gpu 0": 30 * GIB, "host": 6 * GIB})
    rows = {row.name: row for row in check_guardrails([against(moved, base, base)], WINDOW, Guardrails())}
    row = rows["peak memory"]
    assert row.status == "failed" and row.told.startswith("host: 6.000 GiB against 4.000")


@pytest.mark.parametrize("name", ["tokens", "multimodal bytes"])
def test_work_may_differ_by_one_percent_in_every_block(name):
    def work(factor: float) -> CellFacts:
        if name == "multimodal bytes":
            return cell(multimodal_bytes=1e9 * factor)
        return cell(steps=replace(cell().steps, tokens=np.full(40, 1000.0) * factor))

    assert status(EQUAL, against(work(0.99)))[name] == "passed"
    assert status(EQUAL, against(work(1.0101)))[name] == "failed"
    # A mean over blocks would hide these two.
    assert status(against(work(1.02)), against(work(0.98)))[name] == "failed"
    assert status(against(work(1.02)), workload_percent=2.5)[name] == "passed"


def test_a_workload_without_images_is_equal():
    none = cell(multimodal_bytes=0.0)
    assert status(against(none, none, none))["multimodal bytes"] == "passed"
    assert status(against(cell(), none, none))["multimodal bytes"] == "failed"


@pytest.mark.parametrize(("name", "field"), [("reward", "reward"), ("truncation", "truncated")])
def test_the_mean_difference_stays_within_the_largest_aa_difference(name, field):
    def block(treated: float, first: float, last: float) -> PairedFacts:
        return against(*(cell(**{field: value}) for value in (treated, first, last)))

    # Differences +0.25 and -0.125: mean 0.0625. A/A 0 and 0.0625: just within; then 0.03125: outside.
    assert status(block(0.75, 0.5, 0.5), block(0.40625, 0.5, 0.5625))[name] == "passed"
    assert status(block(0.75, 0.5, 0.5), block(0.390625, 0.5, 0.53125))[name] == "failed"


@pytest.mark.parametrize(("name", "field"), [("reward", "reward"), ("truncation", "truncated")])
def test_where_runs_of_b_are_the_same_bits_only_the_same_bits_pass(name, field):
    """No A/A difference says how far sound runs lie apart, so that one is neither a pass nor a failure."""

    def row(*treated: float) -> Guardrail:
        blocks = [against(cell(**{field: value}), *[cell(**{field: 0.5})] * 2) for value in treated]
        return next(row for row in check_guardrails(blocks, WINDOW, Guardrails()) if row.name == name)

    assert row(0.5, 0.5).status == "passed"
    found = row(0.5, 0.75)
    assert found.status == "not measured"
    assert found.told == (
        "two runs of B are the same bits, so that nothing says how far sound runs lie apart; mean difference +0.125"
    )
    assert row(0.25, 0.75).status == "not measured"  # differences that cancel are differences


@pytest.mark.parametrize("at", ["treated", "base"])
@pytest.mark.parametrize(("name", "field"), [("reward", "reward"), ("truncation", "truncated")])
def test_a_figure_that_no_line_has_is_not_measured(name, field, at):
    none, first = cell(**{field: float("nan")}), cell(**{field: 0.25})
    block = against(none, first) if at == "treated" else against(cell(), first, none)
    assert status(EQUAL, block)[name] == "not measured"


def test_what_was_not_measured_is_no_pass():
    assert status(against(cell(peak_memory_bytes={})))["peak memory"] == "not measured"
    both = cell(peak_memory_bytes={"gpu": GIB, "host": GIB})
    assert status(against(both))["peak memory"] == "not measured"
    assert status(against(cell(multimodal_bytes=None)))["multimodal bytes"] == "not measured"
    single = PairedFacts(treated=cell(), base=(cell(),))
    assert [status(single)[name] for name in ("reward", "truncation")] == ["not measured"] * 2
    with pytest.raises(ValueError, match="at least one block"):
        check_guardrails([], WINDOW, Guardrails())


def test_the_pooled_ratio_by_hand():
    # p95 of 1 … 20 by linear interpolation lies at rank 0.95 * 19 = 18.05 from 0: 19.05; of the doubled steps 38.1.
    ramp = Steps(tokens=np.ones(20), seconds=np.arange(1.0, 21.0))
    double = replace(ramp, seconds=2 * ramp.seconds)
    ratio, lower = p95_ratio([PairedSteps(treated=double, base=(ramp,))], [Window(0, 19)], draws=100)
    assert ratio == pytest.approx(2.0) and lower < 2.0


def test_one_slow_run_of_four_is_no_evidence_and_four_are():
    def blocks(factors: list[float]) -> list[PairedSteps]:
        rng = np.random.default_rng(2)
        return [
            PairedSteps(
                treated=bench_case.steps(rng, 40, factor), base=(bench_case.steps(rng, 40), bench_case.steps(rng, 40))
            )
            for factor in factors
        ]

    # Every step of one run within a block says the same; only blocks say whether a condition does it.
    one_ratio, one_lower = p95_ratio(blocks([1.6, 1.0, 1.0, 1.0]), WINDOW)
    assert one_ratio > 1.2 and one_lower < 1.05
    assert p95_ratio(blocks([1.2, 1.2, 1.2, 1.2]), WINDOW)[1] > 1.05
    assert p95_ratio(blocks([1.0, 1.0, 1.0, 1.0]), WINDOW)[1] < 1.05


def test_the_step_guardrail_needs_more_than_a_ratio_above_its_bound():
    def slower(factor: float) -> PairedFacts:
        return against(cell(steps=replace(cell().steps, seconds=np.full(40, factor))))

    # The p95 of all 160 steps is that of the slow run, a ratio of 1.6; many draws are without that run.
    assert status(slower(1.6), EQUAL, EQUAL, EQUAL)["step p95"] == "passed"
    assert status(*[slower(1.06)] * 4)["step p95"] == "failed"
    assert status(*[slower(1.06)] * 4, step_p95_ratio=1.07)["step p95"] == "passed"
