"""``stretto doctor``: what it finds, how it says so, and that ``stretto train`` agrees."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tiny
import torch
from rich.console import Console
from typer.testing import CliRunner

from stretto import cli
from stretto.actor.checkpoint import Checkpointer, config_hash, rng_tensors
from stretto.config import LoraConfig
from stretto.doctor import show
from stretto.models import lora
from stretto.preflight import TOPICS, Examination, examine
from stretto.preflight.case import Caution, Fact, Finding
from stretto.preflight.reward import TRIED_ROWS
from stretto.problems import Problem
from stretto.settings import load
from stretto.stops import STOPS
from stretto.types import StrettoError

REWARDS = """
import time
def variety(response, answer): return len(set(response)) / 8
def broken(response, answer): raise ValueError("the grader is down")
def picky(response, answer, row_id):
    if row_id.endswith("000000"): raise ValueError("not this row")
    return float(response == answer)
def text(response, answer): return "1"
def abstains(response, answer): return None
def backwards(response, answer): return float(response != answer)
def slow(response, answer): time.sleep(60)
"""


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """A sound recipe on the tiny model, in a folder of its own that is the current one; two cores, no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "doctor_rewards.py").write_text(REWARDS)
    (tmp_path / "plain_file").write_text("")
    good = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]
    bad = [*good[:2], {"prompt": "<image>", "answer": "1"}, {"prompt": 3, "answer": "1"}]
    for name, rows in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[run]\ndir = "run"\nupdates = 5\n[model]\nconfig = {toml(tiny.BLOCK)}\n'
        "[rollout]\nprompts_per_partition = 8\nn_samples_per_prompt = 4\nmax_response_tokens = 8\n"
        '[cluster]\ndevice = "cpu"\n[plane]\ncapacity_mib = 64\n'
    )
    return path


def doctor(recipe: Path, *sets: str, resume: bool = False) -> Examination:
    return examine(recipe, sets, {}, thorough=True, resume=resume)


def texts(found: Examination) -> list[str]:
    return [problem.text for problem in found.problems]


def cautions(found: Examination) -> list[str]:
    return [caution.text for finding in found.findings for caution in finding.cautions]


def facts(found: Examination, topic: str) -> str:
    (finding,) = [f for f in found.findings if f.topic == topic]
    return "\n".join(line.text for line in finding.lines if isinstance(line, Fact))


# A sound recipe --------------------------------------------------------------------------------------------------


def test_a_sound_recipe_passes_in_every_topic_and_nothing_is_left_behind(recipe):
    before = sorted(recipe.parent.iterdir()), {p.pid for p in psutil.Process().children(recursive=True)}
    found = doctor(recipe, "reward.function=doctor_rewards:picky")
    assert (texts(found), found.exit_code) == ([], 0)
    assert [finding.topic for finding in found.findings] == ["options", *(topic.name for topic in TOPICS)]
    assert all(finding.lines for finding in found.findings)
    kept = sorted(p for p in recipe.parent.iterdir() if p.name != "__pycache__")
    assert (kept, {p.pid for p in psutil.Process().children(recursive=True)}) == before


def test_what_it_says_of_model_memory_and_disk_is_what_the_tiny_model_takes(recipe):
    parameters = sum(p.numel() for p in tiny.model().parameters())
    found = doctor(recipe, "staleness.max=2", "checkpoint.every=1", "checkpoint.keep=3")
    assert f"{parameters:,} parameters, {parameters * 4 / 2**20:.1f} MiB a version in float32" in facts(found, "model")
    # weights, gradient and two moments, each float32
    assert f"an actor rank takes {parameters * 16 / 2**20:.1f} MiB" in facts(found, "memory")
    # masters and two moments, and the versions 1 and 2 behind the newest; one more at once than are kept
    assert f"a checkpoint takes {parameters * (12 + 8) / 2**20:.1f} MiB, 4 of them at once" in facts(found, "disk")


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_adapters_and_frozen_parts_take_no_gradient_and_no_moments(recipe, publish):
    model = tiny.model()
    whole = sum(p.numel() for p in model.parameters())
    tower = sum(p.numel() for name, p in model.named_parameters() if tiny.family().part(name) == "vision_tower")
    lora.inject(model, LoraConfig(rank=4), 0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = doctor(recipe, "lora.rank=4", f"lora.publish={publish}", "checkpoint.every=1", "staleness.max=0")
    assert texts(found) == []
    assert f"an actor rank takes {(4 * whole + 12 * adapters) / 2**20:.1f} MiB" in facts(found, "memory")
    assert f"a checkpoint takes {12 * adapters / 2**20:.1f} MiB" in facts(found, "disk")
    found = doctor(recipe, 'actor.freeze=["vision_tower"]')
    assert f"an actor rank takes {(16 * whole - 12 * tower) / 2**20:.1f} MiB" in facts(found, "memory")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("algorithm.teacher=runs/nope", ("algorithm.teacher", "there is no such folder")),
        ("algorithm.teacher=run", ("algorithm.teacher", "there is no such folder")),
        ("actor.before_logprob_hook=nothing", ("actor.before_logprob_hook", "expected module:function")),
        ("actor.before_logprob_hook=no_such:f", ("actor.before_logprob_hook", "no module no_such")),
        ("actor.before_logprob_hook=doctor_rewards:nope", ("actor.before_logprob_hook", "nope")),
        ("actor.before_logprob_hook=doctor_rewards:picky", ("actor.before_logprob_hook", "cannot be called as")),
        ("lora.rank=100000", ("lora.rank = 100000", "lower it")),
    ],
)
def test_what_the_algorithm_asks_for_and_cannot_have_is_one_problem(recipe, option, words):
    found = doctor(recipe, option)
    (text,) = texts(found)
    assert all(word in text for word in words), text
    assert found.exit_code == 1


