"""What is asked before a start, all at once: options, machine, reward function, model and data; and on a resume."""

import json
import time
from pathlib import Path

import pytest
import tiny

from stretto.actor.checkpoint import Found, config_hash
from stretto.config import Config
from stretto.preflight import checked
from stretto.resume import find_checkpoint
from stretto.types import ConfigError, StrettoError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "digits-sft.toml"  # it has a [model.config], so nothing is loaded or downloaded


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def problems(*sets: str, folder: Path, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked(RECIPE, [f"run.dir={folder / 'run'}", *sets], {}, **kwargs)
    return caught.value.problems


def test_a_sound_recipe_passes_and_leaves_nothing_behind(tmp_path):
    config, sources = checked(RECIPE, [f"run.dir={tmp_path / 'run'}"], {})
    assert config.model.config["text"]["hidden_size"] == 128
    assert sources["run.dir"] == "--set"
    assert not (tmp_path / "run").exists()


def test_problems_of_every_round_are_reported_together(tmp_path):
    found = problems(
        "actor.lrr=1",
        "rollout.n_samples_per_prompt=1",
        "cluster.rollout_cores=[7]",
        "reward.function=json:nope",
        "rollout.max_response_tokens=3",
        "run.updates=0",
        folder=tmp_path,
    )
    assert [p.split(" ")[0] for p in found] == [
        "actor.lrr", "run.updates", "rollout.n_samples_per_prompt", "cluster.rollout_cores",
        "rollout.max_response_tokens", "reward.function",
    ]  # fmt: skip


def test_what_is_said_of_an_option_is_not_said_twice(tmp_path):
    assert len(problems("rollout.max_response_tokens=many", folder=tmp_path)) == 1
    assert len(problems("model.config.text.hiden_size=3", "data.digits=16", folder=tmp_path)) == 1
    assert len(problems("rollout.max_respons_tokens=8", folder=tmp_path)) == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nope", "has no 'nope'"),
        ("NUMBER", "'NUMBER' is a int"),
        ("later", "it is asynchronous"),
        ("one", "cannot be called as function(response, answer)"),
    ],
)
def test_a_reward_function_that_can_not_be_called_is_refused_before_a_start(tmp_path, monkeypatch, function, said):
    (tmp_path / "rewards_of_a_test.py").write_text(
        "NUMBER = 3\nasync def later(response, answer): return 1\ndef one(response): return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = time.monotonic()
    (problem,) = problems(f"reward.function=rewards_of_a_test:{function}", "cluster.actor_cores=[0]", folder=tmp_path)
    assert problem.startswith(f'reward.function = "rewards_of_a_test:{function}" (--set): ')
    assert problem.count("reward.function") == 1
    assert said in problem
    assert time.monotonic() - begun < 20


def test_images_too_large_for_a_microbatch_are_refused_before_any_is_processed(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.models.qwen3_vl.Qwen3VL.process", lambda *_: pytest.fail("processed"))
    (problem,) = problems("model.min_pixels=100000000", "model.max_pixels=200000000", folder=tmp_path)
    assert problem.startswith("actor.max_patches_per_microbatch = 16384 (default): a prompt has 390728 image patches")


def test_batch_options_that_are_too_small_are_refused(tmp_path):
    found = problems(
        "actor.max_tokens_per_microbatch=9",
        "actor.max_patches_per_microbatch=4",
        "rollout.prompts_per_partition=500000",
        folder=tmp_path,
    )
    assert [p.split(" ")[0].rstrip(":") for p in found] == [
        "actor.max_patches_per_microbatch", "actor.max_tokens_per_microbatch", "plane.capacity_mib",
    ]  # fmt: skip


def test_the_warm_start_tries_the_model_but_needs_no_training_options(tmp_path):
    checked(RECIPE, [f"run.dir={tmp_path / 'run'}", "rollout.n_samples_per_prompt=1"], {}, training=False)
    (problem,) = problems("model.config.vision.out_hidden_size=64", folder=tmp_path, training=False)
    assert problem.startswith("model.config.vision.out_hidden_size = 64 (--set): must equal")


# Resuming --------------------------------------------------------------------------------------------------------


def config_of(**blocks) -> Config:
    return Config.model_validate({"model": {"config": tiny.BLOCK}, **blocks})


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A run folder whose checkpoint was saved under ``config_of()``, after a session under other options."""
    config = config_of()
    sessions = [{"config": c.model_dump(mode="json")} for c in (config_of(run={"seed": 5}), config)]
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "sessions": sessions}))
    found = Found(tmp_path / "step_000003", {"config_hash": config_hash(config)}, ())
    monkeypatch.setattr("stretto.resume.latest_valid", lambda *_: found)
    return tmp_path


def test_every_option_that_differs_from_the_checkpoint_is_named_with_both_values(saved):
    block = {**tiny.BLOCK, "text": {**tiny.BLOCK["text"], "num_hidden_layers": 3}}
    changed = Config.model_validate(
        {
            "run": {"dir": str(saved), "updates": 200},
            "model": {"config": block},
            "actor": {"lr": 0.5},
            "eval": {"every": 1},
        }
    )
    with pytest.raises(StrettoError) as caught:
        find_checkpoint(changed, resume=True)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("- ")]
    assert lines == [
        "- run.updates = 200 here, 150 in the checkpoint; the learning-rate schedule depends on it",
        "- model.config.text.num_hidden_layers = 3 here, 2 in the checkpoint",
        "- actor.lr = 0.5 here, 0.0004 in the checkpoint",
    ]


def test_options_that_do_not_change_the_training_may_change(saved):
    changed = config_of(
        run={"dir": str(saved)},
        eval={"every": 1, "prompts": 3},
        checkpoint={"every": 2, "keep": 1},
        cluster={"device": "cpu"},
        plane={"capacity_mib": 7, "lease_s": 3.0},
        reward={"timeout_s": 1.0, "workers": 2},
        sft={"steps": 1},
    )
    assert find_checkpoint(changed, resume=True).path == saved / "step_000003"


def test_without_a_manifest_the_message_still_says_what_may_change(saved):
    (saved / "manifest.json").unlink()
    with pytest.raises(StrettoError, match=r"compare yours with the config in .*manifest.json.*\[eval\].*run.dir"):
        find_checkpoint(config_of(run={"dir": str(saved), "seed": 9}), resume=True)
