"""Checkpoints are whole or not used, and a failed save costs nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

from stretto.actor.checkpoint import (
    Checkpointer,
    config_hash,
    latest_valid,
    problem,
    read_published,
    read_tensors,
    restore_rng,
    rng_tensors,
    steps,
)
from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.types import StrettoError


def tensors(value: float, size: int = 1000):
    return {
        "masters": {"a": torch.full((size,), value), "b": torch.full((2, 3), -value)},
        "optimizer": {"a.exp_avg": torch.full((size,), value / 2)},
        "rng": rng_tensors(),
    }


def weights(version: int):
    return lambda: iter_buckets({"w": torch.full((50,), float(version))}, version, torch.bfloat16)


def save(saver: Checkpointer, step: int, versions: tuple[int, ...] = (), size: int = 1000) -> Path:
    return save_tensors(saver, step, tensors(step, size), {v: weights(v) for v in versions})


def save_tensors(saver: Checkpointer, step: int, named, published=None) -> Path:
    """All of a save by one rank."""
    saver.begin(step)
    try:
        shard = saver.write(step, named)
    except StrettoError:
        saver.abandon(step)
        raise
    return saver.commit(step, [shard], {"cursor": step}, published or {})


def test_what_is_saved_is_read_back_bit_for_bit(tmp_path):
    path = save(Checkpointer(tmp_path, 2), 12, (10, 11))
    assert path.name == "step_000012"
    found = latest_valid(tmp_path)
    assert found.path == path
    assert found.state["cursor"] == 12
    assert found.passed_over == ()
    assert torch.equal(read_tensors(path, "masters")["a"], torch.full((1000,), 12.0))
    published = read_published(path)
    assert sorted(published) == [10, 11]
    assert published[11][0].version == 11
    assert published[11][0].metas[0].dtype == "bfloat16"
    assert {p.suffix for p in path.iterdir()} == {".safetensors", ".json"}


def test_no_checkpoint_is_an_empty_find(tmp_path):
    assert latest_valid(tmp_path / "none").path is None
    assert latest_valid(tmp_path).path is None


def cut(path: Path) -> None:
    data = (path / "masters.safetensors").read_bytes()
    (path / "masters.safetensors").write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray((path / "optimizer.safetensors").read_bytes())
    data[-3] ^= 1
    (path / "optimizer.safetensors").write_bytes(bytes(data))


def other_world(path: Path) -> None:
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"world": 4}))


def older(path: Path) -> None:
    """A mixture: masters of step 20, optimizer of step 10."""
    shutil.copy(path.parent / "step_000010" / "optimizer.safetensors", path / "optimizer.safetensors")


def only_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "masters.safetensors has .* bytes instead of"),
        (flip, "optimizer.safetensors is corrupt"),
        (older, "optimizer.safetensors is corrupt"),
        (other_world, r"saved by 4 actor ranks, this run has 1 \(actor.data_parallel\)"),
        (only_folder, "state.json is missing"),
        (lambda p: (p / "state.json").write_text(""), "state.json is not readable"),
        (lambda p: (p / "state.json").write_text("{}"), "state.json is not readable"),
        (lambda p: (p / "state.json").write_text("[1"), "state.json is not readable"),
        (lambda p: (p / "rng.safetensors").unlink(), "rng.safetensors is missing"),
    ],
)
def test_a_broken_newest_checkpoint_is_passed_over_with_its_reason(tmp_path, damage, reason):
    """G2: the folder before it is used, and the broken one is neither loaded in part nor overwritten silently."""
    saver = Checkpointer(tmp_path, 3)
    good = save(saver, 10)
    broken = save(saver, 20)
    damage(broken)
    found = latest_valid(tmp_path, world=1)
    assert found.path == good
    assert found.state["cursor"] == 10
    ((path, why),) = found.passed_over
    assert path == broken
    assert re.search(reason, why), why

    resumed = Checkpointer(tmp_path, 3)
    resumed.previous = good
    save(resumed, 20)
    assert not problem(tmp_path / "step_000020")
    assert (tmp_path / "step_000020.aside").is_dir()


def test_an_unfinished_folder_is_passed_over_and_removed_by_the_next_save(tmp_path):
    saver = Checkpointer(tmp_path, 2)
    good = save(saver, 1)
    shutil.copytree(good, tmp_path / "step_000002.tmp")
    found = latest_valid(tmp_path)
    assert found.path == good
    assert "cut short" in found.passed_over[0][1]
    save(saver, 3)
    assert not list(tmp_path.glob("*.tmp"))


def test_the_newest_n_are_kept_and_broken_ones_do_not_count(tmp_path):
    saver = Checkpointer(tmp_path, 2)
    for step in (1, 2, 3):
        save(saver, step)
    assert [n for n, _ in steps(tmp_path)] == [3, 2]
    cut(tmp_path / "step_000003")
    save(saver, 4)
    assert [n for n, _ in steps(tmp_path)] == [4, 3, 2], "2 is the second newest whole one"


def test_published_versions_are_hard_linked_from_the_previous_checkpoint(tmp_path):
    saver = Checkpointer(tmp_path, 3)
    asked = []

    def counted(version):
        def call():
            asked.append(version)
            return weights(version)()

        return call

    a = save_tensors(saver, 2, tensors(2), {v: counted(v) for v in (0, 1)})
    b = save_tensors(saver, 3, tensors(3), {v: counted(v) for v in (1, 2)})
    assert asked == [0, 1, 2]
    name = "published_000001.safetensors"
    assert os.path.samefile(a / name, b / name)
    shutil.rmtree(a)
    assert not problem(b)
    assert sorted(read_published(b)) == [1, 2]


def test_a_save_that_runs_out_of_space_costs_nothing_and_the_next_one_works(tmp_path):
    saver = Checkpointer(tmp_path, 1)
    good = save(saver, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # every file of this process ends at 100 kB
    try:
        with pytest.raises(StrettoError, match=r"step_000002 could not be written .* earlier ones are untouched"):
            save(saver, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert not problem(good)
    save(saver, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_saving_one_step_twice_leaves_one_whole_folder(tmp_path):
    saver = Checkpointer(tmp_path, 2)
    save(saver, 5, (3, 4))
    path = save(saver, 5, (3, 4))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000005"]
    assert not problem(path)


def test_folders_of_undone_updates_are_set_aside_so_that_a_later_resume_does_not_pick_them(tmp_path):
    saver = Checkpointer(tmp_path, 5)
    for step in (10, 20, 30):
        save(saver, step)
    again = Checkpointer(tmp_path, 5)  # somebody resumed from step 10
    again.previous = tmp_path / "step_000010"
    new = save(again, 15)
    assert latest_valid(tmp_path).path == new
    assert sorted(p.name for p in tmp_path.glob("*.aside")) == ["step_000020.aside", "step_000030.aside"]


def test_generator_states_are_restored():
    torch.manual_seed(3)
    kept = {name: t.clone() for name, t in rng_tensors().items()}
    first = torch.rand(4)
    torch.manual_seed(8)
    restore_rng(kept)
    assert torch.equal(torch.rand(4), first)


def test_config_hash_leaves_out_where_a_run_lives_and_nothing_else():
    base = Config()
    moved = Config.model_validate({"run": {"dir": "elsewhere"}, "checkpoint": {"keep": 9}})
    assert config_hash(base) == config_hash(moved)
    assert config_hash(base) != config_hash(Config.model_validate({"run": {"seed": 1}}))
    assert config_hash(base) != config_hash(Config.model_validate({"actor": {"lr": 1e-3}}))


def test_how_often_a_partition_is_refilled_may_change_on_a_resume_and_whether_it_is_may_not():
    none, one, five = (config_hash(Config.model_validate({"rollout": {"refill_rounds": n}})) for n in (0, 1, 5))
    assert one == five != none
