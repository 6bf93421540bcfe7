"""The scope follows from what was run, at each boundary of the ordered table."""

from __future__ import annotations

import pytest

from stretto.bench.design import design
from stretto.bench.plan import Window
from stretto.bench.scope import Process, decide, planned


def cells(blocks: int, updates: int, conditions: tuple[str, ...] = ("B", "P+S", "B")) -> list[Process]:
    return [Process(name, block, 100 + block, updates) for block in range(blocks) for name in conditions]


def steady(**changes):
    case = {"windows": [Window(5, 44)], "warmup": 5, "processes": cells(2, 45), "declared": True} | changes
    return decide(**{"conditions": list({process.condition: 0 for process in case["processes"]})} | case)


def first_step(processes: list[Process], conditions: tuple[str, ...] = ("B", "P+S")):
    return decide([Window(0, 0)], 0, processes, conditions=conditions, declared=True)


def test_one_update_in_fresh_processes_is_a_first_step_and_says_nothing_about_sustained_training():
    found = first_step(cells(4, 1))
    assert (found.name, found.claim) == ("fresh_process_first_step", True)
    assert found.limit == (
        "First-step latency of this setting alone, over 4 blocks with 4 seeds: nothing about sustained training."
    )


def test_a_first_step_of_one_repetition_claims_nothing():
    found = first_step(cells(1, 1))
    assert (found.name, found.claim) == ("fresh_process_first_step", False)
    assert found.limit.startswith("No claim")


def test_the_first_update_of_longer_processes_is_transient():
    assert first_step(cells(4, 45)).name == "transient"
    assert first_step([*cells(3, 1), Process("B", 3, 103, 2)]).name == "transient"


def test_forty_measured_updates_after_warm_up_in_two_blocks_are_a_steady_state():
    found = steady()
    assert (found.name, found.claim, found.reasons) == ("steady_state", True, ())
    assert found.limit.startswith(
        "Sustained throughput of this setting alone, updates 5-44, over 2 blocks with 2 seeds"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"windows": [Window(5, 43)]}, "39 measured updates"),
        ({"windows": [Window(5, 24), Window(26, 44)]}, "39 measured updates"),
        ({"processes": [*cells(2, 45), Process("P+S", 2, 102, 44)]}, "39 measured updates"),
        ({"windows": [Window(0, 44)], "warmup": 6}, "39 measured updates"),
        ({"windows": [Window(4, 44)]}, "window 4-44 touches the warm-up of 5 updates"),
        ({"windows": [Window(0, 44)], "warmup": 0}, "no warm-up"),
        ({"declared": False}, "not the one that the runs began with"),
        ({"processes": cells(1, 45)}, "1 repetition of at least 2"),
        ({"processes": [*cells(3, 45, ("B",)), Process("P+S", 0, 100, 45)]}, "1 repetition of at least 2"),
        ({"processes": []}, "no run was accepted"),
    ],
)
def test_anything_else_is_transient_and_says_why(changes, reason):
    found = steady(**changes)
    assert (found.name, found.claim) == ("transient", False)
    assert any(reason in said for said in found.reasons) and found.limit.startswith("No claim, exploratory: ")


def test_two_windows_count_together():
    assert steady(windows=[Window(5, 24), Window(26, 45)], processes=cells(2, 46)).name == "steady_state"


def test_the_two_b_of_one_block_are_one_repetition():
    assert steady(processes=cells(1, 45, ("B", "B"))).name == "transient"


@pytest.mark.parametrize("updates", [1, 45])
def test_a_condition_of_which_no_run_was_accepted_leaves_no_claim(updates):
    """Every other rule of a steady state, or of a first step, holds."""
    conditions = ("B", "P", "P+S")
    found = first_step(cells(4, 1), conditions) if updates == 1 else steady(conditions=conditions)
    assert (found.name, found.claim) == ("transient", False)
    assert "no run of P was accepted" in found.limit and "repetition" not in found.limit


def test_a_claim_counts_the_blocks_and_seeds_that_every_condition_has():
    """B ran in 6 blocks with seeds 100 to 105; P only in blocks 0, 2 and 3, of which two have one seed."""
    base = cells(6, 45, ("B", "B"))
    treated = [Process("P", 0, 100, 45), Process("P", 2, 102, 45), Process("P", 3, 102, 45)]
    assert "over 3 blocks with 2 seeds:" in steady(processes=[*base, *treated]).limit


def test_seeds_that_repeat_are_counted_once():
    repeated = [Process(name, block, 7, 45) for block in range(4) for name in ("B", "P")]
    assert "over 4 blocks with 1 seed:" in steady(processes=repeated).limit


def test_a_plan_says_its_scope_before_anything_runs():
    blocks = design(("B", "P"), seeds=(1, 2), repetitions=1)
    assert planned(blocks, 45, [Window(5, 44)], 5).name == "steady_state"
    assert planned(design(("B", "P"), seeds=(1,), repetitions=1), 45, [Window(5, 44)], 5).name == "transient"
