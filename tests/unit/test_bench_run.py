"""The runner of a campaign apart from real runs: what it runs, keeps, refuses and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_stand import ALONE, FIRST, PLAN, SECOND, WITH_ALONE, Stand, here, make_stand

from stretto.bench.attempt import cell_environment
from stretto.bench.campaign import attempts, file_hash
from stretto.bench.jobs import alone_condition, alone_jobs, cell_sets
from stretto.bench.lock import held
from stretto.bench.plan_file import parse_plan
from stretto.bench.run import able_elsewhere
from stretto.bench.sampler import read_hardware
from stretto.resume import locked
from stretto.settings import resolve
from stretto.training import Interrupted
from stretto.types import ConfigError, StrettoError

RUNNER = """
import sys
from pathlib import Path
import stretto.bench.attempt, stretto.bench.run
from stretto.bench.plan_file import load_plan
from stretto.training import Interrupted, interruptible
if __name__ == "__main__":
    stretto.bench.run.git_state = lambda: {"commit": "c0ffee", "dirty": False, "changed": []}
    stretto.bench.attempt.LISTENS_S = 0.01
    root = Path(sys.argv[1])
    program = (sys.executable, str(root / "program.py"))
    try:
        with interruptible():
            plan = load_plan(root / "plan.toml", root)
            stretto.bench.run.run_campaign(plan, root / "campaign", print, program=program, root=root)
    except Interrupted as stop:
        raise SystemExit(stop.exit_code)