def test_a_reward_is_shown_with_the_scores_of_right_and_wrong_answers(recipe):
    scores = "; ".join(["1 and 0"] * TRIED_ROWS)
    assert f"exact_match: right and wrong answers of 3 rows score {scores}" in facts(doctor(recipe), "reward")
    found = doctor(recipe, "reward.function=doctor_rewards:picky")
    assert "score failed and failed; 1 and 0; 1 and 0" in facts(found, "reward")
    assert (
        "doctor_rewards:picky failed for an answer to row digits/train/000000: reward raised ValueError: not this row"
        in (cautions(found))
    )


# What is wrong, each with key, value and remedy --------------------------------------------------------------------


BROKEN = {
    "a misspelled option": (("actor.lrr=3",), "actor.lrr", "did you mean actor.lr?", 2),
    "a wrong type": (("run.updates=many",), 'run.updates = "many" (--set)', "expected an integer", 2),
    "options that do not fit together": (
        ("rollout.n_samples_per_prompt=1",), "rollout.n_samples_per_prompt = 1 (--set)", "to at least 2", 2,
    ),
    "a size of the model": (
        ("model.config.vision.out_hidden_size=64",), "model.config.vision.out_hidden_size = 64 (--set)", "use 32", 2,
    ),
    "a core that is not there": (
        ("cluster.actor_cores=[7]",), "cluster.actor_cores = [7] (--set)", "name others or leave it empty", 1,
    ),
    "no GPU": (("cluster.device=cuda",), 'cluster.device = "cuda"', 'set cluster.device = "cpu"', 1),
    "a model folder that is not there": (
        ("model.path=./nowhere",), 'model.path = "./nowhere" (--set)', "name another folder or a hub id", 1,
    ),
    "a prompt longer than a microbatch": (
        ("actor.max_tokens_per_microbatch=9",), "actor.max_tokens_per_microbatch = 9 (--set)", "at least", 2,
    ),
    "answers longer than responses": (
        ("rollout.max_response_tokens=3",), "rollout.max_response_tokens = 3 (--set)", "raise it to at least 7", 2,
    ),
    "more than the plane holds": (
        ("rollout.prompts_per_partition=50000",), "plane.capacity_mib", "raise plane.capacity_mib to", 2,
    ),
    "a reward module that is not there": (
        ("reward.function=no_such:f",), 'reward.function = "no_such:f" (--set)', "install it", 1,
    ),
    "a reward that is no function": (
        ("reward.function=doctor_rewards:REWARD",), 'reward.function = "doctor_rewards:REWARD" (--set)', "has no", 1,
    ),
    "a reward that always fails": (
        ("reward.function=doctor_rewards:broken",), 'reward.function = "doctor_rewards:broken" (--set)',
        "the grader is down; mend it", 1,
    ),
    "a reward that returns text": (
        ("reward.function=doctor_rewards:text",), 'reward.function = "doctor_rewards:text" (--set)',
        "a reward is a float, int or bool, or None", 1,
    ),
    "a reward that never ends": (
        ("reward.function=doctor_rewards:slow", "reward.timeout_s=0.2"),
        'reward.function = "doctor_rewards:slow" (--set)', "longer than reward.timeout_s = 0.2", 1,
    ),
    "a run folder that is a file": (
        ("run.dir=plain_file/run",), 'run.dir = "plain_file/run" (--set)', "name a folder", 1,
    ),
    "a data file that is not there": (
        ("data.source=files", 'data.train_files=["no.jsonl"]', 'data.validation_files=["good.jsonl"]'),
        'data.train_files = ["no.jsonl"] (--set)', "bad.jsonl, good.jsonl", 1,
    ),
    "rows that can not be used": (
        ("data.source=files", 'data.train_files=["bad.jsonl"]', 'data.validation_files=["good.jsonl"]'),
        'data.bad_rows = "fail": 2 of 4 train rows', "mend them, or leave them out with data.bad_rows", 1,
    ),
    "answers of files longer than responses": (
        ("data.source=files", 'data.train_files=["good.jsonl"]', "eval.every=0", "rollout.max_response_tokens=1"),
        "rollout.max_response_tokens = 1: all 4 train rows have a longer answer", "to at least 2", 1,
    ),
    "a microbatch that holds no prompt beside a response": (
        ("actor.max_tokens_per_microbatch=8",),
        "actor.max_tokens_per_microbatch = 8 (--set), rollout.max_response_tokens = 8 (file", "to at least 9", 2,
    ),
    "a column that no row has": (
        ("data.source=files", 'data.train_files=["good.jsonl"]', "eval.every=0", "data.answer_column=reply"),
        'data.answer_column = "reply" (--set)', "there are answer, prompt", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_problem_is_named_with_its_option_value_and_remedy_and_train_refuses_it_in_the_same_words(
    recipe, train, what
):
    sets, named, remedy, exit_code = BROKEN[what]
    if what == "a model folder that is not there":
        recipe.write_text(recipe.read_text().replace("config = ", "# config = "))
    found = doctor(recipe, *sets)
    assert not (recipe.parent / "run").exists()
    (text,) = texts(found)
    assert text.startswith(named) and remedy in text
    assert found.exit_code == exit_code
    assert train(recipe, *sets) == ([text], exit_code)


def test_every_row_is_looked_at_and_what_is_left_out_is_a_warning(recipe):
    files = ("data.source=files", 'data.train_files=["bad.jsonl"]', 'data.validation_files=["good.jsonl"]')
    found = doctor(recipe, *files, "data.bad_rows=skip")
    assert found.exit_code == 0
    assert "files: 2 training prompts; 5 updates take 40, which is 20 epochs" in facts(found, "data")
    assert [
        text
        for text in cautions(found)
        if text.startswith("2 of 4 train rows can not be used and are left out (data.bad_rows)")
    ]
    found = doctor(recipe, *files, "data.bad_rows=skip", "rollout.refill_rounds=1", "actor.epochs=5")
    assert "5 updates take 8, which is 4 epochs; groups that are dropped come on top" in facts(found, "data")
    (text,) = texts(doctor(recipe, *files))
    assert "row bad.jsonl:3: " in text and "row bad.jsonl:4: " in text


def test_without_a_model_the_data_is_still_looked_at(recipe):
    found = doctor(
        recipe, "model.path=./nowhere", "data.source=files", 'data.train_files=["bad.jsonl"]', "eval.every=0"
    )
    assert len(found.problems) == 1
    assert "4 rows in files; 2 of 4 tried can be read" in facts(found, "data")
    (said,) = [text for text in cautions(found) if "tried" in text]
    assert said.startswith('2 of 4 rows that were tried can not be used, and data.bad_rows = "fail" refuses them')
    assert "row bad.jsonl:3: " in said and "row bad.jsonl:4: " in said


def test_neither_the_columns_nor_the_reward_wait_for_a_model_or_for_sound_data(recipe):
    files = ("data.source=files", 'data.train_files=["good.jsonl"]', 'data.validation_files=["bad.jsonl"]')
    found = doctor(
        recipe, "model.path=./nowhere", *files, "data.answer_column=anser", "reward.function=doctor_rewards:REWARD"
    )
    assert [text.split(":")[0] for text in texts(found)] == [
        'model.path = "./nowhere" (--set), model.config = ' + texts(found)[0].split("model.config = ")[1].split(":")[0],
        'data.answer_column = "anser" (--set)', 'data.answer_column = "anser" (--set)',
        'reward.function = "doctor_rewards',
    ]  # fmt: skip
    assert texts(found)[1].endswith("no train row has such a column; there are answer, prompt; did you mean answer?")
    assert "validation row" in texts(found)[2]
    found = doctor(recipe, *files, "data.prompt_colum=question", "reward.function=doctor_rewards:variety")
    assert "variety starts; it was not tried, since there is a problem with data.prompt_column" in facts(
        found, "reward"
    )


def test_what_is_left_out_says_what_for(recipe):
    short = ("data.source=files", 'data.train_files=["good.jsonl"]', "eval.every=0", "rollout.max_response_tokens=1")
    why = "since there is a problem with rollout.max_response_tokens"
    found = doctor(recipe, *short)
    assert facts(found, "forward") == f"not tried, {why}"
    assert (facts(found, "batches"), facts(found, "reward").split("; ")[1]) == (
        f"not looked at, {why}", f"it was not tried, {why}"
    )  # fmt: skip
    found = doctor(recipe, "data.source=files", 'data.train_files=["bad.jsonl"]', "eval.every=0")
    for topic in ("forward", "batches"):
        assert facts(found, topic) == "not looked at, since there is a problem with data.bad_rows"


def test_problems_of_every_topic_are_told_together_and_the_rest_is_still_looked_at(recipe):
    found = doctor(
        recipe,
        "actor.lrr=3",
        "cluster.actor_cores=[7]",
        "rollout.max_response_tokens=3",
        "reward.function=doctor_rewards:broken",
        "run.dir=plain_file/run",
    )
    assert [text.split(" ")[0] for text in texts(found)] == [
        "actor.lrr", "cluster.actor_cores", "run.dir", "rollout.max_response_tokens", "reward.function",
    ]  # fmt: skip
    assert found.exit_code == 2
    assert "parameters" in facts(found, "model") and "training prompts" in facts(found, "data")
    assert "not looked at, since" in facts(found, "resume")


def test_of_a_recipe_that_can_not_be_read_nothing_else_is_said(recipe):
    found = doctor(recipe.parent / "absent.toml")
    (text,) = texts(found)
    assert "absent.toml does not exist" in text and "recipe.toml" in text
    assert [finding.topic for finding in found.findings] == ["options"]


def test_a_model_larger_than_the_machine_is_refused(recipe, monkeypatch):
    monkeypatch.setattr("stretto.preflight.capacity.memory_bytes", lambda: 2**20)
    (text,) = texts(doctor(recipe))
    assert text.startswith("model.config: weights, gradients and optimizer of all processes take ")
    assert "this machine has 1.0 MiB of memory" in text and "take a smaller model" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpus_too_small_for_weights_gradient_and_optimizer_are_refused_and_full_ones_warned_of(
    recipe, monkeypatch, dtype
):
    """There is no GPU here: what torch says of two of them is set."""
    total, free = 10 * 2**20, 0.1 * 2**20
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free, total))
    sets = ("cluster.device=cuda", f"model.dtype={dtype}")
    found = doctor(recipe, *sets)
    parameters = sum(p.numel() for p in tiny.model().parameters())
    least = parameters * 16 if dtype == "float32" else parameters * (2 + 4 + 4 + 8)
    assert found.exit_code == 0
    assert f"an actor rank takes {least / 2**20:.1f} MiB" in facts(found, "memory")
    assert "2 GPUs in use: 1 actor rank, 1 engine" in facts(found, "machine")
    assert f"GPU 0: an actor rank needs {least / 2**20:.1f} MiB, 0.1 MiB are free; end what runs there" in cautions(
        found
    )
    total = least - 1
    (text,) = texts(doctor(recipe, *sets, "rollout.groups_per_decode_batch=1"))
    assert text.startswith("model.config: an actor rank takes ") and "take a smaller model" in text


