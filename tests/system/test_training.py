"""The whole engine through its command: determinism, resuming, concurrency, failures, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import running
import tiny
import torch
from processes import processes_of, that_run, wait_until_gone
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

from stretto.observe.fingerprint import fingerprint
from stretto.observe.names import METRICS, SPANS
from stretto.observe.raw import read_raw
from stretto.observe.spans import overlap
from stretto.observe.trace import read_events

pytestmark = pytest.mark.timeout(480)


def straight_run(folder: Path, staleness: int) -> Path:
    running.train(running.recipe(folder, staleness={"max": staleness}))
    return folder / "run"


def stopped_and_resumed_run(folder: Path, staleness: int, stop_after: int) -> Path:
    """The same run, asked to end (SIGTERM) after ``stop_after`` updates or a little later, and resumed.

    An update takes milliseconds: asked after the last but one, it may have trained the last before it ends.
    """
    recipe = running.recipe(folder, staleness={"max": staleness})
    process = running.start(recipe)
    running.wait_for(process, f"update {stop_after}/5")
    process.send_signal(signal.SIGTERM)
    output = running.finish(process)
    assert process.returncode == 143 and "nothing is lost" in output, output
    summary = running.train(recipe, "--resume")
    over = stop_after == 4 and summary.startswith("finished: ")
    assert over or re.search(r"reward before .*policy version 0\)", summary), summary
    return folder / "run"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One run to its end for each staleness bound, made when first asked for."""
    made: dict[int, Path] = {}

    def get(staleness: int) -> Path:
        if staleness not in made:
            made[staleness] = straight_run(tmp_path_factory.mktemp(f"straight{staleness}"), staleness)
        return made[staleness]

    return get


def assert_same_run(one: Path, other: Path) -> None:
    prints = running.jsonl(one, "fingerprints.jsonl")
    assert len(prints) == 5 and len({p["parameters"] for p in prints}) == 5
    assert prints == running.jsonl(other, "fingerprints.jsonl")
    assert running.numbers(one) == running.numbers(other)
    assert running.jsonl(one, "evaluations.jsonl") == running.jsonl(other, "evaluations.jsonl")
    masters = [load_file(r / "checkpoints/step_000005/masters.safetensors") for r in (one, other)]
    assert masters[0].keys() == masters[1].keys()
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
    for update in range(5):
        raw, again = read_raw(one, update), read_raw(other, update)
        assert all(raw[name].tobytes() == again[name].tobytes() for name in raw)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [1])  # 0 and 2 are in the matrix below; short: two ranks, in test_ranks
def test_a_second_run_stopped_and_resumed_is_bit_identical_to_a_straight_one(straight, tmp_path, staleness):
    assert_same_run(straight(staleness), stopped_and_resumed_run(tmp_path, staleness, stop_after=2))


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_stopping_after_any_update_changes_no_bit(straight, tmp_path, staleness, stop_after):
    assert_same_run(straight(staleness), stopped_and_resumed_run(tmp_path, staleness, stop_after))


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long)]
)
def test_partition_k_is_generated_by_version_k_minus_s(straight, staleness):
    events = read_events(straight(staleness) / "events.jsonl")
    made = {(e["partition"], e["version"]) for e in events if e["name"] == "rollout.generate"}
    assert made == {(k, max(0, k - staleness)) for k in range(5)}
    # The stamps of the samples themselves, as the engine set them.
    for k in range(5):
        raw = read_raw(straight(staleness), k)
        assert set(raw["version_start"]) == set(raw["version_end"]) == {max(0, k - staleness)}
    assert [m["staleness_max"] for m in running.jsonl(straight(staleness), "metrics.jsonl")] == [
        min(k, staleness) for k in range(5)
    ]


@pytest.mark.long  # short: that every stamp is k - s, tests/unit/test_rollout_staleness.py
def test_generation_never_overlaps_training_at_s_0(straight):
    assert overlap(read_events(straight(0) / "events.jsonl"), "rollout.generate", "actor.train") == 0


def test_generation_of_the_next_partition_overlaps_training_at_s_1(straight):
    events = read_events(straight(1) / "events.jsonl")
    trained = {e["partition"]: (e["start_ns"], e["end_ns"]) for e in events if e["name"] == "actor.train"}
    generated = [e for e in events if e["name"] == "rollout.generate"]
    ahead = [e for e in generated if e["partition"] - 1 in trained and e["start_ns"] < trained[e["partition"] - 1][1]]
    assert ahead
    assert overlap(events, "rollout.generate", "actor.train") > 0


