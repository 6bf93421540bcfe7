"""Bounded staleness through the command: it trains, no sample is older than the bound, and a resumed run trains each
prompt once.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import running
import tiny

from stretto.data.cursor import rows_of_partition
from stretto.data.source import open_source
from stretto.observe.fingerprint import column_sum, combine
from stretto.observe.raw import read_raw
from stretto.observe.trace import read_events
from stretto.settings import load

pytestmark = pytest.mark.timeout(900)


def recipe(folder: Path, bound: int, updates: int = 8) -> Path:
    """Four decode batches a partition, on two replicas."""
    return running.recipe(
        folder,
        run={"dir": str(folder / "run"), "updates": updates, "determinism": "fast"},
        rollout={
            "prompts_per_partition": 8,
            "n_samples_per_prompt": 4,
            "groups_per_decode_batch": 2,
            "max_response_tokens": 8,
            "replicas": 2,
        },
        staleness={"mode": "bounded", "max": bound},
        eval={"every": 4, "prompts": 12},
    )


def assert_within_the_bound(run: Path, bound: int, updates: int) -> None:
    """By the stamps of the samples that were trained, and by what the engines say they did."""
    for k in range(updates):
        raw = read_raw(run, k)
        assert (raw["version_start"] >= max(0, k - bound)).all() and (raw["version_end"] <= k).all()
        assert (raw["version_start"] == raw["version_end"]).all()
        assert raw["global_index"].tolist() == list(range(32))
    rows = running.jsonl(run, "metrics.jsonl")
    assert [row["update"] for row in rows] == list(range(updates))
    assert all(row["staleness_max"] <= bound and row["mixed_version_samples"] == 0 for row in rows)
    assert all(row["update_skipped"] == 0 and row["samples"] == 32 for row in rows)


def assert_every_prompt_once(path: Path, run: Path, updates: int) -> None:
    """The pixels that each surviving update was trained on are those of the next 8 rows, by their hash."""
    config, _ = load(path, [], {})
    source = open_source(config.data, "train")
    prints = running.jsonl(run, "fingerprints.jsonl")
    assert [p["update"] for p in prints] == list(range(updates))
    for k in range(updates):
        rows = rows_of_partition(k, 8, len(source), config.run.seed, config.data.shuffle)[1]
        pixels = [tiny.family().process(source[row]).pixel_values for row in rows]
        assert prints[k]["inputs.pixel_values"] == combine({"pixel_values": column_sum(pixels, range(8))})


@pytest.mark.long  # short: tests/unit/test_rollout_staleness.py
def test_a_bounded_run_trains_within_its_bound_and_a_resumed_one_too(tmp_path):
    path = recipe(tmp_path, 1)
    run = tmp_path / "run"
    process = running.start(path)
    running.wait_for(process, "update 3/8")
    process.send_signal(signal.SIGTERM)
    output = running.finish(process)
    assert process.returncode == 143 and "nothing is lost" in output, output
    running.train(path, "--resume")
    assert_within_the_bound(run, 1, 8)
    assert_every_prompt_once(path, run, 8)
    assert [e["version"] for e in running.jsonl(run, "evaluations.jsonl")] == [0, 4, 8]
    loads = [e for e in read_events(run / "events.jsonl") if e["name"] == "rollout.load_weights"]
    assert {e["replica"] for e in loads} == {0, 1}


@pytest.mark.long
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_killed_bounded_run_goes_on_and_trains_every_prompt_once(tmp_path, bound, stop_after):
    path = recipe(tmp_path, bound)
    process = running.start(path)
    running.wait_for(process, f"update {stop_after}/8")
    process.kill()
    process.communicate()
    running.train(path, "--resume")
    assert_within_the_bound(tmp_path / "run", bound, 8)
    assert_every_prompt_once(path, tmp_path / "run", 8)
