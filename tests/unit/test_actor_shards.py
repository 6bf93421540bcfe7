"""Checkpoints of several ranks are whole or not used, whatever happened to a shard."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path

import actor_case
import pytest
import torch

from stretto.actor.checkpoint import (
    Checkpointer,
    iter_shards,
    latest_valid,
    problem,
    read_shapes,
    read_shard,
    read_tensors,
    shard_name,
    steps,
)
from stretto.export import export
from stretto.observe.manifest import Manifest
from stretto.resume import find_checkpoint
from stretto.types import StrettoError


def tensors(value: float, rank: int, size: int = 1000) -> dict:
    """Rank r owns ``w{r}``."""
    return {
        "masters": {f"w{rank}": torch.full((size,), value + rank)},
        "optimizer": {f"w{rank}.exp_avg": torch.full((size,), value - rank)},
        "rng": {"cpu": torch.full((8,), rank, dtype=torch.uint8)},
    }


def save(directory: Path, step: int, world: int = 3, keep: int = 3) -> Path:
    ranks = [Checkpointer(directory, keep) for _ in range(world)]
    ranks[0].begin(step)
    shards = [saver.write(step, tensors(step, rank), rank, world) for rank, saver in enumerate(ranks)]
    return ranks[0].commit(step, shards, {"cursor": step}, {})


def test_every_rank_reads_its_own_shard_and_anyone_the_whole(tmp_path):
    path = save(tmp_path, 7)
    assert {p.name for p in path.iterdir()} == {
        "state.json",
        *(f"{kind}-{rank}-of-3.safetensors" for kind in ("masters", "optimizer", "rng") for rank in range(3)),
    }
    assert latest_valid(tmp_path, 3).path == latest_valid(tmp_path).path == path
    assert {name: float(t[0]) for name, t in read_tensors(path, "masters").items()} == {"w0": 7, "w1": 8, "w2": 9}
    assert [list(shard) for shard in iter_shards(path, "masters")] == [["w0"], ["w1"], ["w2"]]
    assert read_shapes(path, "optimizer") == {f"w{rank}.exp_avg": (1000,) for rank in range(3)}
    assert read_shard(path, "rng", 2)["cpu"].tolist() == [2] * 8
    assert shard_name("masters", 0, 1) == "masters.safetensors"


def half(path: Path) -> None:
    file = path / "masters-1-of-3.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(path: Path) -> None:
    file = path / "optimizer-2-of-3.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(bytes(data))


def unlisted(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    del state["files"]["rng-2-of-3.safetensors"]
    (path / "state.json").write_text(json.dumps(state))


def mixed(path: Path) -> None:
    """Weights of step 20 with one rank's of step 10."""
    shutil.copy(path.parent / "step_000010" / "masters-2-of-3.safetensors", path)


def fewer(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"world": 2}))


@pytest.mark.case("G2")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (half, "masters-1-of-3.safetensors has .* bytes instead of"),
        (flip, "optimizer-2-of-3.safetensors is corrupt"),
        (mixed, "masters-2-of-3.safetensors is corrupt"),
        (lambda path: (path / "rng-0-of-3.safetensors").unlink(), "rng-0-of-3.safetensors is missing"),
        (unlisted, "lists no rng-2-of-3.safetensors"),
        (fewer, "saved by 2 actor ranks, this run has 3"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: path.rename(path.with_name(path.name + ".tmp")), "cut short before it was renamed"),
    ],
)
def test_a_checkpoint_with_a_broken_shard_is_passed_over_with_its_reason(tmp_path, damage, reason):
    good, broken = save(tmp_path, 10), save(tmp_path, 20)
    damage(broken)
    found = latest_valid(tmp_path, 3)
    assert found.path == good and found.state["cursor"] == 10
    ((_, why),) = found.passed_over
    assert re.search(reason, why), why


@pytest.mark.case("G2")
@pytest.mark.parametrize(("saved", "world"), [(1, 2), (2, 1), (2, 4)])
def test_a_checkpoint_of_another_number_of_ranks_is_passed_over(tmp_path, saved, world):
    good, other = save(tmp_path, 10, world), save(tmp_path, 20, saved)
    found = latest_valid(tmp_path, world)
    assert found.path == good
    plural = "s" if saved > 1 else ""
    assert found.passed_over == (
        (other, f"it was saved by {saved} actor rank{plural}, this run has {world} (actor.data_parallel)"),
    )


@pytest.mark.case("G2")
def test_a_run_whose_only_checkpoints_are_of_another_world_says_so(tmp_path):
    save(tmp_path / "checkpoints", 4, world=2)
    cfg = actor_case.config(run_dir=str(tmp_path), actor={"data_parallel": 4})
    with pytest.raises(
        StrettoError, match=r"none of its checkpoints can be used.*\n.*saved by 2 actor ranks, .* has 4"
    ):
        find_checkpoint(cfg, resume=True)


def test_checkpoints_are_pruned_and_set_aside_whatever_the_number_of_ranks(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert [step for step, _ in steps(tmp_path)] == [3, 2]
    again = save(tmp_path, 2, keep=2)
    assert not problem(again, 3)
    assert [p.name for p in tmp_path.glob("*.aside*")] == ["step_000003.aside"]


def test_a_full_disk_of_one_rank_costs_the_save_and_nothing_else(tmp_path):
    good = save(tmp_path, 1, world=2)
    first, second = (Checkpointer(tmp_path, 2) for _ in range(2))
    first.begin(2)
    first.write(2, tensors(2, 0), 0, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # every file of this process ends at 100 kB
    try:
        with pytest.raises(StrettoError, match=r"step_000002 could not be written .* earlier ones are untouched"):
            second.write(2, tensors(2, 1, size=100_000), 1, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "step_000002.tmp").is_dir(), "other ranks may still be writing to it"
    first.abandon(2)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]
    assert not problem(good, 2)


def test_a_shard_that_went_to_another_disk_is_found_missing_before_the_checkpoint_is(tmp_path):
    here, there = Checkpointer(tmp_path / "here", 2), Checkpointer(tmp_path / "there", 2)
    here.begin(1)
    there.begin(1)
    shards = [here.write(1, tensors(1, 0), 0, 2), there.write(1, tensors(1, 1), 1, 2)]
    with pytest.raises(StrettoError, match=r"masters-1-of-2.* run\.dir must be one folder for all ranks"):
        here.commit(1, shards, {"cursor": 1}, {})
    assert list((tmp_path / "here").iterdir()) == []


def test_export_joins_the_shards_of_any_number_of_ranks(tmp_path):
    from safetensors.torch import load_file

    cfg = actor_case.config(run_dir=str(tmp_path / "run"))
    named = {name: t.clone() for name, t in actor_case.core(cfg, {}, seed=5).trainer.master.named().items()}
    names = sorted(named)
    ranks = [Checkpointer(tmp_path / "run/checkpoints", 2) for _ in range(4)]
    ranks[0].begin(3)
    shards = [
        saver.write(3, {"masters": {n: named[n] for n in names[r::4]}, "optimizer": {}, "rng": {}}, r, 4)
        for r, saver in enumerate(ranks)
    ]
    path = ranks[0].commit(3, shards, {"cursor": 3}, {})
    Manifest.start(
        tmp_path / "run",
        config=cfg.model_dump(mode="json"),
        sources={},
        seeds={},
        model={},
        data={},
        first_update=0,
    )
    assert export(tmp_path / "run", tmp_path / "model") == path
    written = load_file(tmp_path / "model/model.safetensors")
    assert written
    for name, tensor in written.items():
        assert torch.equal(tensor, named[name]), name
