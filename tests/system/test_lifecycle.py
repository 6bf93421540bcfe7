"""How runs end: by signals at any time, by the death of any process, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
import running
from processes import assert_closed, ports_of, processes_of, that_run, wait_until_gone

pytestmark = pytest.mark.timeout(240)
LIMIT_S = 10


def ray_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("stretto-ray-*"))


@pytest.fixture(autouse=True)
def another_ray_is_named_in_the_environment(monkeypatch):
    """No run may join it; nothing listens there, so that one that tried would fail."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")


@pytest.mark.case("E5")
@pytest.mark.parametrize(
    ("number", "code", "after_s"),
    [
        (signal.SIGTERM, 143, 0.3),
        (signal.SIGINT, 130, 3),
        pytest.param(signal.SIGTERM, 143, 6, marks=pytest.mark.long),
    ],
)
def test_a_signal_while_ray_starts_ends_everything_within_ten_seconds(marked, tmp_path, number, code, after_s):
    before = ray_folders()
    process = running.start(running.recipe(tmp_path, run={"dir": str(marked), "updates": 400}, reward={"workers": 2}))
    running.wait_for(process, "starting Ray")
    time.sleep(after_s)
    sent = time.monotonic()
    for again in (number, signal.SIGTERM, signal.SIGINT):  # a second and a third one must not break cleaning up
        os.killpg(process.pid, again) if again == signal.SIGINT else process.send_signal(again)
        time.sleep(0.3)
    output = running.finish(process, LIMIT_S)
    assert time.monotonic() - sent < LIMIT_S
    assert process.returncode == code, output
    *steps, last = output.splitlines()
    assert "while it started" in last and all(step.endswith(" s)") for step in steps), output
    wait_until_gone(marked, 0.5)
    assert ray_folders() <= before
    (session,) = json.loads((marked / "manifest.json").read_text())["sessions"]
    assert session["status"] == "interrupted" and session["updates_done"] == 0


@pytest.mark.case("E5")
def test_what_a_reward_started_ends_with_a_killed_driver_and_with_ctrl_c(marked, tmp_path):
    """``rewards:spawning`` prints, and leaves a process behind with every sample of a new reward process."""
    folder = tmp_path / "with space"
    folder.mkdir()
    recipe = running.recipe(
        folder, reward={"function": "rewards:spawning", "workers": 2}, run={"dir": str(marked)}, checkpoint={"every": 1}
    )
    before = ray_folders()
    quiet = ("--set", "rollout.logprob_gap_alarm=0")  # what is looked for is what Ray may say
    process = running.start(recipe, "--set", "run.updates=400", *quiet)
    output = running.wait_for(process, "update 2/400")
    assert "oken" not in output.replace("tokens/s", "") and "ray" not in output.lower().replace(
        "starting ray", ""
    ).replace("ray is up", "")
    first, second, *loaded, last = [line for line in output.splitlines() if re.search(r" \(\d+ s\)$", line)]
    assert first.startswith("Ray is up") and second.startswith("the data plane is up")
    assert sorted(line.partition(" (")[0] for line in loaded) == [
        "actor has loaded the model",
        "rollout engine has loaded the model",
    ]
    assert last.startswith("the rollout side is ready")
    assert that_run("sleep", processes_of(marked))
    ports, killed = ports_of(processes_of(marked)), time.time()
    process.kill()
    wait_until_gone(marked)
    process.communicate()
    assert_closed(ports, killed)
    assert ray_folders() <= before  # cleared up once the driver was gone

    process = running.start(recipe, "--set", "run.updates=400", "--resume")
    running.wait_for(process, "update 4/400")
    assert len(ray_folders() - before) == 1  # its own
    assert that_run("sleep", processes_of(marked))
    pressed = time.monotonic()
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        time.sleep(0.4)
    output = running.finish(process, LIMIT_S)
    assert time.monotonic() - pressed < LIMIT_S
    assert process.returncode == 130 and "Traceback" not in output, output
    assert f"stretto train '{recipe}' --set run.updates=400 --resume" in output
    wait_until_gone(marked, 0.5)
    assert ray_folders() <= before
    assert "a reward prints this" in (marked / "logs/rollout.out").read_text()
    rows = running.jsonl(marked, "metrics.jsonl")
    assert len(rows) >= 4 and [row["update"] for row in rows] == list(range(len(rows)))


def test_gcs_killed_ends_the_run_within_seconds_with_the_cause(marked, tmp_path):
    process = running.start(running.recipe(tmp_path, run={"dir": str(marked), "updates": 400}))
    running.wait_for(process, "update 2/400")
    (victim,) = that_run("/gcs/gcs_server", processes_of(marked))
    victim.kill()
    killed = time.monotonic()
    output = running.finish(process, LIMIT_S)
    assert time.monotonic() - killed < LIMIT_S
    assert process.returncode == 1, output
    error, stopped, go_on = output.splitlines()[-3:]
    assert error == "error: Ray's gcs_server process ended (SIGKILL)"
    assert stopped.startswith("stopped after ") and "the newest checkpoint holds " in stopped
    assert go_on.startswith("go on with: stretto train ") and go_on.endswith(" --resume")
    assert (marked / "logs/ray/raylet.out").exists()
    wait_until_gone(marked, 0.5)


@pytest.mark.case("C1")
@pytest.mark.case("E5")
@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_partition_over_the_limit_of_failed_rewards_is_neither_trained_nor_saved(marked, tmp_path, sessions):
    """Rewards fail from row 8 on, which is partition 1: update 1 is trained, and no other, also after a resume."""
    run = marked
    recipe = running.recipe(
        tmp_path,
        run={"dir": str(run)},
        reward={"function": "rewards:fails_from_row_8", "workers": 2},
        data={"shuffle": False},
    )
    for arguments in ([], ["--resume"])[:sessions]:
        output = running.train(recipe, *arguments, code=1)
        wait_until_gone(run)
        assert "partition 1: 32 of 32 samples failed" in output and "the grader is down" in output
        assert [row["update"] for row in running.jsonl(run, "metrics.jsonl")] == [0]
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000001"]
        assert not [e for e in running.jsonl(run, "events.jsonl") if e["name"] == "actor.train" and e["partition"] == 1]
        session = json.loads((run / "manifest.json").read_text())["sessions"][-1]
        assert session["status"] == "failed" and "the grader is down" in session["cause"]


def test_gcs_killed_while_ray_starts_ends_the_run_within_seconds(marked, tmp_path):
    before = ray_folders()
    process = running.start(running.recipe(tmp_path, run={"dir": str(marked), "updates": 400}))
    limit = time.monotonic() + 60
    while not (found := [p for p in processes_of(marked) if p.name() == "gcs_server"]):
        assert time.monotonic() < limit
        time.sleep(0.05)
    time.sleep(0.5)
    found[0].kill()
    output = running.finish(process, LIMIT_S)
    assert process.returncode == 1, output
    assert output.splitlines()[-1].startswith("error: Ray's gcs_server process"), output
    wait_until_gone(marked, 0.5)
    assert ray_folders() <= before
