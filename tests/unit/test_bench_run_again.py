"""A campaign that goes on: what counts of what was run, where it runs again, and what stops it."""

from __future__ import annotations

import pytest
from bench_stand import ALONE, FIRST, PLAN, SECOND, WITH_ALONE, here, make_stand

from stretto.bench.campaign import attempts
from stretto.bench.plan_file import parse_plan
from stretto.resume import locked
from stretto.types import ConfigError, StrettoError


@pytest.fixture
def stand(tmp_path, monkeypatch):
    return make_stand(tmp_path, monkeypatch)


def test_the_last_attempt_at_a_cell_counts_and_no_earlier_one_that_finished(stand, monkeypatch):
    stand.fail("01-2-P")
    stand.run()
    here(monkeypatch, "boot-2")
    stand.fail("01-1-P+S")
    stand.run()
    assert stand.ran == SECOND
    here(monkeypatch, "boot-1")  # where its first attempt had finished
    stand.behave()
    stand.run()
    assert stand.ran == SECOND


def test_what_a_failed_cell_left_going_is_not_run_beside(stand):
    stand.fail("00-1-P")
    stand.run()
    run_dir = stand.folder / "cells" / "00-1-P" / "attempt-1" / "run"
    with locked(run_dir), pytest.raises(StrettoError, match="in use by a run that is still going"):
        stand.run()
    assert stand.ran == []


def test_a_window_that_a_condition_never_reaches_is_refused_before_anything_runs(stand):
    """4 updates, 2 to a partition, are partitions 0 and 1; the window is 1 to 3."""
    with pytest.raises(ConfigError, match=r'condition B: windows = \["1-3"\].*4 updates are 2 of them.*end it at 1'):
        stand.run(parse_plan(PLAN | {"settings": {"staleness.max": 0, "actor.minis_per_partition": 2}}))
    variants = {"B(m=2)": {"actor.minis_per_partition": 2}}
    plan = parse_plan(PLAN | {"conditions": ["P", "P+S", "B(m=2)"], "variants": variants})
    with pytest.raises(ConfigError) as caught:
        stand.run(plan)
    (problem,) = caught.value.problems[:-1]
    assert problem.startswith("condition B(m=2): windows") and stand.ran == []


def test_a_stage_alone_runs_in_the_boot_of_the_first_block_or_not_at_all(stand, monkeypatch):
    plan = parse_plan(WITH_ALONE | {"seeds": [5]})
    stand.fail("training-S")
    stand.run(plan)
    stand.behave()
    here(monkeypatch, "boot-2")
    assert stand.run(plan).finished == 4 + 4 and stand.ran == []
    assert "say nothing of it, and are not run: training-S" in stand.text
    here(monkeypatch, "boot-1")
    stand.run(plan)
    assert stand.ran == ["training-S"]


def test_where_the_first_block_runs_again_elsewhere_so_do_stages_alone(stand, monkeypatch):
    plan = parse_plan(WITH_ALONE | {"seeds": [5]})
    stand.fail("00-1-P")
    stand.run(plan)
    stand.behave()
    here(monkeypatch, "boot-2")
    stand.run(plan)
    assert stand.ran == [*FIRST, *ALONE]


def test_another_environment_is_refused_with_both_values(stand, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    stand.fail("00-1-P")
    stand.run()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    monkeypatch.setenv("EDITOR", "another")
    told = '00-0-B ran in another.*MALLOC_ARENA_MAX = unset, now "4"\n  OMP_NUM_THREADS = "1", now "2"$'
    with pytest.raises(StrettoError, match=f"(?s){told}"):
        stand.run()
    assert stand.ran == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    stand.behave()
    assert stand.run().exit_code == 0 and stand.ran == ["00-1-P"]


def judge(monkeypatch, *reasons: str) -> None:
    """Of the first attempt at 00-1-P; all others are found good."""
    monkeypatch.setattr(
        "stretto.bench.run.quick",
        lambda folder, plan, attempt: reasons if (attempt.name, attempt.number) == ("00-1-P", 1) else (),
    )


def test_a_cell_that_would_be_rejected_is_told_of_at_once(stand, monkeypatch):
    judge(monkeypatch, *(f"not finite: metric {number}" for number in range(7)))
    assert stand.run().exit_code == 0 and stand.ran == [*FIRST, *SECOND]
    assert "would be rejected: not finite: metric 4\n    and for 2 more reasons" in stand.text
    assert "metric 5" not in stand.text
    assert stand.run().exit_code == 0 and stand.ran == []


@pytest.mark.parametrize("rule", ["commit", "dependencies", "environment", "hardware"])
def test_other_surroundings_stop_a_campaign_and_the_cell_runs_again(stand, monkeypatch, rule):
    judge(monkeypatch, "not finite: loss", f"{rule}: it was 1, and is 2")
    with pytest.raises(
        StrettoError, match=f"block 0 P seed 5 would be rejected, and so would all .*: {rule}: it was 1"
    ):
        stand.run()
    assert stand.ran == FIRST[:2]
    assert stand.run().exit_code == 0
    assert stand.ran == [*FIRST[1:], *SECOND]
    assert f"00-1-P runs again, for its last attempt would be rejected: {rule}: it was 1" in stand.text
    assert [a.number for a in attempts(stand.folder) if a.name == "00-1-P"] == [1, 2]


def test_what_an_analysis_would_say_is_asked_of_real_files(stand):
    """The script writes a manifest without a config, and metrics without any value."""
    stand.run()
    assert "    would be rejected: " in stand.text
