"""Engine replicas through the command: same bits whatever their number, and whatever happens to them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import running
from processes import processes_of, that_run, wait_until_gone

from stretto.observe.trace import read_events

pytestmark = pytest.mark.timeout(480)
UPDATES = 4


def recipe(folder: Path, run: Path | None = None, *, updates: int = UPDATES, **rollout) -> Path:
    """Two batches of two groups a partition, so that two replicas have work at once; no evaluation, one checkpoint."""
    return running.recipe(
        folder,
        run={"dir": str(run or folder / "run"), "updates": updates},
        rollout={
            "prompts_per_partition": 8,
            "n_samples_per_prompt": 4,
            "groups_per_decode_batch": 2,
            "max_response_tokens": 8,
            **rollout,
        },
        actor={"decay_fraction": 0.0},  # so that the learning rate does not depend on run.updates
        checkpoint={"every": 0},
        eval={"every": 2, "prompts": 20},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run on one replica."""
    folder = tmp_path_factory.mktemp("one")
    running.train(recipe(folder))
    return folder / "run"


def engines(run: Path) -> list[psutil.Process]:
    return that_run("EngineProcess", processes_of(run))


def assert_same_run(one: Path, other: Path) -> None:
    prints = running.jsonl(one, "fingerprints.jsonl")
    assert len(prints) == UPDATES and len({p["parameters"] for p in prints}) == UPDATES
    assert running.jsonl(other, "fingerprints.jsonl")[:UPDATES] == prints
    evaluations = running.jsonl(one, "evaluations.jsonl")
    assert evaluations and running.jsonl(other, "evaluations.jsonl")[: len(evaluations)] == evaluations


@pytest.mark.long  # short: two of them, below; any number, in test_rollout_scheduler
def test_three_replicas_give_the_bits_of_one_and_share_the_work(undisturbed, tmp_path):
    running.train(recipe(tmp_path, replicas=3))
    run = tmp_path / "run"
    assert_same_run(undisturbed, run)
    events = [e for e in read_events(run / "events.jsonl") if e["name"] == "rollout.generate"]
    assert {e["replica"] for e in events} == {0, 1, 2}
    assert {(e["partition"], e["version"]) for e in events} == {(k, max(0, k - 1)) for k in range(UPDATES)}
    rows = running.jsonl(run, "metrics.jsonl")
    assert all(row["engine_restarts"] == 0 and row["engine_rss_mib"] > 50 for row in rows)
    assert not (run / "logs" / "rollout.err").exists()  # such as warnings about calls that block an event loop


def test_killed_and_hanging_engines_are_replaced_and_change_no_bit(marked, tmp_path, undisturbed):
    """One of two by SIGKILL, later one by SIGSTOP."""
    path = recipe(tmp_path, marked, updates=400, replicas=2, engine_timeout_s=5.0)
    process = running.start(path)
    seen = running.wait_for(process, "update 1/400")
    engines(marked)[0].kill()
    seen += running.wait_for(process, "restart 1 of 3")
    seen += running.wait_for(process, "update 30/400")
    engines(marked)[0].send_signal(signal.SIGSTOP)
    seen += running.wait_for(process, "restart 2 of 3")
    for _ in range(3):  # partitions that other engines had finished before are trained first
        seen += running.wait_for(process, "update ")
    process.send_signal(signal.SIGTERM)
    output = seen + running.finish(process)
    assert process.returncode == 143, output
    assert "engine_timeout_s = 5" in output and "Traceback" not in output and "raylet" not in output, output
    assert running.jsonl(marked, "metrics.jsonl")[-1]["engine_restarts"] == 2
    assert_same_run(undisturbed, marked)
    wait_until_gone(marked, 5)


@pytest.mark.long  # short: the same with a stub engine, in test_engine_process
def test_without_restarts_an_engines_death_ends_the_run_within_seconds_with_the_cause(marked, tmp_path):
    process = running.start(recipe(tmp_path, marked, updates=400, max_engine_restarts=0))
    running.wait_for(process, "update 2/400")
    (engine,) = engines(marked)
    engine.kill()
    killed = time.monotonic()
    output = running.finish(process, 30)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1 and "Traceback" not in output, output
    error = output.splitlines()[-3]
    assert "rollout engine 0 died: it was killed (SIGKILL" in error and "max_engine_restarts = 0" in error, output
    wait_until_gone(marked, 5)


@pytest.mark.long
def test_engines_end_with_a_killed_driver_and_with_a_killed_coordinator(marked, tmp_path):
    path = recipe(tmp_path, marked, updates=400, replicas=2)
    process = running.start(path)
    running.wait_for(process, "update 1/400")
    assert len(engines(marked)) == 2
    (coordinator,) = that_run("RolloutProcess", processes_of(marked))
    coordinator.kill()
    output = running.finish(process, 30)
    assert process.returncode == 1 and "died" in output and "Traceback" not in output, output
    wait_until_gone(marked, 5)

    process = running.start(path, "--set", f"run.dir={marked}2")
    running.wait_for(process, "update 1/400")
    os.kill(process.pid, signal.SIGKILL)
    wait_until_gone(marked, 10)
    process.communicate()


# Matrix ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_any_number_of_replicas_gives_the_same_bits_at_any_staleness(tmp_path, staleness):
    runs = []
    for replicas in (1, 2, 3):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        running.train(recipe(folder, replicas=replicas), "--set", f"staleness.max={staleness}")
        runs.append(folder / "run")
    for other in runs[1:]:
        assert_same_run(runs[0], other)
        assert [r["staleness_max"] for r in running.jsonl(other, "metrics.jsonl")] == [
            min(k, staleness) for k in range(UPDATES)
        ]
