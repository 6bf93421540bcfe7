"""Sixty processes of one long run killed at random: what is left is bit for bit the run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import running
from processes import processes_of, wait_until_gone

KILLS = int(os.environ.get("KILLS", "60"))
UPDATES = 360
END_S = 10
"""A run that a death ends has ended within this time."""
VICTIMS = {  # what to look for in the command line of a process
    "driver": "stretto.cli",
    "actor rank": "ray::ActorProcess",
    "coordinator": "ray::RolloutProcess",
    "engine": "ray::EngineProcess",
    "reward worker": "reward_worker.py",
    "ledger": "ray::LedgerActor",
    "gcs_server": "gcs_server",
    "raylet": "raylet/raylet",
}
SURVIVABLE = {"engine", "reward worker"}
"""Their deaths need not end a run."""


def victims(session: Session, kind: str) -> list[psutil.Process]:
    if kind == "driver":  # a process that it starts has its command line until it becomes another program
        return [psutil.Process(session.process.pid)] if session.process.poll() is None else []
    found = []
    for process in processes_of(session.run):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if VICTIMS[kind] in " ".join(command[:3]):
            found.append(process)
    return found


class Session:
    """One start of the command, its output in a file."""

    def __init__(self, recipe: Path, run: Path, number: int):
        self.run, self.log = run, run.parent / f"session-{number}.log"
        with self.log.open("w") as log:
            arguments = ["--resume"] if number else []
            self.process = running.start(recipe, *arguments, output=log)
        self.begun = time.monotonic()

    def wait(self, chance: random.Random) -> None:
        """Until somewhere in the start-up, or somewhere in an update."""
        if chance.random() < 0.2:
            end = self.begun + chance.uniform(0.5, 8.0)
            while time.monotonic() < end and self.process.poll() is None:
                time.sleep(0.05)
            return
        seen = self.log.read_text().count("update ")
        while self.process.poll() is None and self.log.read_text().count("update ") == seen:
            assert time.monotonic() - self.begun < 300, f"hangs:\n{self.log.read_text()[-2000:]}"
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 1.5))

    def ended(self, limit_s: float) -> bool:
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.case("E4")
@pytest.mark.parametrize("seed", [0])
def test_a_run_killed_sixty_times_is_the_run_that_nobody_disturbed(marked, tmp_path, capsys, seed):
    chance = random.Random(seed)
    options = {
        "rollout": {"replicas": 2, "max_engine_restarts": 1000, "engine_timeout_s": 60.0},
        "actor": {"data_parallel": 2},
        "reward": {"workers": 2, "function": "rewards:variety"},
        "checkpoint": {"every": 2, "keep": 2},
    }
    calm_folder = tmp_path / "calm"
    calm_folder.mkdir()
    running.train(running.recipe(calm_folder, run={"updates": UPDATES}, **options), limit_s=600)
    recipe = running.recipe(tmp_path, run={"dir": str(marked), "updates": UPDATES}, **options)

    killed: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    endings: list[float] = []
    undone = number = 0
    session: Session | None = None
    while sum(killed.values()) < KILLS:
        if session is None:
            session, number = Session(recipe, marked, number), number + 1
        session.wait(chance)
        if session.process.poll() == 0:  # all updates trained before all kills were spent: train more of them
            pytest.fail(f"the run finished after {sum(killed.values())} kills; raise UPDATES")
        kind = chance.choice([kind for kind in VICTIMS if victims(session, kind)] or ["driver"])
        found = victims(session, kind)
        if not found:
            continue
        before = len(running.jsonl(marked, "metrics.jsonl")) if (marked / "metrics.jsonl").exists() else 0
        found[chance.randrange(len(found))].send_signal(signal.SIGKILL)
        sent = time.monotonic()
        killed[kind] += 1
        if kind in SURVIVABLE and not session.ended(1.0):
            survived[kind] += 1
            continue
        assert session.ended(END_S), f"{kind} killed, still running:\n{session.log.read_text()[-2000:]}"
        endings.append(time.monotonic() - sent)
        output = session.log.read_text()
        assert session.process.returncode != 0, output
        if kind != "driver":
            assert output.splitlines()[-1].startswith(("error:", "go on with", "stopped")), f"{kind}:\n{output[-2000:]}"
        wait_until_gone(marked, END_S)
        left = marked / "checkpoints"
        steps = [int(p.name.removeprefix("step_")) for p in left.glob("step_??????")] if left.exists() else []
        undone += max(0, before - max(steps, default=0))
        session = None
    if session is not None:
        assert session.ended(600), session.log.read_text()[-2000:]
        assert session.process.returncode == 0, session.log.read_text()[-2000:]
    else:
        running.train(recipe, "--resume", limit_s=600)

    calm = calm_folder / "run"
    assert running.jsonl(marked, "fingerprints.jsonl") == running.jsonl(calm, "fingerprints.jsonl")
    rows = running.jsonl(marked, "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(UPDATES))  # each once: none lost, none twice
    wait_until_gone(marked)
    with capsys.disabled():
        print(f"\n{sum(killed.values())} kills in {number} sessions: {dict(killed)}; survived {dict(survived)}")
        print(f"ended within {max(endings):.1f} s (median {statistics.median(endings):.1f}); {undone} updates undone")