def usage(free: int, of: str) -> Any:
    Usage = namedtuple("Usage", "total used free")
    real = shutil.disk_usage
    return lambda path: Usage(2 * free, free, free) if str(path).startswith(of) else real(path)


def test_a_disk_without_room_for_the_checkpoints_is_refused(recipe, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", usage(10_000, str(recipe.parent)))
    (text,) = texts(doctor(recipe, "checkpoint.every=1"))
    assert text.startswith("checkpoint.keep = 2: a checkpoint takes ")
    assert "and 3 of them are there at once" in text and "lower checkpoint.keep" in text


def test_shared_memory_below_the_object_store_is_a_warning_up_to_where_ray_refuses_it(recipe, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", usage(10_000, "/dev/shm"))
    found = doctor(recipe)
    assert found.exit_code == 0
    assert any("/dev/shm has 0.0 MiB" in text and "instead, which is slower" in text for text in cautions(found))
    (text,) = texts(doctor(recipe, "plane.capacity_mib=20000"))
    assert text.startswith("plane.capacity_mib: ") and "--shm-size" in text


# Warnings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("eval.every=0",), "eval.every = 0: nothing is measured"),
        ((), "model.path is unset: training starts from random weights, and GRPO learns nothing"),
        (("checkpoint.every=0",), "checkpoint.every = 0: a run that is ended"),
        (("reward.function=doctor_rewards:backwards",), "does not score right answers above wrong ones"),
        (("reward.function=doctor_rewards:picky",), "failed for an answer to row digits/train/000000"),
    ],
)
def test_what_stops_no_run_is_a_warning(recipe, sets, words):
    found = doctor(recipe, *sets)
    assert found.exit_code == 0
    assert [text for text in cautions(found) if words in text]