"""


@pytest.fixture
def stand(tmp_path, monkeypatch):
    return make_stand(tmp_path, monkeypatch)


def test_every_cell_runs_once_in_a_process_of_its_own_and_each_stage_alone_after_the_first_block(stand):
    outcome = stand.run(parse_plan(WITH_ALONE))
    assert stand.ran == [*FIRST, *ALONE, *SECOND]
    assert (outcome.finished, outcome.failed, outcome.exit_code) == (13, (), 0)
    for name in ("01/08 block 0 B seed 5 ...", "04/05 training alone, B ...", "08/08 block 1 B seed 6: took 0 s"):
        assert name in stand.text
    assert re.search(r"01/08 block 0 B seed 5: took \d s; about \d+ s left", stand.text)
    assert stand.run(parse_plan(WITH_ALONE)).finished == 13 and stand.ran == []
    assert "13 of 13 runs have finished earlier" in stand.text


def test_an_attempt_is_closed_with_a_note_of_what_it_was_and_cannot_be_written_to(stand):
    plan = parse_plan(WITH_ALONE)
    stand.run(plan)
    attempt = next(a for a in attempts(stand.folder) if a.name == "01-1-P+S")
    note = attempt.note
    assert note is not None and attempt.number == note.attempt == 1
    assert (note.block, note.position, note.condition, note.seed, note.status) == (1, 1, "P+S", 6, "finished")
    assert (note.plan, note.exit_code, note.boot_id) == (plan.sha256, 0, "boot-1")
    assert set(note.files) == {"log.txt", "hardware.jsonl", "run/manifest.json", "run/metrics.jsonl"}
    assert all(file_hash(attempt.path / name) == value for name, value in note.files.items())
    start, _ = read_hardware(attempt.hardware_path)
    assert start.interval_s == 0.5
    files = [path for path in attempt.path.rglob("*") if path.is_file()]
    assert len(files) == 6 and not any(path.stat().st_mode & 0o222 for path in files)
    assert " ".join(note.command).startswith("stretto train recipe.toml --no-checkpoints --set eval.every=0 --set ")
    assert "run.dir=campaign/cells/01-1-P+S/attempt-1/run" in note.command
    (alone,) = (a for a in attempts(stand.folder, "alone") if a.name == "training-S")
    assert alone.note is not None
    assert (alone.note.stage, alone.note.condition, alone.note.block, alone.note.seed) == ("training", "S", -1, 5)


def test_the_command_of_a_cell_makes_the_config_that_the_plan_asks_for(stand):
    plan = parse_plan(PLAN | {"settings": {"actor.lr": 0.5, "reward.function": "exact_match", "eval.every": 7}})
    stand.run(plan)
    note = next(a.note for a in attempts(stand.folder) if a.name == "00-2-P+S")
    assert note is not None
    words = [after for before, after in zip(note.command, note.command[1:], strict=False) if before == "--set"]
    resolved = resolve(stand.root / "recipe.toml", words, {})
    assert not resolved.problems
    config = resolved.config
    assert (config.actor.lr, config.reward.function, config.eval.every) == (0.5, "exact_match", 7)
    assert (config.switches.processor_pool, config.switches.chunk_overlap, config.run.seed) == (1, True, 5)
    assert config.run.updates == 4
    assert cell_sets(plan, "P+S", 5)["eval.every"] == 7


def test_a_plan_that_asks_for_checkpoints_gets_them(stand):
    stand.run(parse_plan(PLAN | {"settings": {"checkpoint.every": 2}}))
    note = next(iter(attempts(stand.folder))).note
    assert note is not None and "--no-checkpoints" not in note.command and "checkpoint.every=2" in note.command


def test_a_failed_cell_is_kept_and_tried_again_by_the_next_call_alone(stand):
    stand.fail("00-1-P")
    outcome = stand.run()
    assert stand.ran == [*FIRST, *SECOND]
    assert outcome.exit_code == 1
    assert outcome.failed == (f"02/08 block 0 P seed 5: {stand.folder}/cells/00-1-P/attempt-1/log.txt",)
    assert "FAILED: it ended with exit code 1; the end of its log:" in stand.text
    assert "  something was said\n  this went wrong" in stand.text
    stand.behave()
    assert stand.run().exit_code == 0 and stand.ran == ["00-1-P"]
    tried = [a.note for a in attempts(stand.folder) if a.name == "00-1-P"]
    assert [(note.attempt, note.status, note.exit_code) for note in tried if note] == [
        (1, "failed", 1),
        (2, "finished", 0),
    ]


def test_where_the_very_first_cell_fails_nothing_else_is_run(stand):
    stand.fail("00-0-B")
    with pytest.raises(StrettoError, match=r"(?s)01/08 block 0 B seed 5, the first that ran.*this went wrong"):
        stand.run()
    assert stand.ran == ["00-0-B"]
    stand.fail("01-0-B")
    assert stand.run().exit_code == 1 and stand.ran == [*FIRST, *SECOND]


def test_a_block_that_is_not_whole_runs_again_in_another_boot_and_a_whole_one_does_not(stand, monkeypatch):
    stand.fail("01-2-P")
    stand.run()
    stand.behave()
    here(monkeypatch, "boot-2")
    stand.run()
    assert stand.ran == SECOND
    assert "block 1 was begun on another machine or in another boot" in stand.text and "3 finished cells" in stand.text
    here(monkeypatch, "boot-3")
    assert stand.run().finished == 8 and stand.ran == []


def test_a_block_whose_repetition_was_stopped_goes_on_with_the_rest_of_it(stand, monkeypatch):
    stand.fail("01-2-P")
    stand.run()
    here(monkeypatch, "boot-2")
    stand.run()
    assert stand.ran == SECOND
    stand.behave()
    stand.run()
    assert stand.ran == ["01-2-P"]


def stopped(stand: Stand, number: signal.Signals, name: str) -> tuple[int, str]:
    """A real runner process that gets a signal while its cell ``name`` hangs: its exit code and output."""
    stand.fail(name, way="hangs")
    script = stand.root / "runner.py"
    script.write_text(RUNNER)
    process = subprocess.Popen(
        [sys.executable, str(script), str(stand.root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = time.monotonic() + 60
    while not (stand.root / "hanging").exists() and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(StrettoError, match=rf"in use by another runner, process {process.pid} on "):
        stand.run()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_stopped_runner_ends_its_cell_marks_it_and_says_how_to_go_on(stand, number, code):
    returned, output = stopped(stand, number, "00-1-P")
    assert returned == code, output
    assert "stopped; what has finished is kept: the same command goes on" in output
    assert "Traceback" not in output
    note = next(a.note for a in attempts(stand.folder) if a.name == "00-1-P")
    assert note is not None and note.status == "interrupted" and note.exit_code is None
    assert note.reason.startswith("the runner was stopped by ")
    assert len(attempts(stand.folder)) == 2


def test_a_cell_that_a_killed_runner_left_going_is_not_run_beside_itself(stand):
    run_dir = stand.folder / "cells" / "00-0-B" / "attempt-1" / "run"
    with locked(run_dir), pytest.raises(StrettoError, match="in use by a run that is still going"):
        stand.run()
    assert stand.ran == []
    stand.run()
    assert [(a.number, a.note is None) for a in attempts(stand.folder) if a.name == "00-0-B"] == [(1, True), (2, False)]


def test_two_runners_do_not_share_a_folder(tmp_path):
    told = f"in use by another runner, process {os.getpid()} on "
    with held(tmp_path), pytest.raises(StrettoError, match=told), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_a_changed_plan_is_refused_before_anything_runs(stand):
    stand.run()
    with pytest.raises(ConfigError, match="another plan"):
        stand.run(stand.plan.model_copy(update={"windows": ("2-3",)}))
    assert stand.ran == []


def test_a_plan_that_cannot_run_is_refused_at_once_and_leaves_no_plan_behind(stand, monkeypatch):
    monkeypatch.setattr("stretto.bench.run.able_elsewhere", able_elsewhere)
    recipe = stand.root / "recipe.toml"
    recipe.write_text(recipe.read_text() + "[algorithm]\nkl_loss_coef = 0.1\n")
    with pytest.raises(ConfigError) as caught:
        stand.run(parse_plan(PLAN | {"conditions": ["P", "P+R", "P+S"]}))
    text = "\n".join(caught.value.problems)
    assert "condition P+R: R: algorithm.kl_loss_coef" in text and "condition P:" not in text
    assert stand.ran == [] and not list(stand.folder.glob("*.plan.toml"))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"commit": "c0ffee", "dirty": True, "changed": [" M stretto/loop.py"]},
            "c0ffee is dirty.*\n   M stretto/",
        ),
        ({"commit": "decaf", "dirty": False, "changed": []}, "ran at commit c0ffee, and this is decaf"),
        (None, "ran at commit c0ffee, and this is None"),
    ],
)
def test_other_code_than_the_first_cell_ran_is_refused_with_both(stand, monkeypatch, state, told):
    stand.run()
    monkeypatch.setattr("stretto.bench.run.git_state", lambda: state)
    with pytest.raises(StrettoError, match=f"(?s){told}"):
        stand.run()


def test_a_recipe_that_changes_while_a_campaign_runs_stops_it(stand):
    stand.fail("00-1-P", way="changes")
    with pytest.raises(StrettoError, match=r"recipe\.toml has changed while the campaign ran"):
        stand.run()
    assert stand.ran == FIRST[:2]


def test_no_job_sees_variables_that_set_options(monkeypatch, stand):
    environment, dropped = cell_environment(
        {"STRETTO_ACTOR__LR": "1", "HYBRID_PIPELINE_FORWARD": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "/a"}
    )
    assert dropped == ["HYBRID_PIPELINE_FORWARD", "STRETTO_ACTOR__LR"]
    package, rest = environment.pop("PYTHONPATH").split(os.pathsep)
    assert (Path(package) / "stretto" / "bench").is_dir() and rest == "/a"
    assert environment == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("STRETTO_ACTOR__LR", "not a number")
    stand.run()
    assert "no cell sees STRETTO_ACTOR__LR" in stand.text


def test_a_busy_machine_is_told_and_noted(stand, monkeypatch):
    monkeypatch.setattr("stretto.bench.attempt.others_cores", lambda seconds: 0.75)
    stand.run()
    assert "warning: 0.75 cores are busy" in stand.text
    assert {a.note.others_before for a in attempts(stand.folder) if a.note} == {0.75}


def test_in_lockstep_without_staleness_no_stage_is_run_alone(stand):
    stand.run()
    assert stand.ran == [*FIRST, *SECOND]
    assert "staleness.max = 0" in stand.text


def test_a_stage_is_run_alone_once_for_all_conditions_that_share_it():
    plan = parse_plan(
        PLAN
        | {
            "conditions": ["P", "P+R", "P+S", "B(c=1)", "P(big)"],
            "variants": {"B(c=1)": {"actor.chunks_per_mini": 1}, "P(big)": {"rollout.groups_per_decode_batch": 99}},
        }
    )
    assert [job.name for job in alone_jobs(plan)] == [
        *("processor-B", "processor-P", "processor-P(big)"),
        *("rollout-B", "rollout-B(big)"),
        *("training-B", "training-R", "training-S", "training-B(c=1)", "training-B(big)"),
    ]
    assert alone_condition(plan, "processor", "B(c=1)") == "B"
    jobs = {job.name: job for job in alone_jobs(plan)}
    assert jobs["training-S"].sets["switches.chunk_overlap"] and not jobs["rollout-B"].sets["switches.chunk_overlap"]
    assert jobs["training-S"].sets["switches.processor_pool"] == 0
    assert jobs["processor-P"].sets["switches.processor_pool"] == 1
    assert jobs["training-B(big)"].sets["rollout.groups_per_decode_batch"] == 99
    assert {job.sets["run.updates"] for job in jobs.values()} == {1 + 8}


def test_interrupted_is_raised_where_a_cell_is_interrupted(stand, monkeypatch):
    monkeypatch.setattr("stretto.stops.STOPS.ignore", lambda: None)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.bench.attempt.run_logged", interrupt)
    with pytest.raises(Interrupted):
        stand.run()
