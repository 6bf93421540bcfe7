"""What the analyzer finds of cells with known numbers, worked by hand."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from bench_breaks import edit_lines, edit_manifest, rehash, tree_hash
from bench_folder import ALONE, GIB, GPU, PIXEL_BYTES, alike, attempt_of, make_campaign, plan_of

from stretto.bench.analyze import analyze
from stretto.bench.arithmetic import percent
from stretto.bench.phases import PHASES
from stretto.bench.plan import Contrast


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return analyze(make_campaign(tmp_path_factory.mktemp("analyze") / "campaign", gpu=True, alone=ALONE))


def verdict_on(found, treated, base="B"):
    (verdict,) = [each for each in found.verdicts if each.judgement.contrast == Contrast(treated, base)]
    return verdict


# Throughput and verdicts ---------------------------------------------------------------------------------------------


def test_throughput_is_tokens_over_seconds_of_the_window_alone(tmp_path):
    plan = plan_of(updates=5, warmup=2, windows=("2-4",))
    numbers = {"tokens": [1000, 1000, 1000, 1000, 4000], "step_s": [30, 30, 1, 1, 10]}
    for cell in analyze(make_campaign(tmp_path / "campaign", plan, lambda cell: numbers)).cells:
        assert (cell.throughput.tokens, cell.throughput.seconds, cell.throughput.per_s) == (6000, 12, 500)


def test_the_published_example(tmp_path):
    """Per-seed throughputs of the published runs: +39.00 %, +52.92 % and +26.34 %."""
    published = {("B", 0): 964.6778, ("B", 1): 1241.8265, ("P+R", 0): 1475.1722, ("P+R", 1): 1568.9149}
    plan = plan_of(conditions=("B", "P+R"), order="pairs", primary=("P+R", "B"), targets_percent={"P+R": 39.0})

    def numbers(cell):
        return alike(cell, plan.updates, seconds=1000 / published[cell.condition, cell.seed])

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers))
    (verdict,) = found.verdicts
    judgement = verdict.judgement
    assert percent(judgement.estimate.mean) == pytest.approx(39.00, abs=0.005)
    assert [percent(value) for value in judgement.estimate.values] == pytest.approx([52.92, 26.34], abs=0.005)
    assert percent(judgement.estimate.low) == pytest.approx(-59, abs=0.5)
    assert percent(judgement.estimate.high) == pytest.approx(368, abs=0.5)
    assert (judgement.finding, found.aa, verdict.target) == ("inconclusive", (), (39.0, "open"))
    # 11.55 deviations between blocks at 2 blocks; the deviation of two values is their distance over the root of 2
    apart = math.log(1475.1722 / 964.6778) - math.log(1568.9149 / 1241.8265)
    assert verdict.detectable == pytest.approx(11.55 * apart / math.sqrt(2), rel=1e-3)


def steady_plan(**changes):
    return plan_of(seeds=(0, 1, 2, 3), updates=42, warmup=2, windows=("2-41",), **changes)


def test_a_steady_state_with_a_known_effect_is_supported(tmp_path):
    """P+S is 1.1, 1.2, 1.3, 1.4 times as fast as the geometric mean of its block's two B, which are 1 % apart."""
    plan = steady_plan(conditions=("B", "P+S"), targets_percent={"P+S": 10.0})

    def numbers(cell):
        if cell.condition == "B":
            return alike(cell, plan.updates, seconds=1.0 if cell.position == 0 else 1 / 1.01)
        return alike(cell, plan.updates, seconds=1 / (math.sqrt(1.01) * (1.1 + 0.1 * cell.block)))

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers))
    verdict = verdict_on(found, "P+S")
    assert found.scope.name == "steady_state" and found.scope.claim
    assert found.square_complete
    assert verdict.judgement.finding == "supported", verdict.judgement.reasons
    expected = [math.log(1.1 + 0.1 * block) for block in range(4)]
    assert verdict.judgement.estimate.values == pytest.approx(expected)
    assert found.aa == pytest.approx([math.log(1.01)] * 4)
    assert verdict.target == (10.0, "open")  # the interval over blocks reaches from +6.5 % to +46 %
    assert verdict.within_runs[0] == pytest.approx(verdict.within_runs[1])  # steps of a run are all alike
    assert found.step_s["B"] == pytest.approx(1 / math.sqrt(1.01))


