"""Row G2 of the collected public reports, as a user meets it: what a resume goes on from when the last save was cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stretto.actor.checkpoint import Checkpointer, config_hash, read_published, read_tensors, rng_tensors
from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.resume import find_checkpoint
from stretto.types import StrettoError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(tmp_path), "updates": 30}, "checkpoint": {"every": 10}})


def save(config: Config, step: int, world: int = 1, previous: Path | None = None) -> Path:
    """A whole checkpoint whose every tensor holds ``step``."""
    saver = Checkpointer(Path(config.run.dir) / "checkpoints", keep=3)
    saver.previous = previous
    saver.begin(step)
    value = torch.full((500,), float(step))
    tensors = {"masters": {"w": value}, "optimizer": {"w.exp_avg": value}, "rng": rng_tensors()}
    shards = [saver.write(step, tensors, rank, world) for rank in range(world)]
    published = {step - 1: lambda: iter_buckets({"w": value - 1}, step - 1, torch.float32)}
    return saver.commit(step, shards, {"cursor": step, "config_hash": config_hash(config)}, published)


def half(pattern: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (file,) = path.glob(pattern)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return cut


def only_a_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def shard_of_another_world(path: Path) -> None:
    """One rank's file of a save by two, in place of the whole."""
    (file,) = path.glob("masters*.safetensors")
    file.rename(path / "masters-0-of-2.safetensors")


def saved_by_two(path: Path) -> None:
    """All that a save by two ranks says of itself, in the folder of a save by one."""
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"world": 2}))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a model file cut in half": (half("masters*"), "bytes instead of"),
    "an optimizer file cut in half": (half("optimizer*"), "bytes instead of"),
    "a published version cut in half": (half("published_*"), "bytes instead of"),
    "a state file cut in half": (half("state.json"), "state.json is not readable"),
    "an empty state file": (lambda path: (path / "state.json").write_text("") and None, "state.json is not readable"),
    "only a folder": (only_a_folder, "state.json is missing: the save was cut short"),
    "a shard of another world size": (shard_of_another_world, "masters.safetensors is missing"),
    "another world size": (saved_by_two, "saved by 2 actor ranks, this run has 1"),
}


@pytest.mark.case("G2")
@pytest.mark.parametrize("what", DAMAGES)
def test_a_resume_falls_back_to_step_10_says_why_and_mixes_nothing(config, what):
    damage, reason = DAMAGES[what]
    good = save(config, 10)
    broken = save(config, 20, previous=good)
    (broken.parent / "latest").write_text("step_000020")  # nothing but what is whole is believed
    damage(broken)
    left = {path.name: path.read_bytes() for path in broken.iterdir()}

    found = find_checkpoint(config, resume=True)
    assert found.path == good and found.state["cursor"] == 10
    ((path, why),) = found.passed_over
    assert path == broken and reason in why
    for kind in ("masters", "optimizer"):
        assert all(bool((tensor == 10).all()) for tensor in read_tensors(found.path, kind).values())
    assert sorted(read_published(found.path)) == [9]

    again = save(config, 20, previous=good)
    assert find_checkpoint(config, resume=True).path == again
    aside = again.with_name("step_000020.aside")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == left


@pytest.mark.case("G2")
def test_where_none_is_whole_nothing_is_started_over_and_each_is_named_with_its_reason(config):
    for step, what in ((10, "an empty state file"), (20, "a model file cut in half")):
        DAMAGES[what][0](save(config, step))
    with pytest.raises(StrettoError) as caught:
        find_checkpoint(config, resume=True)
    assert "step_000010: state.json is not readable" in str(caught.value)
    assert "step_000020: masters" in str(caught.value) and "bytes instead of" in str(caught.value)
