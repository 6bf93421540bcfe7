"""Recordings of whole runs, and whole runs on recordings."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import running
from running import jsonl

from stretto.observe.manifest import read_manifest
from stretto.recording import Recording
from stretto.recording.writer import reseal


def run(*words: object, code: int = 0, limit_s: float = 300) -> str:
    process = running.stretto(*map(str, words))
    output = running.finish(process, limit_s)
    assert process.returncode == code, output
    return output


def recipe(folder: Path, **tables: dict) -> Path:
    defaults: dict[str, dict] = {"data": {"layout": "mixed"}, "eval": {"every": 0}}
    names = defaults.keys() | tables.keys()
    return running.recipe(folder, **{name: defaults.get(name, {}) | tables.get(name, {}) for name in names})


def record(folder: Path, *options: str, **tables: dict) -> tuple[Path, str]:
    """Two partitions of the first three updates of a recipe of five."""
    path = recipe(folder, **tables)
    output = run("parity", "record", path, folder / "recording", "--partitions", 2, "--updates", 3, *options)
    return folder / "recording", output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return record(tmp_path_factory.mktemp("parity"))


def prints(run_dir: Path) -> list[dict]:
    return jsonl(run_dir, "fingerprints.jsonl")


def replay(recording: Path, run_dir: Path, *sets: str, options: tuple[str, ...] = (), code: int = 0) -> str:
    words = [word for text in sets for word in ("--set", text)]
    return run("parity", "replay", recording, run_dir, *options, *words, code=code)


@pytest.mark.long  # short: the check of test_switch_runs holds a replay against its live run
def test_a_replay_under_the_recorded_options_is_the_recorded_run(recorded, tmp_path):
    folder, output = recorded
    assert "update 3/3" in output
    assert "(2 partitions, 64 samples)" in output
    shown = replay(folder, tmp_path / "replay")
    assert "update 2/2" in shown
    live, again = (prints(path) for path in (folder / "run", tmp_path / "replay"))
    assert len(live) == 3
    assert again == live[:2]
    assert running.numbers(tmp_path / "replay") == running.numbers(folder / "run")[:2]
    # What both came from: the rate of a whole run of five updates, and the very same model.
    session, first = (read_manifest(path)["sessions"][-1] for path in (tmp_path / "replay", folder / "run"))
    assert session["config"]["run"]["updates"] == first["config"]["run"]["updates"] == 5
    recording = Recording(folder)
    assert session["data"] == {"rows": 16, "fingerprint": recording.digest, "recorded": first["data"]}
    assert session["model"]["parameters"] == first["model"]["parameters"] == recording.model["parameters"]
    assert session["model"].get("fingerprint") == recording.model["fingerprint"]
    assert (session["status"], session["updates_done"]) == ("finished", 2)


@pytest.mark.long
def test_a_folder_that_is_in_use_is_refused(recorded, tmp_path):
    folder, _ = recorded
    assert f"{folder} is not empty" in run("parity", "record", recipe(tmp_path), folder, code=1)
    assert "already holds a run" in replay(folder, folder / "run", code=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("timing", "sets"),
    [
        ("instant", ["switches.processor_pool=1", "rollout.groups_per_decode_batch=8"]),
        ("instant", ["switches.logprob_reuse=true", "staleness.max=0"]),
        (
            "recorded",
            ["switches.chunk_overlap=true", "switches.processor_pool=2", "rollout.replicas=2", "staleness.max=2"],
        ),
    ],
)
def test_a_replay_is_the_recorded_run_under_any_switch_and_staleness(recorded, tmp_path, timing, sets):
    folder, _ = recorded
    replay(folder, tmp_path / "replay", *sets, options=("--timing", timing))
    assert prints(tmp_path / "replay") == prints(folder / "run")[:2]


@pytest.mark.long
def test_switches_change_nothing_on_two_ranks(recorded, tmp_path):
    folder, _ = recorded
    sets = {"B": [], "P+R": ["switches.processor_pool=1", "switches.logprob_reuse=true"]}
    for name, more in sets.items():
        replay(folder, tmp_path / name, "actor.data_parallel=2", "actor.chunks_per_mini=4", *more)
    base, other = prints(tmp_path / "B"), prints(tmp_path / "P+R")
    assert other == base
    inputs = [name for name in base[0] if name.startswith("inputs.")]
    assert inputs
    for live, row in zip(prints(folder / "run"), base, strict=False):
        assert {name: row[name] for name in inputs} == {name: live[name] for name in inputs}
        assert row["schedule"] != live["schedule"]


@pytest.mark.long
def test_two_swapped_images_end_a_replay_before_it_trains(recorded, tmp_path):
    """Two prompts of partition 0 with one picture each, of equal size."""
    folder = tmp_path / "recording"
    shutil.copytree(recorded[0], folder, ignore=shutil.ignore_patterns("run"))
    path = folder / "partitions" / "000000.parquet"
    table = pq.read_table(path)
    images, groups = table["images"].to_pylist(), table["group"].to_pylist()
    first, second = [g for g in range(8) if len(images[groups.index(g)]) == 1][:2]
    swap = {first: images[groups.index(second)], second: images[groups.index(first)]}
    assert swap[first] != swap[second]
    array = pa.array(
        [swap.get(group, mine) for group, mine in zip(groups, images, strict=True)], table.schema.field("images").type
    )
    pq.write_table(table.set_column(table.schema.names.index("images"), table.schema.field("images"), array), path)
    reseal(folder)
    for sets in ((), ("switches.processor_pool=1", "switches.chunk_overlap=true")):
        output = replay(folder, tmp_path / f"replay{len(sets)}", *sets, code=1)
        assert f"partition 0, group {first} (row digits/train/" in output or (
            f"partition 0, group {second} (row digits/train/" in output
        )
        assert "the processor makes other pixel_values than were recorded: [" in output
        assert jsonl(tmp_path / f"replay{len(sets)}", "metrics.jsonl") == []


@pytest.mark.long
def test_recording_changes_no_number_of_a_run(recorded, tmp_path):
    running.train(recipe(tmp_path))
    assert prints(tmp_path / "run")[:3] == prints(recorded[0] / "run")


@pytest.mark.long
def test_what_dynamic_sampling_kept_is_replayed(tmp_path):
    """Every other prompt is dropped; a replay does not look for others."""
    tables = {"rollout": {"refill_rounds": 4}, "reward": {"function": "rewards:even_rows_differ"}}
    folder, _ = record(tmp_path, **tables)
    replay(folder, tmp_path / "replay", "switches.chunk_overlap=true")  # which refuses dynamic sampling
    assert prints(tmp_path / "replay") == prints(folder / "run")[:2]


@pytest.mark.long
def test_a_run_that_timing_decides_can_be_replayed_exactly(tmp_path):
    tables = {"run": {"determinism": "fast"}, "staleness": {"mode": "bounded", "max": 2}, "rollout": {"replicas": 2}}
    folder, _ = record(tmp_path, **tables)
    for name, sets in {"B": [], "P": ["switches.processor_pool=1", "staleness.max=0"]}.items():
        replay(folder, tmp_path / name, "run.determinism=exact", *sets)
        assert prints(tmp_path / name) == prints(folder / "run")[:2]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_recording_is_none(tmp_path, number):
    path = recipe(tmp_path, run={"updates": 2000}, checkpoint={"every": 0})
    process = running.stretto("parity", "record", str(path), str(tmp_path / "recording"))
    seen = running.wait_for(process, "update 2/2000")
    process.send_signal(number)
    output = running.finish(process)
    assert process.returncode == 128 + number, seen + output
    assert "the recording is not finished: remove" in output
    assert not (tmp_path / "recording" / "record.json").exists()
    assert "unfinished recording" in replay(tmp_path / "recording", tmp_path / "replay", code=1)
    assert "is not empty" in run("parity", "record", path, tmp_path / "recording", code=1)


@pytest.mark.long
def test_another_model_is_refused_with_both_fingerprints(recorded, tmp_path):
    """Weights are drawn by run.seed: with another one the same options make another model."""
    folder, _ = recorded
    output = replay(folder, tmp_path / "replay", "run.seed=1", code=1)
    assert "the model is not the one of the recording" in output
    assert f"the recorded ones {Recording(folder).model['fingerprint']} (run.seed = 1)" in output
    assert jsonl(tmp_path / "replay", "metrics.jsonl") == []