@pytest.mark.parametrize(
    "staleness", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long)]
)
def test_the_ratio_is_one_and_every_sample_is_trained_once(straight, staleness):
    for k, row in enumerate(running.jsonl(straight(staleness), "metrics.jsonl")):
        assert row["ratio_deviation_max"] == 0 and row["update_skipped"] == 0
        assert row["samples"] == 32 and row["failed_samples"] == 0
        assert read_raw(straight(staleness), k)["global_index"].tolist() == list(range(32))


def test_a_run_leaves_the_records_that_the_docs_name(straight):
    run = straight(1)
    events = read_events(run / "events.jsonl")
    assert {e["name"] for e in events if e["type"] == "span"} <= set(SPANS)
    assert {e["process"] for e in events} >= {"driver", "rollout", "actor0"}
    for row in running.jsonl(run, "metrics.jsonl"):
        assert set(row) <= set(METRICS)
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {e["name"] for e in trace if e["ph"] == "X"} >= {"rollout.generate", "actor.train", "loop.step"}
    (session,) = json.loads((run / "manifest.json").read_text())["sessions"]
    assert session["status"] == "finished" and session["updates_done"] == 5
    assert session["sources"]["actor.lr"].startswith("file ") and session["sources"]["actor.eps"] == "default"
    assert session["determinism"]["mode"] == "exact"
    assert session["model"]["fingerprint"] == fingerprint(dict(tiny.model().named_parameters()))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{k:06d}" for k in (3, 4, 5)]