def test_a_guardrail_that_fails_decides_the_verdict(tmp_path):
    plan = steady_plan(conditions=("B", "P+S"), targets_percent={"P+S": 10.0})

    def numbers(cell):
        updates = [0.5 + 0.01 * cell.position if cell.condition == "B" else 0.91] * plan.updates  # A/A: 0.02
        seconds = 1.0 if cell.condition == "B" else 0.5
        return alike(cell, plan.updates, seconds=seconds) | {"reward_mean": updates}

    verdict = verdict_on(analyze(make_campaign(tmp_path / "campaign", plan, numbers)), "P+S")
    judgement = verdict.judgement
    assert percent(judgement.estimate.low) == pytest.approx(100)
    assert verdict.target == (10.0, "open")  # what is not supported reaches nothing
    assert judgement.finding == "guardrail failed"
    assert judgement.reasons[0].startswith("P+S, reward: mean difference +0.4;")


def test_the_first_step_alone(tmp_path):
    plan = plan_of(seeds=(0, 1, 2, 3), updates=1, warmup=0, windows=("0-0",), order="pairs", conditions=("B", "P+S"))
    found = analyze(make_campaign(tmp_path / "campaign", plan))
    assert [cell.status for cell in found.cells] == ["accepted"] * 8, found.cells[0].reasons
    assert (found.scope.name, found.scope.claim) == ("fresh_process_first_step", True)


def test_factorials_take_the_place_of_increments(tmp_path):
    """In logs P brings 0.1, S 0.2 and both together 0.05 more."""
    plan = plan_of(conditions=("B", "P", "S", "P+S"), seeds=(0, 1))
    logs = {"B": 0.0, "P": 0.1, "S": 0.2, "P+S": 0.35}

    def numbers(cell):
        return alike(cell, plan.updates, seconds=math.exp(-logs[cell.condition]))

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers))
    (factorial,) = found.factorials
    assert factorial.interaction.mean == pytest.approx(0.05)
    assert factorial.first.mean + factorial.second.mean == pytest.approx(factorial.total.mean) == pytest.approx(0.35)
    assert [each.name for each in found.increments] == ["sequential: P after B"]  # of {P} x {R}, which is not there


def test_increments_are_sequential(found):
    names = ["sequential: P after B", "sequential: R after P", "sequential: S after P"]
    assert [each.name for each in found.increments] == names


# Phases, resources, hardware -----------------------------------------------------------------------------------------


def test_parts_of_a_step_add_up_to_it(found):
    for cell in found.cells:
        assert list(cell.phases) == [*PHASES, "step"]
        assert math.fsum(cell.phases[name] for name in PHASES) == pytest.approx(cell.phases["step"], abs=1e-12)


def test_parts_of_the_steps_of_each_condition(found):
    """As the spans were made: B waits for 0.2 of 1 s; R does no forward; half of S's forwards hide in the wait."""
    cells = {cell.condition: cell.phases for cell in found.cells}
    base = {"wait": 0.2, "fetch": 0.02, "hook": 0.0, "forward": 0.16, "advantages": 0.02, "train": 0.4}
    base |= {"optimizer": 0.02, "publish": 0.02, "evidence": 0.03, "checkpoint": 0.0, "rest": 0.13, "step": 1.0}
    assert cells["B"] == pytest.approx(base)
    assert cells["P+R"] == pytest.approx(base | {"forward": 0.0, "rest": 0.29})
    assert cells["P+S"] == pytest.approx(base | {"wait": 0.12, "rest": 0.21})


def test_effects_on_phases_are_negative_where_time_is_saved(found):
    effects = found.phase_effects["P+S over B"]
    assert effects["wait"].mean == pytest.approx(math.log(0.12 / 0.2))
    assert effects["phase1_s"].mean == pytest.approx(0.0)
    assert "forward" not in found.phase_effects["P+R over B"]  # there is none: it has no ratio
    assert "hook" not in effects


