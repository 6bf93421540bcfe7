"""Rows E4 and G1 of the collected public reports: what is trained over restarts, and in which order."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import running
import torch
from processes import assert_closed, ports_of, processes_of, wait_until_gone
from safetensors.torch import load_file

from stretto.observe.raw import read_raw

pytestmark = pytest.mark.timeout(900)
SAMPLES = 4


def recipe(folder: Path, run: Path, *, prompts: int, at_once: int, updates: int, staleness: int = 1) -> Path:
    """A recipe on prompts with the ids 0 to ``prompts`` - 1, whose rewards tell which prompt was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": i, "prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return running.recipe(
        folder,
        run={"dir": str(run), "updates": updates},
        data={"source": "files", "train_files": [str(folder / "rows.jsonl")], "id_column": "id"},
        rollout={"prompts_per_partition": at_once, "n_samples_per_prompt": SAMPLES},
        actor={"chunks_per_mini": 1},
        reward={"function": "rewards:tells_its_row", "workers": 2},
        staleness={"max": staleness},
        checkpoint={"every": 1, "keep": updates},
        eval={"every": 0},
    )


def trained_ids(run: Path, update: int) -> list[int]:
    """The prompts of an update of the surviving lineage, in order, as the actor's own record of its rewards tells."""
    ids = [int(reward) for reward in read_raw(run, update)["rewards"]]
    assert all(count == SAMPLES for count in Counter(ids).values())
    return list(dict.fromkeys(ids))


def kill_after(recipe: Path, run: Path, line: str, *arguments: str) -> None:
    process = running.start(recipe, *arguments)
    running.wait_for(process, line)
    ports = ports_of(processes_of(run))
    killed = time.time()
    process.kill()
    wait_until_gone(run)
    process.communicate()
    assert_closed(ports, killed)


@pytest.mark.case("E4")
@pytest.mark.case("E5")
@pytest.mark.long
def test_prompts_0_to_7_are_trained_once_each_over_two_kills(marked, tmp_path):
    """Two prompts an update, two more generated ahead; killed after the first step, and again after the next one."""
    path = recipe(tmp_path, marked, prompts=8, at_once=2, updates=4)
    kill_after(path, marked, "update 1/4")
    trained = [int(p.name.removeprefix("step_")) for p in (marked / "checkpoints").glob("step_??????")]
    kill_after(path, marked, f"update {max(trained) + 1}/4", "--resume")
    running.train(path, "--resume")
    assert sorted(i for update in range(4) for i in trained_ids(marked, update)) == list(range(8))
    assert [row["update"] for row in running.jsonl(marked, "metrics.jsonl")] == [0, 1, 2, 3]


def went_on_from(whole: Path, folder: Path, step: int) -> Path:
    """What a run would have left that was killed right after its checkpoint of update ``step``."""
    run = folder / "run"
    shutil.copytree(whole, run)
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    return run


def assert_same(one: Path, other: Path, updates: int) -> None:
    """Prompts, tokens, log-probs, losses and weights, to the bit."""
    assert running.numbers(one) == running.numbers(other)
    assert running.jsonl(one, "fingerprints.jsonl") == running.jsonl(other, "fingerprints.jsonl")
    for update in range(updates):
        raw, again = read_raw(one, update), read_raw(other, update)
        assert all(raw[name].tobytes() == again[name].tobytes() for name in raw)
    name = f"checkpoints/step_{updates:06d}/masters.safetensors"
    weights, again = load_file(one / name), load_file(other / name)
    assert all(torch.equal(weights[n], again[n]) for n in weights)


@pytest.mark.long
@pytest.mark.case("G1")
def test_a_run_resumed_twice_first_at_the_end_of_an_epoch_is_the_run_that_went_straight_on(tmp_path):
    """Epochs of 10 prompts, 5 an update; saved after update 2, which ends the first, and resumed there and later."""
    path = recipe(tmp_path / "a", tmp_path / "a/run", prompts=10, at_once=5, updates=6)
    running.train(path)
    whole = tmp_path / "a/run"
    epochs = [trained_ids(whole, 2 * epoch) + trained_ids(whole, 2 * epoch + 1) for epoch in range(3)]
    assert all(sorted(ids) == list(range(10)) for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3

    run = went_on_from(whole, tmp_path / "b", 2)
    arguments = ("--resume", "--set", f"run.dir={run}")
    process = running.start(path, *arguments)
    running.wait_for(process, "update 4/6")
    process.kill()
    process.communicate()
    running.train(path, *arguments)
    assert_same(whole, run, 6)


@pytest.mark.long
@pytest.mark.case("G1")
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_three_updates_and_three_after_a_resume_are_six_straight_ones(tmp_path, staleness):
    path = recipe(tmp_path / "a", tmp_path / "a/run", prompts=10, at_once=5, updates=6, staleness=staleness)
    running.train(path)
    for step in (1, 3, 5):
        run = went_on_from(tmp_path / "a/run", tmp_path / f"from{step}", step)
        running.train(path, "--resume", "--set", f"run.dir={run}")
        assert_same(tmp_path / "a/run", run, 6)