def test_processes_that_share_cores_few_open_files_and_a_home_that_can_not_be_written_are_warnings(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    found = doctor(recipe, "actor.data_parallel=2", "rollout.replicas=3")
    said = "\n".join(cautions(found))
    assert "actor.data_parallel = 2 on 1 core (0): they share it" in said
    assert "rollout.replicas = 3 on 1 core (1): they share it" in said
    assert "each with memory of its own; lower it to 1, or give that side 3 cores (cluster.rollout_cores)" in said
    assert found.exit_code == 0
    assert "may open 1024 files" in said and "home folder /nowhere" in said


def test_a_reward_that_abstains_is_no_failure(recipe):
    found = doctor(recipe, "reward.function=doctor_rewards:abstains")
    assert found.exit_code == 0
    assert "abstained and abstained" in facts(found, "reward")


# The run folder ----------------------------------------------------------------------------------------------------


def saved(recipe: Path, *done: int) -> Path:
    """Checkpoints of a run of ``recipe`` after ``done`` updates each."""
    config, _ = load(recipe, (), {})
    saver = Checkpointer(recipe.parent / "run" / "checkpoints", keep=9)
    tensors = {"masters": {"w": torch.ones(3)}, "optimizer": {"w": torch.ones(3)}, "rng": rng_tensors()}
    for step in done:
        saver.begin(step)
        shard = saver.write(step, tensors)
        saver.commit(step, [shard], {"cursor": step, "config_hash": config_hash(config)}, {})
    return recipe.parent / "run"


def test_it_says_what_a_resume_would_go_on_from_and_what_it_passes_over(recipe):
    run = saved(recipe, 2, 3)
    (run / "checkpoints" / "step_000003" / "masters.safetensors").write_bytes(b"")
    before = sorted(run.rglob("*"))
    found = doctor(recipe, resume=True)
    assert found.exit_code == 0
    assert facts(found, "resume") == "goes on from step_000002, with update 3 of 5"
    assert any(text.startswith("passed over step_000003: masters.safetensors has 0 bytes") for text in cautions(found))
    assert sorted(run.rglob("*")) == before


def test_without_resume_a_folder_that_holds_a_run_is_refused_and_so_are_other_options_with_it(recipe):
    saved(recipe, 2)
    (text,) = texts(doctor(recipe))
    assert "already holds a run; add --resume" in text
    (text,) = texts(doctor(recipe, "actor.lr=0.5", resume=True))
    assert "saved under other options" in text


def test_a_finished_run_and_one_without_a_checkpoint_are_told(recipe):
    assert "nothing to go on from" in facts(doctor(recipe, resume=True), "resume")
    saved(recipe, 5)
    assert "nothing left to do" in facts(doctor(recipe, resume=True), "resume")


def test_a_run_folder_that_another_run_holds_is_refused(recipe):
    run = recipe.parent / "run"
    run.mkdir()
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = doctor(recipe)
    assert found.exit_code == 1
    assert texts(found) == [
        "run.dir = 'run' is in use by a run that is still going; wait for it, stop it, or choose another run.dir"
    ]
    assert doctor(recipe).exit_code == 0


# train and doctor agree --------------------------------------------------------------------------------------------


@pytest.fixture
def train(monkeypatch) -> Iterator[Any]:
    """``stretto train`` up to where it would start processes; what it says, and its exit code."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def started(*_: Any) -> None:
        raise StrettoError("it started")

    monkeypatch.setattr("stretto.controller.Cluster", started)

    def run(recipe: Path, *sets: str, resume: bool = False) -> tuple[list[str], int]:
        STOPS.__init__()  # type: ignore[misc]
        arguments = [word for option in sets for word in ("--set", option)] + ["--resume"] * resume
        monkeypatch.setattr("sys.argv", ["stretto", "train", str(recipe), *arguments])
        result = CliRunner().invoke(cli.app, ["train", str(recipe), *arguments])
        error = result.exception
        if isinstance(error, StrettoError) and str(error) == "it started":
            return [], 0
        assert isinstance(error, StrettoError), result.output
        return getattr(error, "problems", [str(error)]), getattr(error, "exit_code", 1)

    yield run
    STOPS.__init__()  # type: ignore[misc]
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("data.source=files", 'data.train_files=["bad.jsonl"]', "eval.every=0", "data.bad_rows=skip"),
        ("reward.function=doctor_rewards:picky", "checkpoint.every=0"),
    ],
)
def test_what_doctor_finds_sound_train_starts(recipe, train, sets):
    assert doctor(recipe, *sets).exit_code == 0
    assert train(recipe, *sets) == ([], 0)


def test_train_and_doctor_say_the_same_of_several_problems_and_of_an_absent_recipe(recipe, train):
    sets = ("actor.lrr=3", "cluster.actor_cores=[7]", "reward.function=doctor_rewards:broken", "run.updates=0")
    for path in (recipe, recipe.parent / "absent.toml"):
        found = doctor(path, *sets)
        assert len(found.problems) == (4 if path == recipe else 3)
        assert train(path, *sets) == (texts(found), 2)


def test_train_and_doctor_agree_on_run_folders(recipe, train):
    run = saved(recipe, 2, 3)
    for sets, resume in (((), False), ((), True), (("actor.lr=0.5",), True)):
        found = doctor(recipe, *sets, resume=resume)
        assert train(recipe, *sets, resume=resume) == (texts(found), found.exit_code)
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "state.json").write_text("{}")
    found = doctor(recipe, resume=True)
    assert "none of its checkpoints can be used" in texts(found)[0]
    assert train(recipe, resume=True) == (texts(found), 1)


# How it is shown ---------------------------------------------------------------------------------------------------


EXAMPLE = Examination(
    config=None,  # type: ignore[arg-type]
    sources={},
    findings=(
        Finding("options", (Fact("3 of 84 set"), Problem(("a.b",), "a.b = 3 (--set): " + "far too long " * 12))),
        Finding("run folder", (Fact("a fact " * 20), Caution("look out"), Problem((), "two\nlines"))),
    ),
)


def shown(**console: Any) -> str:
    target = Console(highlight=False, **console)
    with target.capture() as capture:
        show(EXAMPLE, "stretto train recipe.toml", target)
    return capture.get()


def test_without_a_terminal_each_fact_is_one_line_without_colours(monkeypatch):
    lines = shown(width=60, force_terminal=False).splitlines()
    assert lines[0] == "options     3 of 84 set"
    assert lines[1] == "            1 problem, see 1 below"
    assert lines[2] == "run folder  " + "a fact " * 20
    assert lines[3] == "            warning: look out"
    assert lines[6] == "2 problems, by which it would refuse: stretto train recipe.toml"
    assert lines[7].startswith("1.  a.b = 3 (--set): far too long")
    assert lines[8:] == ["2.  two", "    lines"]


@pytest.mark.parametrize("width", [60, 200])
def test_on_a_terminal_lines_are_wrapped_to_its_width_under_their_column(width, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(width=width, force_terminal=True, color_system="truecolor")
    assert "\x1b[3" not in text and "\x1b[1;3" not in text  # no colour, bold may stay
    plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, plain)) <= width
    assert all(line[:11].strip() in ("options", "run folder", "") for line in plain[: plain.index("")] if line)
    assert sum("a fact" in line for line in plain) == (3 if width == 60 else 1)


def test_the_command_prints_it_and_ends_with_its_exit_code(recipe):
    begun = time.monotonic()
    result = CliRunner().invoke(cli.app, ["doctor", str(recipe), "--set", "cluster.actor_cores=[7]"])
    assert result.exit_code == 1
    assert "1.  cluster.actor_cores = [7] (--set): " in result.output
    assert f"refuse: stretto train {recipe} --set 'cluster.actor_cores=[7]'" in result.output
    assert CliRunner().invoke(cli.app, ["doctor", str(recipe)]).exit_code == 0
    assert time.monotonic() - begun < 60
    assert not os.path.exists("run")
