"""Every rule rejects a cell that breaks exactly it, and says which field, with both values."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from bench_breaks import edit_lines, edit_manifest, edit_metrics, edit_note, rehash
from bench_folder import BOOT, alike, attempt_of, make_campaign, make_cell, plan_of

from stretto.bench.analyze import analyze
from stretto.bench.campaign import attempts
from stretto.bench.design import Cell
from stretto.bench.results import Analysis, CellResult
from stretto.bench.standing import quick
from stretto.types import ConfigError

BROKEN = "00-2-P+S"
NAN = float("nan")
PLAN = plan_of(seeds=(0,))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_campaign(tmp_path_factory.mktemp("whole") / "campaign", PLAN)


@pytest.fixture
def campaign(whole, tmp_path) -> Path:
    """One in which nothing is wrong yet."""
    return Path(shutil.copytree(whole, tmp_path / "campaign"))


def cell_of(found: Analysis, name: str, attempt: int = 1) -> CellResult:
    (cell,) = [cell for cell in found.cells if (cell.name, cell.attempt) == (name, attempt)]
    return cell


def rejected(campaign: Path, name: str = BROKEN) -> tuple[str, ...]:
    """The reasons against the one cell that is rejected."""
    found = analyze(campaign)
    assert [cell.name for cell in found.cells if cell.status != "accepted"] == [name]
    cell = cell_of(found, name)
    assert (cell.status, cell.throughput, cell.phases, cell.hardware) == ("rejected", None, {}, None)
    return cell.reasons


def test_a_campaign_in_which_nothing_is_wrong(whole):
    assert {cell.status for cell in analyze(whole).cells} == {"accepted"}


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("git.dirty", True, "commit: git.dirty = true (), expected false"),
        (
            "git.commit",
            "0" * 40,
            f'commit: git.commit = "{"0" * 40}", 00-0-B has "d1aad60f6816adc3d99eae24a7c729a2119dacf5"',
        ),
        ("model.fingerprint", "beef", 'model: model.fingerprint = "beef", 00-0-B has "b0fe3bfd6e00a26b"'),
        ("data.fingerprint", "beef", 'data: data.fingerprint = "beef", 00-0-B has "854e1dcb"'),
        ("seeds", {"run.seed": 0, "other": 1}, 'seed policy: seeds = ["other", "run.seed"], 00-0-B has ["run.seed"]'),
        ("config.run.seed", 5, "seed policy: run.seed = 5, planned is 0"),
        ("config.data.shuffle", False, "seed policy: config.data.shuffle = false, 00-0-B has true"),
        ("config.cluster.device", "cpu", 'topology: config.cluster.device = "cpu", 00-0-B has "auto"'),
        ("determinism.actor.cores", [1], "topology: determinism.actor.cores = [1], 00-0-B has [0]"),
        ("environment.OMP_NUM_THREADS", "2", 'topology: environment.OMP_NUM_THREADS = "2", 00-0-B has "1"'),
        (
            "config.rollout.max_response_tokens",
            9,
            "limits: config.rollout.max_response_tokens = 9, 00-0-B has 16",
        ),
        ("versions.torch", "2.14", 'dependencies: versions.torch = "2.14", 00-0-B has "2.13.0+cpu"'),
        ("platform", "Linux-7", 'dependencies: platform = "Linux-7", 00-0-B has "Linux-6.18-x86_64-with-glibc2.36"'),
        ("hardware.cpu", "Xeon", 'hardware: hardware.cpu = "Xeon", 00-0-B has "AMD EPYC"'),
        ("hardware.memory_bytes", 12 * 2**30, "hardware: hardware.memory_gib = 12, 00-0-B has 24"),
        ("config.actor.lr", 0.5, "settings: config.actor.lr = 0.5, 00-0-B has 0.0004"),
        ("config.switches.logprob_reuse", True, "config: switches.logprob_reuse = true, planned is false"),
        ("status", "failed", 'status: "failed", expected finished; no cause is noted'),
        ("updates_done", 5, "updates: updates_done = 5, planned are 6"),
        ("first_update", 3, "sessions: 1, expected 1 from update 0: a cell is one fresh process"),
        ("machine_id", "elsewhere", 'machine: machine_id = "elsewhere", cell.json has "machine-a"'),
    ],
)
def test_what_the_manifest_says(campaign, field, value, reason):
    edit_manifest(attempt_of(campaign, BROKEN), field, value)
    reasons = rejected(campaign)
    assert any(found.startswith(reason) for found in reasons), reasons


SURROUNDINGS = {"MALLOC_ARENA_MAX": "2", "PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"environment": SURROUNDINGS | {"MALLOC_ARENA_MAX": "1"}},
            'environment: variable MALLOC_ARENA_MAX = "1", 00-0-B has "2"',
        ),
        (
            {"environment": SURROUNDINGS | {"LD_PRELOAD": "fast.so"}},
            'environment: variable LD_PRELOAD = "fast.so", 00-0-B has unset',
        ),
        (
            {"environment": {"PYTHONHASHSEED": "0"}},
            'environment: variable MALLOC_ARENA_MAX = unset, 00-0-B has "2"',
        ),
        ({"environment": SURROUNDINGS, "niceness": 5}, "environment: niceness = 5, 00-0-B has 0"),
    ],
)
def test_what_surrounded_a_process(campaign, values, reason):
    for attempt in (campaign / "cells").glob("*/*"):
        edit_note(attempt, environment=SURROUNDINGS)
    edit_note(attempt_of(campaign, BROKEN), **values)
    assert rejected(campaign) == (reason,)


def test_surroundings_that_nobody_wrote_down_are_not_compared(campaign):
    edit_note(attempt_of(campaign, BROKEN), environment=SURROUNDINGS, niceness=5)
    assert {cell.status for cell in analyze(campaign).cells} == {"accepted"}


def test_a_setting_of_the_plan_that_a_cell_did_not_run_with(campaign):
    edit_manifest(attempt_of(campaign, BROKEN), "config.staleness.max", 2)
    assert "config: staleness.max = 2, planned is 1" in rejected(campaign)


def test_what_a_variant_sets_is_its_own_alone(tmp_path):
    """B(c=1) differs from B by design; P+R with one chunk would not be the condition that was planned."""
    settings = {name: value for name, value in PLAN.settings.items() if name != "actor.chunks_per_mini"}
    variants = {"B(c=1)": {"actor.chunks_per_mini": 1}}
    conditions = ("B", "P+R", "B(c=1)")
    plan = plan_of(conditions=conditions, primary=("P+R", "B"), variants=variants, settings=settings, seeds=(0,))
    campaign = make_campaign(tmp_path / "campaign", plan)
    chunks = json.loads((attempt_of(campaign, "00-0-B") / "run" / "manifest.json").read_text())
    usual = chunks["sessions"][0]["config"]["actor"]["chunks_per_mini"]
    assert usual != 1 and {cell.status for cell in analyze(campaign).cells} == {"accepted"}
    name = next(cell.name for cell in analyze(campaign).cells if cell.condition == "P+R")
    edit_manifest(attempt_of(campaign, name), "config.actor.chunks_per_mini", 1)
    assert rejected(campaign, name) == (f"settings: config.actor.chunks_per_mini = 1, 00-0-B has {usual}",)


@pytest.mark.parametrize("metric", ["loss", "reward_mean", "ppo_kl_k1", "ppo_kl_k3", "grad_norm", "step_s"])
@pytest.mark.parametrize(("value", "shown"), [(None, "unset"), (NAN, "nan"), (float("inf"), "inf")])
def test_what_is_not_finite_is_found_at_its_step_in_the_warm_up_too(campaign, metric, value, shown):
    edit_metrics(attempt_of(campaign, BROKEN), 1, **{metric: value})
    assert rejected(campaign) == (f"not finite: {metric} is {shown} at update 1, expected a finite number",)


def test_a_metric_that_is_missing_is_not_finite_either(campaign):
    def drop(rows):
        return [{name: value for name, value in row.items() if name != "grad_norm"} for row in rows]

    edit_lines(attempt_of(campaign, BROKEN), "run/metrics.jsonl", drop)
    (reason,) = rejected(campaign)
    assert reason == "not finite: grad_norm is missing at update 0, 1, 2, 3, 4 and 1 more, expected a finite number"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"samples": 7.0}, "workload: samples of update 3 = 7.0, planned are 8"),
        ({"images": 3}, "workload: images of update 3 = 3.0, 00-0-B has 4.0, with the same seed"),
        ({"patches": 31}, "workload: patches of update 3 = 31.0, 00-0-B has 32.0, with the same seed"),
        ({"staleness_max": 2}, "staleness: staleness_max = 2 at update 3, the bound is 1"),
        ({"update_skipped": 1.0}, "updates: update 3 was skipped, expected none"),
        ({"update": 9}, "updates: metrics.jsonl has 6 lines, planned are updates 0 to 5"),
        ({"tokens": None}, "throughput: update 3 has nan tokens in 1.0 s: no throughput"),
    ],
)
def test_what_one_update_says(campaign, values, reason):
    edit_metrics(attempt_of(campaign, BROKEN), 3, **values)
    assert rejected(campaign) == (reason,)


def test_a_run_that_ended_early(campaign):
    edit_lines(attempt_of(campaign, BROKEN), "run/metrics.jsonl", lambda rows: rows[:-1])
    assert "updates: metrics.jsonl has 5 lines, planned are updates 0 to 5" in rejected(campaign)


def drop_workers(rows):
    return [{name: value for name, value in row.items() if name != "worker"} for row in rows]


def claim_whole(rows):
    second = [row for row in rows if row["name"] == "loop.claim" and row["chunk"] == 1]
    return [row for row in rows if row not in second]


def never_reuse(rows):
    return [row | {"reused": 0} if row["name"] == "actor.train" else row for row in rows]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (BROKEN, drop_workers, "switch P is on, and did not engage: no worker: 24 prompts"),
        (BROKEN, claim_whole, "switch S is on, and did not engage: 0 of 6 partitions claimed chunk by chunk"),
        (
            "00-3-P+R",
            never_reuse,
            "switch R is on, and did not engage: 0 old-policy forwards; 0 of 48 trained samples reused",
        ),
    ],
)
def test_a_switch_that_did_not_engage(campaign, name, change, reason):
    edit_lines(attempt_of(campaign, name), "run/events.jsonl", change)
    (found,) = rejected(campaign, name)
    assert found.startswith(reason)


def test_an_exit_code_that_is_not_0(campaign):
    edit_note(attempt_of(campaign, BROKEN), status="failed", exit_code=3, reason="out of memory")
    assert rejected(campaign) == ("exit code: 3, expected 0; failed: out of memory",)


def test_another_plan_than_the_folders(campaign):
    edit_note(attempt_of(campaign, BROKEN), plan="f" * 64)
    (reason,) = rejected(campaign)
    assert reason.startswith(f"plan: {'f' * 64}, and that of the folder is ")
    assert "not the one that the runs began with" in analyze(campaign).scope.limit


def test_a_plan_that_was_changed_after_it_was_written(campaign):
    (path,) = campaign.glob("*.plan.toml")
    path.write_text(path.read_text().replace('"2-5"', '"3-5"'))
    with pytest.raises(ConfigError, match="was changed after it was written"):
        analyze(campaign)


def test_a_file_that_was_changed_after_the_cell_ended(campaign):
    path = attempt_of(campaign, BROKEN) / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + "\n")
    reasons = rejected(campaign)
    assert reasons[0].startswith("files: run/metrics.jsonl has SHA-256 ")


def test_a_file_that_no_hash_is_known_of(campaign):
    attempt = attempt_of(campaign, BROKEN)
    files = json.loads((attempt / "cell.json").read_text())["files"]
    edit_note(attempt, files={name: value for name, value in files.items() if name != "run/events.jsonl"})
    assert rejected(campaign) == ("files: cell.json has no hash of run/events.jsonl",)


@pytest.mark.parametrize("name", ["run/manifest.json", "run/metrics.jsonl", "run/events.jsonl", "hardware.jsonl"])
def test_a_file_that_cannot_be_read(campaign, name):
    attempt = attempt_of(campaign, BROKEN)
    (attempt / name).write_text("{\n{}\n")
    rehash(attempt)
    assert any(Path(name).name in reason for reason in rejected(campaign))


def test_a_length_that_no_clock_has(campaign):
    """In nanoseconds it is beyond what a float holds."""
    edit_metrics(attempt_of(campaign, BROKEN), 5, step_s=1e308)
    (reason,) = rejected(campaign)
    assert reason.startswith("events.jsonl or hardware.jsonl: OverflowError")


def test_a_warning_of_a_library_is_no_reason_against_a_cell(campaign, monkeypatch):
    from stretto.observe.trace import read_events

    def warned(path):
        warnings.warn("this call is going away", DeprecationWarning, stacklevel=2)
        return read_events(path)

    monkeypatch.setattr("stretto.bench.read_cells.read_events", warned)
    with pytest.warns(DeprecationWarning, match="going away"):
        assert {cell.status for cell in analyze(campaign).cells} == {"accepted"}


def test_a_folder_without_a_run(campaign):
    shutil.rmtree(attempt_of(campaign, BROKEN) / "run")
    reasons = rejected(campaign)
    assert any("not readable" in reason for reason in reasons)


@pytest.mark.parametrize(("field", "value"), [("machine_id", "machine-b"), ("boot_id", "boot-b")])
def test_a_block_on_two_machines_or_in_two_boots(campaign, field, value):
    attempt = attempt_of(campaign, BROKEN)
    edit_manifest(attempt, field, value)
    edit_note(attempt, **{field: value})
    (reason,) = rejected(campaign)
    theirs = {"machine_id": "machine-a", "boot_id": BOOT}[field]
    assert reason == (f'machine: {field} = "{value}", 00-0-B has "{theirs}": a block is of one machine in one boot')


def test_blocks_may_be_on_machines_of_one_kind(tmp_path):
    found = analyze(make_campaign(tmp_path / "campaign", boots=lambda block: (f"machine-{block}", f"boot-{block}")))
    assert {cell.status for cell in found.cells} == {"accepted"}
    assert "the blocks ran in 2 boots, on 2 machines" in found.warnings


def test_a_first_cell_that_breaks_a_rule_of_its_own_is_no_reference(campaign):
    edit_manifest(attempt_of(campaign, "00-0-B"), "git.dirty", True)
    edit_manifest(attempt_of(campaign, "00-0-B"), "git.commit", "0" * 40)
    assert len(rejected(campaign, "00-0-B")) == 2


# Attempts ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_attempt_is_kept_and_its_retry_counts(campaign):
    plan = PLAN
    edit_note(attempt_of(campaign, BROKEN), status="interrupted", exit_code=130, reason="Ctrl-C")
    cell = Cell(block=0, position=2, condition="P+S", seed=0)
    make_cell(campaign, plan, cell, alike(cell, plan.updates), attempt=2)
    found = analyze(campaign)
    first, second = cell_of(found, BROKEN), cell_of(found, BROKEN, 2)
    assert (first.status, second.status) == ("excluded", "accepted")
    assert first.reasons == ("interrupted: Ctrl-C", "attempt 2 stands in its place")
    assert len(first.steps["loss"]) == plan.updates  # what could be read of it


def test_an_attempt_that_its_runner_did_not_survive(campaign):
    (attempt_of(campaign, BROKEN) / "cell.json").unlink()
    cell = cell_of(analyze(campaign), BROKEN)
    assert cell.status == "excluded"
    assert cell.reasons == ("interrupted together with its runner: it has no cell.json",)


def test_nobody_chooses_the_better_of_two_attempts(campaign):
    plan, cell = PLAN, Cell(block=0, position=2, condition="P+S", seed=0)
    make_cell(campaign, plan, cell, alike(cell, plan.updates, seconds=3.0), attempt=2)
    found = analyze(campaign)
    assert cell_of(found, BROKEN).status == "excluded"
    assert cell_of(found, BROKEN, 2).throughput.per_s == pytest.approx(1000 / 3)


# Just after a cell ended ---------------------------------------------------------------------------------------------


def quickly(campaign: Path, name: str) -> tuple[str, ...]:
    (attempt,) = [each for each in attempts(campaign) if each.name == name]
    return quick(campaign, PLAN, attempt)


def test_a_cell_is_judged_by_itself_and_beside_the_first_that_finished(campaign):
    assert {quickly(campaign, name) for name in ("00-0-B", BROKEN, "00-4-B")} == {()}
    edit_manifest(attempt_of(campaign, BROKEN), "versions.torch", "2.14")
    edit_metrics(attempt_of(campaign, BROKEN), 1, loss=None)
    assert quickly(campaign, BROKEN) == (
        "not finite: loss is unset at update 1, expected a finite number",
        'dependencies: versions.torch = "2.14", 00-0-B has "2.13.0+cpu"',
    )
    assert quickly(campaign, "00-0-B") == ()
    edit_note(attempt_of(campaign, "00-0-B"), status="failed", exit_code=1)
    edit_manifest(attempt_of(campaign, "00-1-P"), "versions.torch", "2.14")
    assert quickly(campaign, BROKEN) == ("not finite: loss is unset at update 1, expected a finite number",)
    assert quickly(campaign, "00-4-B")[0].endswith('00-1-P has "2.14"')


def test_the_first_cell_is_judged_by_itself(campaign):
    edit_manifest(attempt_of(campaign, "00-0-B"), "git.dirty", True)
    assert quickly(campaign, "00-0-B") == ("commit: git.dirty = true (), expected false",)


# Cells and blocks ----------------------------------------------------------------------------------------------------


def test_a_cell_that_is_none_of_the_plan(campaign):
    cell = Cell(block=7, position=0, condition="P", seed=0)
    make_cell(campaign, PLAN, cell, alike(cell, 6))
    assert rejected(campaign, "07-0-P") == ("cell: 07-0-P is none of the plan",)


def test_a_block_that_lost_one_b_has_no_baseline(tmp_path):
    campaign = make_campaign(tmp_path / "campaign")
    edit_metrics(attempt_of(campaign, "00-4-B"), 3, loss=None)
    found = analyze(campaign)
    assert cell_of(found, "00-0-B").status == "accepted"
    assert len(found.aa) == 1
    assert [each.judgement.estimate.blocks for each in found.verdicts] == [1, 1, 1]
    assert found.increments[1].estimate.blocks == 2  # R after P, without any B
    assert any(text.startswith("block 0 has no baseline") for text in found.warnings)
    assert "1 repetition of at least 2" in found.scope.limit
    assert not found.square_complete
