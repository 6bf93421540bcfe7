"""Stages alone, which of them count, and the efficiency of a pipeline that follows from them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from bench_breaks import edit_manifest, edit_note
from bench_folder import ALONE, alike, attempt_of, make_campaign, plan_of

from stretto.bench.analyze import analyze, efficiencies
from stretto.bench.campaign import attempts
from stretto.bench.design import design
from stretto.bench.measures import Accepted
from stretto.bench.plan_file import read_kept_plan
from stretto.bench.read_alone import read_alone
from stretto.bench.standing import stand


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return analyze(make_campaign(tmp_path_factory.mktemp("limits") / "campaign", alone=ALONE))


def test_efficiency_is_the_slowest_stage_alone_over_the_step(found):
    """Steps take 1 s. P halves processing, so that training limits P and P+S, and rollout P+R."""
    values = {each.condition: each.efficiency for each in found.efficiency}
    assert values == pytest.approx({"B": 0.7, "P": 0.6, "P+R": 0.5, "P+S": 0.65})
    assert {each.condition: each.training_s for each in found.efficiency}["P+R"] == pytest.approx(0.4)


def test_efficiency_is_that_of_the_conditions_own_staleness(tmp_path):
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), alone=ALONE)
    plan = read_kept_plan(campaign)
    planned = design(plan.conditions, plan.seeds, plan.repetitions)
    reads = {name: each.read for name, each in stand(plan, planned, attempts(campaign)).items()}
    for name, read in reads.items():
        if name.endswith("B"):
            waiting = read.config.staleness.model_copy(update={"max": 0})
            reads[name] = replace(read, config=read.config.model_copy(update={"staleness": waiting}))
    alone, _ = read_alone(campaign, plan, reads["00-0-B"])
    steps = dict.fromkeys(plan.conditions, 1.0)
    found = {each.condition: each for each in efficiencies(plan, Accepted(planned.blocks, reads), alone, steps)}
    assert "undefined" in found["B"].told
    assert (found["B"].efficiency, found["P"].efficiency) == (None, pytest.approx(0.6))


def test_efficiency_is_undefined_without_staleness(tmp_path):
    plan = plan_of(seeds=(0,), settings={**plan_of().settings, "staleness.max": 0})

    def numbers(cell):
        return alike(cell, plan.updates) | {"staleness_max": [0] * plan.updates}

    found = analyze(make_campaign(tmp_path / "campaign", plan, numbers, alone=ALONE))
    assert {each.efficiency for each in found.efficiency} == {None}
    assert all("undefined" in each.told for each in found.efficiency)


def test_what_was_not_measured_alone_is_said(tmp_path):
    found = analyze(make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), alone={("rollout", "B"): 0.5}))
    assert found.efficiency[0].told == "not measured alone: processor, training"
    assert (found.efficiency[0].rollout_s, found.efficiency[0].efficiency) == (0.5, None)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"status": "failed", "exit_code": 3, "reason": "no room"}, "does not count: failed with exit code 3: no room"),
        ({"plan": "f" * 64}, f"does not count: it ran under plan {'f' * 64}"),
        ({"files": {}}, "does not count: cell.json has no hash of run/alone.json"),
        ({"boot_id": "boot-b"}, 'does not count: machine: boot_id = "boot-b", 00-0-B has "boot-a"'),
        ({"machine_id": "m"}, 'does not count: machine: machine_id = "m", 00-0-B has "machine-a"'),
        ({"environment": {"LD_PRELOAD": "x"}}, 'does not count: environment: variable LD_PRELOAD = "x", 00-0-B has'),
    ],
)
def test_a_stage_alone_that_cannot_be_used(tmp_path, values, told):
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), alone=ALONE)
    for attempt in (campaign / "cells").glob("*/*"):
        edit_note(attempt, environment={"LD_PRELOAD": "y"})
    edit_note(campaign / "alone" / "rollout-B" / "attempt-1", **values)
    found = analyze(campaign)
    assert [text for text in found.warnings if text.startswith(f"rollout-B alone {told}")]
    assert found.efficiency[0].told == "not measured alone: rollout"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("git.commit", "beef", 'commit: git.commit = "beef", 00-0-B has "d1aad6'),
        ("git.dirty", True, "commit: git.dirty = true, expected false"),
        ("model.fingerprint", "beef", 'model: model.fingerprint = "beef", 00-0-B has "b0fe'),
        ("environment.OMP_NUM_THREADS", "2", 'topology: environment.OMP_NUM_THREADS = "2", 00-0-B has "1"'),
        ("environment.OMP_WAIT_POLICY", "PASSIVE", None),  # what a run gives to its workers
        ("config.run.updates", 10, None),
    ],
)
def test_a_stage_alone_that_ran_other_code_or_another_model(tmp_path, field, value, told):
    """Those that have a manifest; its options are others by design."""
    campaign = make_campaign(tmp_path / "campaign", plan_of(seeds=(0,)), alone=ALONE)
    attempt = campaign / "alone" / "training-B" / "attempt-1"
    for name in ("manifest.json", "metrics.jsonl", "events.jsonl"):
        shutil.copy(attempt_of(campaign, "00-0-B") / "run" / name, attempt / "run" / name)
    edit_manifest(attempt, field, value)
    found = analyze(campaign)
    lines = [text for text in found.warnings if text.startswith("training-B alone does not count: ")]
    assert [told in text for text in lines] == [True] if told else not lines
    assert (found.efficiency[0].training_s is None) == (told is not None)


def test_stages_alone_belong_to_block_0(tmp_path):
    """Their figures say nothing of a block in another boot, be it the only one that was accepted."""

    def boots(block):
        return "machine-a", f"boot-{'ab'[block]}"

    campaign = make_campaign(tmp_path / "campaign", boots=boots, alone=ALONE)
    assert len(analyze(campaign).alone) == len(ALONE)
    for attempt in (campaign / "cells").glob("00-*/*"):
        edit_manifest(attempt, "status", "failed")
    found = analyze(campaign)
    assert found.alone == ()
    assert "rollout-B alone does not count: no cell of block 0 was accepted, beside which it ran" in found.warnings


def test_every_update_of_a_stage_alone_is_kept(found):
    assert {each.per_update for each in found.alone if each.stage == "rollout"} == {(0.5,) * 8}