def test_export_writes_a_directory_that_from_pretrained_loads(straight, tmp_path):
    process = running.start(straight(1), str(tmp_path / "model"), command="export")
    assert "exported" in running.finish(process) and process.returncode == 0
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    masters = load_file(straight(1) / "checkpoints/step_000005/masters.safetensors")
    assert all(torch.equal(p, masters[name]) for name, p in model.named_parameters())


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses that these processes accept connections on."""
    pids = {p.pid for p in processes}
    found = {c.laddr.ip for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in pids}
    assert found
    return found


@pytest.mark.case("E5")
def test_ctrl_c_ends_within_ten_seconds_says_what_is_lost_and_can_be_resumed(marked, tmp_path):
    recipe = running.recipe(tmp_path, checkpoint={"every": 2}, run={"dir": str(marked), "updates": 40})
    process = running.start(recipe)
    running.wait_for(process, "update 3/40")
    assert len(processes_of(marked)) > 4
    for needless in ("dashboard/dashboard.py", "monitor.py"):
        assert not that_run(needless, processes_of(marked))
    assert listening(processes_of(marked)) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    pressed = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    output = running.finish(process, 10)
    assert time.monotonic() - pressed < 10
    assert process.returncode == 130, output
    assert "the newest checkpoint holds" in output and "--resume" in output and "Traceback" not in output
    wait_until_gone(marked, 10 - (time.monotonic() - pressed))
    rows = running.jsonl(marked, "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(len(rows)))
    (session,) = json.loads((marked / "manifest.json").read_text())["sessions"]
    assert session["status"] == "interrupted"
    resumed = running.start(recipe, "--resume")
    running.wait_for(resumed, f"update {len(rows) + 2}/40")
    resumed.send_signal(signal.SIGTERM)
    running.finish(resumed)
    assert [r["update"] for r in running.jsonl(marked, "metrics.jsonl")][: len(rows)] == list(range(len(rows)))


@pytest.mark.parametrize(
    "side",
    [
        pytest.param("RolloutProcess", marks=pytest.mark.long),  # short: an actor rank, in test_ranks
        pytest.param("ActorProcess", marks=pytest.mark.long),
        pytest.param("LedgerActor", marks=pytest.mark.long),
    ],
)
def test_a_killed_process_ends_the_run_within_seconds_with_its_first_cause(marked, tmp_path, side):
    process = running.start(running.recipe(tmp_path, run={"dir": str(marked), "updates": 400}))
    running.wait_for(process, "update 2/400")
    (victim,) = that_run(side, processes_of(marked))
    victim.kill()
    killed = time.monotonic()
    output = running.finish(process, 30)
    assert time.monotonic() - killed < 20
    assert process.returncode == 1 and "died" in output and "Traceback" not in output, output


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[Path, str, float]:
    """Two updates on prompts with 0, 1 and 3 images, of which some rewards fail; the run, its output, its seconds."""
    folder = tmp_path_factory.mktemp("mixed")
    recipe = running.recipe(
        folder,
        reward={"function": "rewards:sometimes", "timeout_s": 0.3},
        data={"layout": "mixed", "digits": 3, "shuffle": False},
        rollout={"max_response_tokens": 10, "logprob_gap_alarm": 1e-12},
        run={"updates": 2},
        eval={"every": 0},
    )
    begun = time.monotonic()
    output = running.train(recipe)
    return folder / "run", output, time.monotonic() - begun


@pytest.mark.alone  # no other reward may be slow enough to be cut
def test_failed_rewards_are_rows_without_weight_and_a_hanging_one_is_cut_at_its_limit(mixed):
    """Rewards of rows 0, 4, 8, 12 raise and those of rows 2 and 10 hang: of each partition 2 rows and 1, 4 samples a
    row. The run goes on with the others.
    """
    run, _, seconds = mixed
    assert seconds < 100
    rows = running.jsonl(run, "metrics.jsonl")
    assert [(row["samples"], row["reward_raised"], row["reward_timed_out"]) for row in rows] == [(32, 8, 4)] * 2
    for k, row in enumerate(rows):
        assert row["failed_samples"] == 12
        raw = read_raw(run, k)
        assert int((~raw["valid"]).sum()) == row["failed_samples"]
        assert not raw["advantages"][~raw["valid"]].any()
        assert row["loss_tokens"] == int(raw["lengths"][raw["valid"]].sum())


@pytest.mark.alone
def test_text_one_image_and_many_images_train_in_one_batch(mixed):
    """Each partition has valid samples of every kind."""
    run, _, _ = mixed
    events = [e for e in read_events(run / "events.jsonl") if e["name"] == "processor.process"]
    images = {int(re.findall(r"\d+", e["row_id"])[-1]): e["images"] for e in events}
    for first in (0, 8):
        valid = [row for row in range(first, first + 8) if row % 4 != 0 and row % 8 != 2]
        assert {images[row] for row in valid} == {0, 1, 3}
    for row in running.jsonl(run, "metrics.jsonl"):
        assert np.isfinite([row["loss"], row["grad_norm"]]).all() and row["grad_norm"] > 0


@pytest.mark.alone
def test_a_gap_between_the_log_probs_of_training_and_rollout_is_told_and_kept(mixed):
    """Rounding alone, of responses made token by token and forwarded whole, is beyond a threshold of 1e-12."""
    run, output, _ = mixed
    rows = running.jsonl(run, "metrics.jsonl")
    (session,) = json.loads((run / "manifest.json").read_text())["sessions"]
    first = {"metric": "rollout_gap_mean", "update": 0, "value": rows[0]["rollout_gap_mean"], "threshold": 1e-12}
    assert session["alarms"][0] == first and 0 < first["value"] < 1e-4
    assert "update 1: the log-probs of training and rollout differ by " in output
    for k, row in enumerate(rows):
        raw = read_raw(run, k)
        gap = np.abs(raw["old_logprobs"].astype(float) - raw["rollout_logprobs"])[raw["loss_mask"].astype(bool)]
        assert row["rollout_gap_mean"] == pytest.approx(gap.mean(), rel=1e-4)
        assert row["rollout_gap_max"] == pytest.approx(gap.max(), rel=1e-4)


@pytest.mark.alone
def test_everything_wrong_with_a_recipe_is_said_at_once_before_anything_starts(tmp_path):
    recipe = running.recipe(
        tmp_path,
        actor={"lr": "fast", "chunks_per_mini": 3},
        rollout={"n_sampels_per_prompt": 4},
        reward={"function": "no_such_module:f"},
    )
    begun = time.monotonic()
    output = running.train(recipe, code=2)
    assert time.monotonic() - begun < 20
    for words in ("actor.lr", "n_samples_per_prompt"):
        assert words in output
    assert not (tmp_path / "run").exists()


def test_batch_options_that_no_prompt_fits_are_refused_before_anything_starts(tmp_path):
    output = running.train(
        running.recipe(
            tmp_path,
            actor={"max_tokens_per_microbatch": 12, "max_patches_per_microbatch": 4},
            rollout={"max_response_tokens": 3},
        ),
        code=2,
    )
    for words in ("max_tokens_per_microbatch = 12", "max_patches_per_microbatch = 4", "max_response_tokens = 3"):
        assert words in output
    assert not (tmp_path / "run").exists()


def test_a_run_folder_in_use_is_not_overwritten(straight):
    recipe = straight(1).parent / "recipe.toml"
    assert "--resume" in running.train(recipe, code=1)
    assert "finished: the run" in running.train(recipe, "--resume")