def test_busy_seconds_of_each_resource(found):
    """The rollout side works in [0, 0.17] of a step, and but for the last of 4 in [0.6, 0.95]: 0.4 of it processes."""
    cell = found.cells[0]
    worked = 0.17 + 0.35 * 3 / 4
    assert cell.busy["processor"] == pytest.approx(0.4 * worked)
    assert cell.busy["rollout"] == pytest.approx(0.6 * worked)
    assert cell.busy["actor"] == pytest.approx(0.02 + 0.16 + 0.02 + 0.4 + 0.02 + 0.02 + 0.03)


def test_hardware_counts_inside_the_windows_only(found):
    for cell in found.cells:
        hardware = cell.hardware
        assert (hardware.own_cores, hardware.other_cores, hardware.steal_cores) == (1.5, 0.25, 0.01)
        assert hardware.peak_rss_bytes == 2 * GIB
        assert hardware.samples == 8  # 4 s
        (gpu,) = hardware.gpus
        assert (gpu.uuid, gpu.utilisation_percent, gpu.peak_memory_bytes, gpu.power_w) == (GPU, 80, 10 * GIB, 300)


def test_a_machine_that_was_not_sampled_is_not_measured(tmp_path):
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)))
    attempt = attempt_of(campaign, "00-2-P+S")
    (attempt / "hardware.jsonl").unlink()
    rehash(attempt)
    found = analyze(campaign)
    assert {cell.condition: cell.hardware is None for cell in found.cells}["P+S"]
    rows = {condition: {row.name: row.status for row in rows} for condition, rows in found.guardrails.items()}
    assert (rows["P+S"]["peak memory"], rows["P"]["peak memory"]) == ("not measured", "passed")
    assert "00-2-P+S: hardware is not measured" in found.warnings


def test_a_gpu_that_was_not_sampled_is_not_measured(tmp_path):
    """The machine has one; without NVML nobody knows what it did, and the memory of the host says nothing of it."""
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)))
    for attempt in (campaign / "cells").glob("*/*"):
        edit_manifest(attempt, "hardware.gpus", [{"uuid": GPU, "name": "H200", "memory_bytes": 140 * GIB}])
    found = analyze(campaign)
    assert [cell.status for cell in found.cells] == ["accepted"] * 5
    assert all(cell.hardware.gpus == () for cell in found.cells)
    statuses = {row.status for rows in found.guardrails.values() for row in rows if row.name == "peak memory"}
    assert statuses == {"not measured"}


def test_a_gpu_that_does_not_tell_its_use_has_none(tmp_path):
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), gpu=True)

    def mute(rows):
        return [row | {"gpus": [g | {"utilisation_percent": None} for g in row["gpus"]]} for row in rows]

    edit_lines(attempt_of(campaign, "00-0-B"), "hardware.jsonl", lambda rows: [rows[0], *mute(rows[1:])])
    (gpu,) = analyze(campaign).cells[0].hardware.gpus
    assert (gpu.utilisation_percent, gpu.peak_memory_bytes) == (None, 10 * GIB)


def test_workload_of_the_windows(found):
    """4 updates of 4 groups with 2 samples each: the made-up ``tokens`` do not matter to response tokens."""
    cell = found.cells[0]
    assert cell.workload["tokens"] == 4 * 1000
    assert cell.workload["response_tokens"] == 4 * 8 * 6
    assert (cell.workload["samples"], cell.workload["images"]) == (32, 16)


def test_multimodal_bytes_are_those_of_images(tmp_path):
    """With the tokens that the payload has: 4 updates of 4 groups, each with its pixels and grid."""
    plan = plan_of(seeds=(0,))

    def numbers(cell):
        return alike(cell, plan.updates, tokens=4 * 2 * (14 + 6))

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers))
    assert {cell.workload["multimodal_bytes"] for cell in found.cells} == {4 * 4 * PIXEL_BYTES}


# Packing, timelines, equality ----------------------------------------------------------------------------------------


