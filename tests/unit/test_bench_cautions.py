"""What a reader is told beside the verdicts: each caution of a campaign that gives cause for it, and of no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bench_breaks import edit_lines, edit_manifest, edit_note, rehash
from bench_folder import alike, attempt_of, make_campaign, make_cell, plan_of

from stretto.bench.analyze import analyze
from stretto.bench.campaign import attempts, file_hash
from stretto.bench.design import Cell
from stretto.bench.journal import note_begun, note_closed
from stretto.bench.plan import Guardrails
from stretto.types import StrettoError

PLAN = plan_of(conditions=("B", "P", "P+S"), windows=("2-4",))
"""Two blocks, B P P+S B and B P+S P B: a whole square. Its window ends before the last update (staleness.max = 1)."""
NO_JOURNAL = "the campaign has no journal: nothing says whether an attempt was removed from it"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_campaign(tmp_path_factory.mktemp("whole") / "campaign", PLAN)


@pytest.fixture
def campaign(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "campaign"))


def at(minute: int) -> str:
    return f"2026-11-30T12:{minute:02d}:00.000+00:00"


def test_a_campaign_without_cause_for_caution(whole):
    found = analyze(whole)
    assert (found.warnings, found.square_complete, found.removed) == ((NO_JOURNAL,), True, ())


# The order in which cells ran ----------------------------------------------------------------------------------------


def order(campaign: Path, *names: str) -> None:
    for minute, name in enumerate(names):
        edit_note(attempt_of(campaign, name), started=at(minute))


def test_cells_that_ran_in_their_order_are_no_cause(campaign):
    order(campaign, "00-0-B", "00-1-P", "00-2-P+S", "00-3-B", "01-0-B", "01-1-P+S", "01-2-P", "01-3-B")
    assert analyze(campaign).warnings == (NO_JOURNAL,)


def test_blocks_may_run_in_any_order(campaign):
    order(campaign, "01-0-B", "01-1-P+S", "01-2-P", "01-3-B", "00-0-B", "00-1-P", "00-2-P+S", "00-3-B")
    assert analyze(campaign).square_complete


def test_a_cell_that_ran_after_those_behind_it_is_named_and_still_counts(campaign):
    order(campaign, "00-0-B", "00-2-P+S", "00-3-B", "00-1-P")
    found = analyze(campaign)
    assert {cell.status for cell in found.cells} == {"accepted"}
    assert not found.square_complete
    (told,) = [text for text in found.warnings if text != NO_JOURNAL]
    assert told.startswith("00-1-P ran after 00-2-P+S, 00-3-B, before which it stands in its block:")


# Attempts that are gone ----------------------------------------------------------------------------------------------


def with_journal(campaign: Path) -> None:
    for attempt in attempts(campaign):
        key = ("cells", attempt.name, attempt.number)
        note_begun(campaign, key, at(0))
        note_closed(campaign, key, file_hash(attempt.path / "cell.json"))


def test_a_campaign_in_which_every_attempt_is_as_it_was_left(campaign):
    with_journal(campaign)
    found = analyze(campaign)
    assert (found.warnings, found.removed) == ((), ())


def test_an_attempt_that_was_removed_is_told(campaign):
    """The cell ran twice; the first time is gone, and the second is all that is seen."""
    cell = Cell(block=0, position=1, condition="P", seed=0)
    make_cell(campaign, PLAN, cell, alike(cell, PLAN.updates, seconds=0.5), attempt=2)
    with_journal(campaign)
    shutil.rmtree(attempt_of(campaign, "00-1-P"))
    found = analyze(campaign)
    (gone,) = found.removed
    assert gone.startswith("cells/00-1-P, attempt 1")
    assert f"the folders are not as the campaign's journal has them: {gone}" in found.warnings
    assert found.as_json()["removed"] == [gone]


def test_a_note_that_was_changed_is_told(campaign):
    with_journal(campaign)
    edit_note(attempt_of(campaign, "00-1-P"), others_before=0.0)
    (changed,) = analyze(campaign).removed
    assert changed.startswith("cells/00-1-P, attempt 1")


# Attempts that failed ------------------------------------------------------------------------------------------------


def test_a_condition_that_fails_now_and_then_is_told_though_its_retry_counts(campaign):
    edit_note(attempt_of(campaign, "00-1-P"), status="failed", exit_code=9, reason="out of memory")
    cell = Cell(block=0, position=1, condition="P", seed=0)
    make_cell(campaign, PLAN, cell, alike(cell, PLAN.updates), attempt=2)
    found = analyze(campaign)
    first, second = [each for each in found.cells if each.name == "00-1-P"]
    assert (first.status, second.status) == ("rejected", "accepted")
    assert first.reasons == ("failed with exit code 9: out of memory", "attempt 2 stands in its place")
    assert "P failed in 1 of 3 attempts" in found.warnings
    assert not any("P+S failed" in text or "B failed" in text for text in found.warnings)


# The plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "bound", "told"),
    [
        (("2-4",), 1, None),
        (("2-5",), 1, "window 2-5 holds some of the last 1 of 6 updates"),
        (("2-5",), 0, None),
        (("2-4",), 2, "window 2-4 holds some of the last 2 of 6 updates"),
        (("2-3", "4-4"), 1, None),
        (("2-2", "4-4"), 1, "the windows 2-2, 4-4 leave out updates between them"),
    ],
)
def test_windows_that_do_not_show_what_a_long_run_does(tmp_path, windows, bound, told):
    settings = {**PLAN.settings, "staleness.max": bound}
    plan = plan_of(conditions=("B", "P+S"), windows=windows, settings=settings)

    def numbers(cell):
        return alike(cell, plan.updates) | {"staleness_max": [0] * plan.updates}

    found = [text for text in analyze(make_campaign(tmp_path / "campaign", plan, numbers)).warnings if "window" in text]
    assert [text.startswith(told or "-") for text in found] == [True] * (told is not None), found


def test_bounds_that_are_looser_than_usual(tmp_path):
    bounds = Guardrails(step_p95_ratio=1.2, peak_memory_gib=0.5, workload_percent=2)
    plan = PLAN.model_copy(update={"guardrails": bounds})
    found = [text for text in analyze(make_campaign(tmp_path / "campaign", plan)).warnings if "guardrail" in text]
    assert [text.split()[1] for text in found] == ["step_p95_ratio", "workload_percent"]
    assert "1.2" in found[0] and "1.05" in found[0]


def test_a_guardrail_that_nobody_could_check(campaign):
    attempt = attempt_of(campaign, "00-1-P")
    (attempt / "hardware.jsonl").unlink()
    rehash(attempt)
    found = [text for text in analyze(campaign).warnings if "guardrail" in text]
    assert found == ["P: guardrail peak memory is not measured: a run has no memory samples of a device"]


def test_guardrails_that_have_nothing_to_compare(campaign):
    for name in ("00-1-P", "01-2-P"):
        edit_note(attempt_of(campaign, name), status="failed", exit_code=1)
    found = [text for text in analyze(campaign).warnings if "guardrail" in text]
    assert found == ["P: no guardrail is measured, since no block has it beside its B"]


# Switches without work -----------------------------------------------------------------------------------------------


def early(rows):
    """Every group was put before the first chunk was claimed: nothing is left for S to overlap."""
    return [row | ({"start_ns": 1, "end_ns": 2} if row["name"] == "plane.put" else {}) for row in rows]


@pytest.mark.parametrize("cells", [("00-1-P+S",), ("00-1-P+S", "01-1-P+S")])
def test_a_switch_that_had_nothing_to_do_in_any_cell_supports_nothing(tmp_path, cells):
    plan = plan_of(conditions=("B", "P+S"), windows=("2-4",))

    def numbers(cell):
        return alike(cell, plan.updates, seconds=1.0 if cell.condition == "B" else 0.5 + 0.001 * cell.block)

    campaign = make_campaign(tmp_path / "campaign", plan, numbers)
    for name in cells:
        edit_lines(attempt_of(campaign, name), "run/events.jsonl", early)
    found = analyze(campaign)
    assert {cell.status for cell in found.cells} == {"accepted"}
    judgement = found.verdicts[0].judgement
    if len(cells) == 2:
        assert judgement.finding == "inconclusive"
        assert judgement.reasons == ("switch S had nothing to do in any cell of P+S",)
    else:
        assert judgement.finding == "supported"
    assert any(text.startswith("00-1-P+S: switch S had nothing to do:") for text in found.warnings)


# What cannot be read -------------------------------------------------------------------------------------------------


def test_a_file_that_may_not_be_read_is_named(campaign, monkeypatch):
    """An analysis may run as a user whom the folder's owner gave no right: here the system says so of one file."""

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("stretto.bench.analyze.read_events", refuse)
    with pytest.raises(StrettoError, match=r"run/events\.jsonl cannot be read: Permission denied"):
        analyze(campaign)


# The pool ------------------------------------------------------------------------------------------------------------


def test_a_pool_that_shares_too_few_cores_is_told_once(campaign):
    """Two workers, one actor rank and one engine: four processes on two cores."""
    for name in ("00-0-B", "00-1-P", "00-2-P+S", "00-3-B", "01-0-B", "01-1-P+S", "01-2-P", "01-3-B"):
        edit_manifest(attempt_of(campaign, name), "hardware.cores_usable", 2)
    (told,) = [text for text in analyze(campaign).warnings if "workers" in text]
    assert told.startswith("P, P+S: 2 processor workers, 1 actor rank and 1 engine share 2 cores: ")
