"""A campaign of real runs of a tiny model, and stages that run alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import running

import stretto
from stretto import switches
from stretto.bench.alone import Measured
from stretto.bench.campaign import attempts
from stretto.bench.sampler import read_hardware
from stretto.config import Config
from stretto.observe.manifest import read_manifest
from stretto.observe.metrics import read_metrics
from stretto.observe.spans import intervals, overlap
from stretto.observe.trace import read_events

PLAN = """
name = "tiny"
recipe = "recipe.toml"
conditions = ["P+S"]
seeds = [3]
updates = 3
warmup = 1
windows = ["1-2"]
primary = ["P+S", "B"]
pool_size = 1
"""


def measured(path: Path) -> Measured:
    found = json.loads(path.read_text())
    return Measured(**found | {"seconds": tuple(found["seconds"]), "tokens": tuple(found["tokens"])})


def test_training_alone_works_while_nothing_is_generated(tmp_path):
    path = running.recipe(tmp_path, staleness={"max": 1})
    run_dir = tmp_path / "alone"
    process = running.stretto(
        *("bench", "alone", "training", str(path), str(run_dir), "--condition", "S", "--warmup", "1"),
        *("--set", "switches.chunk_overlap=true", "--set", "eval.every=0"),
    )
    output = running.finish(process)
    assert process.returncode == 0, output
    found, rows, events = (
        measured(run_dir / "alone.json"),
        read_metrics(run_dir),
        read_events(run_dir / "events.jsonl"),
    )
    assert (found.stage, found.condition, found.updates) == ("training", "S", 4)
    assert found.tokens == tuple(row["tokens"] for row in rows[1:])
    assert all(0 < seconds < row["step_s"] for seconds, row in zip(found.seconds[:-1], rows[1:], strict=False))
    for span in ("actor.forward", "actor.train", "actor.optimizer"):
        assert intervals(events, span) and overlap(events, "rollout.generate", span) == 0
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_campaign_runs_every_cell_and_stage_and_goes_on_where_nothing_is_left(tmp_path):
    # Of a copy of the package that git does not know, so that the state of this checkout does not matter.
    shutil.copytree(Path(stretto.__file__).parent, tmp_path / "stretto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(running.__file__).parent / "rewards.py", tmp_path)
    running.recipe(tmp_path, staleness={"max": 1})
    (tmp_path / "plan.toml").write_text(PLAN)

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "stretto.cli", "bench", "run", "plan.toml", "--out", "campaign"],
            capture_output=True, text=True, cwd=tmp_path, timeout=850, check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output = run()
    assert "01/03 block 0 B seed 3: took" in output
    cells = attempts(tmp_path / "campaign")
    assert [cell.name for cell in cells] == ["00-0-B", "00-1-P+S", "00-2-B"]
    for cell in cells:
        assert cell.note is not None and cell.note.status == "finished"
        session = read_manifest(cell.run_dir)["sessions"][-1]
        assert session["status"] == "finished" and session["switches"]["condition"] == cell.note.condition
        assert session["boot_id"] == cell.note.boot_id and session["seeds"] == {"run.seed": 3}
        config = Config.model_validate_json(json.dumps(session["config"]))
        events = read_events(cell.run_dir / "events.jsonl")
        assert all(switch.engaged(events).ok for switch in switches.on(config))
        _, samples = read_hardware(cell.hardware_path)
        busy = [sample.own_cores for sample in samples]
        assert len(busy) > 5 and max(busy) > 0.5
        assert not (cell.run_dir / "checkpoints").exists()
    losses = [[row["loss"] for row in read_metrics(cell.run_dir)] for cell in cells]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 3
    stages = {attempt.name: attempt for attempt in attempts(tmp_path / "campaign", "alone")}
    assert sorted(stages) == ["processor-B", "processor-P", "rollout-B", "training-B", "training-S"]
    for attempt in stages.values():
        found = measured(attempt.run_dir / "alone.json")
        assert found.updates == len(found.seconds) == 8 and min(found.seconds) >= 0 < sum(found.seconds)
        assert f"{found.stage}-{found.condition}" == attempt.name
    # The rollout side makes the same samples from processed prompts as training has seen under its first weights.
    rollout, training = (measured(stages[name].run_dir / "alone.json") for name in ("rollout-B", "training-B"))
    assert rollout.tokens[0] == training.tokens[0]
    assert "8 of 8 runs have finished earlier" in run()