def test_packing_of_each_condition(tmp_path):
    variant = {"B(c=1)": {"actor.chunks_per_mini": 1}}
    settings = {name: value for name, value in plan_of().settings.items() if name != "actor.chunks_per_mini"}
    plan = plan_of(conditions=("B", "P+R", "B(c=1)"), primary=("P+R", "B"), variants=variant, settings=settings)

    def numbers(cell):
        return alike(cell, plan.updates) | (
            {"microbatches": [3] * 6, "fill": [0.9] * 6} if "c=1" in cell.condition else {}
        )

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers))
    assert {cell.status for cell in found.cells} == {"accepted"}, [cell.reasons for cell in found.cells]
    rows = {each.condition: (each.chunks_per_mini, each.microbatches, each.fill) for each in found.packing}
    assert rows["B(c=1)"] == (1, 3.0, pytest.approx(0.9))
    assert rows["B"][1:] == (4.0, pytest.approx(0.8))


def test_timelines_of_a_step_of_b_and_of_s(found):
    first, second = found.timelines
    assert (first.condition, second.condition) == ("B", "P+S")
    for timeline in found.timelines:
        assert 2 <= timeline.update <= 5
        assert all(0 <= span.start_s < span.end_s <= timeline.seconds for span in timeline.spans)
        assert {span.lane for span in timeline.spans} == {"driver", "processor", "rollout", "reward", "plane", "actor"}
        starts = [span.start_s for span in timeline.spans]
        assert all(a <= b for a, b in pairwise(starts))
    claims = [[span for span in each.spans if span.name == "loop.claim"] for each in found.timelines]
    assert [len(spans) for spans in claims] == [1, 2]


def test_the_step_of_a_timeline_is_the_median_one(tmp_path):
    plan = plan_of(seeds=(0,), updates=7, windows=("2-6",))
    numbers = {"step_s": [9.0, 9.0, 1.0, 5.0, 3.0, 2.0, 4.0], "tokens": [1000] * 7}
    found = analyze(make_campaign(tmp_path / "campaign", plan, lambda cell: numbers))
    assert {(each.update, each.seconds) for each in found.timelines} == {(4, 3.0)}


def test_what_was_equal_and_where_it_first_was_not(tmp_path):
    plan = plan_of(seeds=(0,))

    def numbers(cell):
        losses = [0.5, 0.4, 0.3, 0.25 if cell.condition == "P+R" else 0.2, 0.1, 0.1]
        return alike(cell, plan.updates) | {"loss": losses}

    lines = analyze(make_campaign(tmp_path / "campaign", plan, numbers)).equality
    assert "tokens: the same in all cells of every block, at all 6 updates" in lines
    assert "parameters (fingerprint): the same in all cells of every block, at all 6 updates" in lines
    (line,) = [text for text in lines if text.startswith("loss:")]
    assert line == (
        "loss: 1 of 5 cells (P+R) differ from the first of their block; 00-3-P+R from update 3 on: 0.25 against 0.2 in "
        "00-0-B"
    )


# The folder ----------------------------------------------------------------------------------------------------------


def test_the_folder_is_left_as_it_was_and_may_be_read_only(tmp_path):
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), alone=ALONE)
    everything = [campaign, *campaign.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = tree_hash(campaign)
    found = analyze(campaign)
    assert tree_hash(campaign) == before
    json.dumps(found.as_json(), allow_nan=False)
    for path in everything:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_campaign_that_has_only_begun(tmp_path):
    campaign = make_campaign(tmp_path / "campaign")
    for path in [path for path in (campaign / "cells").iterdir() if not path.name.startswith("00-0")]:
        for file in path.rglob("*"):
            if file.is_file():
                file.unlink()
        for folder in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
            folder.rmdir()
        path.rmdir()
    found = analyze(campaign)
    assert found.warnings[0].startswith("9 of 10 planned cells were not run: 00-1-P, ")
    assert not found.scope.claim
    assert {each.judgement.finding for each in found.verdicts} == {"inconclusive"}
    assert found.equality == ("nothing is compared: no block has two accepted cells",)
    json.dumps(found.as_json(), allow_nan=False)
