"""Whether a run may go on, start over, or must be refused."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stretto.config import Config
from stretto.records import Records
from stretto.resume import again, failed, find_checkpoint, what_is_left
from stretto.types import StrettoError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"run": {"dir": str(tmp_path), "updates": 20}, "checkpoint": {"every": 5}})


def trained(folder: Path, updates: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"update": k}) + "\n" for k in range(updates)))


@pytest.mark.parametrize("updates", [0, 4])
def test_a_run_that_ended_before_its_first_checkpoint_starts_over(config, tmp_path, updates):
    trained(tmp_path, updates)
    (tmp_path / "checkpoints/step_000005.tmp").mkdir(parents=True)
    assert find_checkpoint(config, resume=True).path is None


@pytest.mark.parametrize(("every", "updates"), [(5, 5), (0, 20)])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(config, tmp_path, every, updates):
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": every})})
    trained(tmp_path, updates)
    with pytest.raises(StrettoError, match=rf"{updates} updates, but .* no checkpoint.* another run.dir"):
        find_checkpoint(config, resume=True)


def test_the_checkpoints_that_were_due_are_those_of_the_options_that_the_run_began_with(config, tmp_path):
    trained(tmp_path, 4)
    was = {"checkpoint": {"every": 3}, "run": {"updates": 20}}
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "sessions": [{"config": was}]}))
    with pytest.raises(StrettoError, match="4 updates"):
        find_checkpoint(config, resume=True)


def test_broken_checkpoints_are_named_and_the_run_is_not_started_over(config, tmp_path):
    for name, state in (("step_000005", "{"), ("step_000010", '{"files": {}, "format": 1, "world": 1}')):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text(state)
    with pytest.raises(StrettoError) as caught:
        find_checkpoint(config, resume=True)
    message = str(caught.value)
    assert "step_000005: state.json is not readable" in message
    assert "step_000010: state.json has no cursor" in message
    assert "another run.dir" in message


def test_a_folder_in_which_nothing_was_trained_holds_no_run(config, tmp_path):
    trained(tmp_path, 0)
    assert find_checkpoint(config, resume=False).path is None
    trained(tmp_path, 1)
    with pytest.raises(StrettoError, match="--resume"):
        find_checkpoint(config, resume=False)


def test_the_command_that_goes_on_can_be_pasted_into_a_shell():
    line = again("my recipes/it's.toml", ["reward.function=a:b c", "run.seed=3"])
    options = ["--set", "reward.function=a:b c", "--set", "run.seed=3", "--resume"]
    assert shlex.split(line) == ["stretto", "train", "my recipes/it's.toml", *options]


def test_a_run_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StrettoError, match=r"cannot write to .*metrics\.jsonl"):
        Records(tmp_path, 0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("done", "saved", "says"),
    [
        (0, 0, "there is no checkpoint yet"),
        (1, 0, "there is no checkpoint yet: update 1 is lost and will be trained again"),
        (3, 0, "there is no checkpoint yet: all 3 are lost and will be trained again"),
        (30, 30, "the newest checkpoint holds 30: nothing is lost"),
        (31, 30, "the newest checkpoint holds 30: update 31 is lost and will be trained again"),
        (32, 30, "the newest checkpoint holds 30: updates 31 to 32 are lost and will be trained again"),
    ],
)
def test_what_a_stopped_run_has_lost(done, saved, says):
    command = again("a.toml", [])
    assert what_is_left(done, saved, 50, command) == (
        f"stopped after {done} of 50 updates; {says}\ngo on with: stretto train a.toml --resume"
    )


def test_an_error_ends_with_what_is_left():
    error = failed(StrettoError("the ledger died: it was killed; restart from the last checkpoint"), "stopped\ngo on")
    assert str(error) == "the ledger died: it was killed\nstopped\ngo on"
