"""Two campaigns side by side."""

from __future__ import annotations

import math

import pytest
from bench_breaks import edit_manifest
from bench_folder import alike, make_campaign, plan_of

from stretto.bench.analyze import analyze
from stretto.bench.arithmetic import percent
from stretto.bench.compare import compare, text


def made(path, plan, faster, **given):
    """P is ``faster`` than B by block; all cells of block 1 are twice as fast as those of block 0."""

    def numbers(cell):
        seconds = 1.0 if cell.condition == "B" else 1 / faster[cell.block]
        return alike(cell, plan.updates, seconds=seconds / (1 + cell.block))

    return make_campaign(path, plan, numbers, **given)


@pytest.fixture(scope="module")
def plan():
    return plan_of(conditions=("B", "P"), primary=("P", "B"))


def test_effects_stand_side_by_side_and_throughputs_are_paired_in_the_same_boot(tmp_path, plan):
    first, second = (analyze(made(tmp_path / name, plan, f)) for name, f in (("a", (1.1, 1.3)), ("b", (1.2, 1.5))))
    found = compare(first, second)
    assert found.differences == ()
    assert percent(found.first.effects["P over B"][0].mean) == pytest.approx(100 * (math.sqrt(1.1 * 1.3) - 1))
    assert found.across["B"].values == pytest.approx((0, 0))
    assert found.across["P"].values == pytest.approx((math.log(1.2 / 1.1), math.log(1.5 / 1.3)))
    said = text(found)
    assert "nothing that is known" in said
    assert "P over B" in said and "+19.6 % [" in said and "inconclusive" in said
    assert "1,414 (1,000 to 2,000)" in said  # of B: the geometric mean of 1000, 1000, 2000, 2000


def test_a_finding_without_a_scope_is_no_claim(tmp_path, plan):
    """P is 20 % faster in both blocks, within 0.1 %; 4 updates are no steady state."""
    found = compare(*[analyze(made(tmp_path / "a", plan, (1.2, 1.201)))] * 2)
    assert found.first.effects["P over B"][1] == "supported (no claim)"
    assert "supported (no claim)" in text(found)


def test_nothing_is_said_across_machines(tmp_path, plan):
    first = analyze(made(tmp_path / "a", plan, (1.1, 1.3)))
    second = analyze(made(tmp_path / "b", plan, (1.1, 1.3), boots=lambda block: ("machine-b", "boot-b")))
    found = compare(first, second)
    assert found.across == {}
    assert "different machines or in different boots" in text(found)


def test_what_differs_is_named_with_both_values(tmp_path, plan):
    first = made(tmp_path / "a", plan, (1.1, 1.3))
    second = made(tmp_path / "b", plan.model_copy(update={"windows": ("3-5",), "name": "other"}), (1.1, 1.3))
    for attempt in (second / "cells").glob("*/*"):
        edit_manifest(attempt, "versions.torch", "2.14")
    found = compare(analyze(first), analyze(second))
    assert found.differences == (
        'windows: ["2-5"], now ["3-5"]',
        'versions.torch: "2.13.0+cpu", now "2.14"',
    )
    assert "other windows" in found.across_told
