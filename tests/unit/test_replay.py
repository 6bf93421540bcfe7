"""Replays of recordings: the same to the bit, refused where the processor makes anything else, paced where asked."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recording_case as case
import tiny
from hypothesis import given
from hypothesis import strategies as st
from rollout_case import SAMPLING, rollout
from safetensors.numpy import load_file

from stretto import build, switches
from stretto.controller import check_model
from stretto.data.cursor import rows_of_partition
from stretto.data.recorded import RecordedSource
from stretto.observe.trace import Tracer
from stretto.parity.record import counts
from stretto.parity.replay import replayed_options, unmet
from stretto.phase1 import WholePartition
from stretto.recording import Recording
from stretto.recording.writer import Writer, reseal
from stretto.rollout import replay as module
from stretto.rollout.engine import GroupRequest
from stretto.rollout.replay import RecordedRewards, ReplayEngine, first_difference
from stretto.rollout.router import Offer
from stretto.settings import resolve
from stretto.types import ConfigError, PartitionPlan, StrettoError


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "data").mkdir()
    put = asyncio.run(case.record(folder / "recording", folder / "data"))
    shutil.rmtree(folder / "data")  # a recording needs nothing else
    return folder / "recording", put


@pytest.fixture
def copy(recorded, tmp_path):
    shutil.copytree(recorded[0], tmp_path / "recording")
    return tmp_path / "recording"


async def replayed(folder: Path, *, m: int = 4, partitions: int = 2, paced: bool = False):
    """What a rollout side puts that replays a recording, by versions that are none of those recorded."""
    recording = Recording(folder)
    source = RecordedSource(recording)
    rewards = RecordedRewards(recording, paced=paced)
    async with rollout(lambda _: ReplayEngine(recording, paced=paced), m=m, rewarder=rewards) as parts:
        for k in range(partitions):
            epochs, rows = rows_of_partition(k, case.GROUPS, len(source), seed=0, shuffle=False)
            plan = PartitionPlan(partition=k, version=k + 7, epochs=epochs, rows=rows)
            await parts.scheduler.run(plan, source.__getitem__, Offer(k + 7, []))
        return sorted(parts.arrived, key=lambda put: (put[0].partition, put[0].group))


def flat(put):
    for record, fields in put:
        arrays = [part for column in fields.values() for part in (column if isinstance(column, list) else [column])]
        yield record, list(fields), [(a.dtype, a.shape, a.tobytes()) for a in arrays]


@pytest.mark.parametrize("m", [4, 1, 5])
def test_a_replay_puts_what_was_recorded_whatever_its_decode_batches(recorded, m):
    folder, put = recorded
    assert list(flat(asyncio.run(replayed(folder, m=m)))) == list(flat(put[:12]))


def edited(folder: Path, partition: int, row: int, column: str, value) -> None:
    """Changes one value of a recording, and takes it for what was recorded."""
    path = folder / "partitions" / f"{partition:06d}.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    array = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.names.index(column), table.schema.field(column), array), path)
    reseal(folder)


def of(folder: Path, partition: int, column: str, row: int):
    return pq.read_table(folder / "partitions" / f"{partition:06d}.parquet")[column][row].as_py()


def payload_of(folder: Path, group: int) -> dict[str, np.ndarray]:
    return load_file(folder / "payloads" / of(folder, 0, "payload", group * case.N))


def test_two_swapped_images_of_equal_size_are_found_and_named(copy):
    """Groups 1 and 3 show 64x32 pictures each; only the pixels can tell."""
    first, third = of(copy, 0, "images", 2), of(copy, 0, "images", 6)
    for group, images in ((1, third), (3, first)):
        for i in range(case.N):
            edited(copy, 0, group * case.N + i, "images", images)
    mine, other = (payload_of(copy, group)["pixel_values"] for group in (1, 3))
    assert mine.shape == other.shape
    at = tuple(np.argwhere(mine.view(np.uint32) != other.view(np.uint32))[0])  # the images that come first differ there
    with pytest.raises(StrettoError) as error:
        asyncio.run(replayed(copy))
    assert str(error.value).startswith(
        "partition 0, group 1 (row row-1): the processor makes other pixel_values than were recorded: "
        f"[{at[0]}, {at[1]}] is {other[at]!r} now, {mine[at]!r} then; "
    )


def replaced(folder: Path, group: int, **tensors: np.ndarray) -> None:
    """Gives a group of partition 0 other recorded tensors."""
    whole = payload_of(folder, group) | tensors
    name = Writer(folder).payload(whole["pixel_values"], whole["image_grid_thw"])
    for i in range(case.N):
        edited(folder, 0, group * case.N + i, "payload", name)


def test_one_bit_of_one_patch_is_found(copy):
    pixels = payload_of(copy, 2)["pixel_values"].copy()
    was = pixels[5, 700]
    pixels.view(np.uint32)[5, 700] ^= 1
    replaced(copy, 2, pixel_values=pixels)
    with pytest.raises(StrettoError) as error:
        asyncio.run(replayed(copy))
    assert "partition 0, group 2 (row row-2)" in str(error.value)
    assert f"pixel_values than were recorded: [5, 700] is {was!r} now, {pixels[5, 700]!r} then; 1 of " in str(
        error.value
    )


@pytest.mark.parametrize(
    ("column", "change", "told"),
    [
        ("prompt_ids", lambda ids: [*ids[:-1], ids[-1] + 1], "prompt_ids than were recorded: ["),
        ("prompt_ids", lambda ids: ids[:-1], "prompt_ids than were recorded: int32 ["),
        ("mm_token_type_ids", lambda ids: [1 - ids[0], *ids[1:]], "mm_token_type_ids than were recorded: [0] is"),
        ("messages", lambda text: text.replace("Sum?", "Sun?"), "prompt_ids than were recorded"),
    ],
)
def test_any_other_prompt_is_found(copy, column, change, told):
    edited(copy, 0, 4 * case.N, column, change(of(copy, 0, column, 4 * case.N)))
    with pytest.raises(StrettoError) as error:
        asyncio.run(replayed(copy))
    assert "partition 0, group 4 (row row-4)" in str(error.value)
    assert told in str(error.value)


def test_another_grid_is_found_where_pixels_are_the_same(copy):
    grid = payload_of(copy, 1)["image_grid_thw"][:, [0, 2, 1]]
    replaced(copy, 1, image_grid_thw=grid)
    with pytest.raises(StrettoError, match=r"group 1 .* other image_grid_thw than were recorded: \[0, 1\] is"):
        asyncio.run(replayed(copy))


def test_a_damaged_image_is_refused_before_it_is_processed(copy):
    path = copy / "images" / of(copy, 0, "images", 2)[0]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StrettoError, match=f"{path.name} is not what was recorded"):
        asyncio.run(replayed(copy))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), st.data())
def test_arrays_differ_by_their_bits_alone(bits, data):
    """NaN is NaN, 0.0 is not -0.0, and the first place is told."""
    then = np.array(bits, np.uint32).view(np.float32)
    assert first_difference(then.copy(), then) == ""
    place = data.draw(st.integers(0, len(bits) - 1))
    now = then.copy()
    now.view(np.uint32)[place] ^= 1 << data.draw(st.integers(0, 31))
    assert first_difference(now, then).startswith(f"[{place}] is ")
    assert first_difference(now, then).endswith(f"1 of {len(bits)} values differ")


def test_other_shapes_and_types_are_told():
    assert first_difference(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)) == (
        "float32 [2, 3] now, float32 [3, 2] then"
    )
    assert first_difference(np.zeros(2, np.int64), np.zeros(2, np.int32)) == "int64 [2] now, int32 [2] then"


def timed(copy: Path) -> Recording:
    """Partition 0 takes 0.4 s for groups 0-3 and 0.2 s for groups 4-5; rewards of group 2 take 0.3 s."""
    path = copy / "partitions" / "000000.parquet"
    table = pq.read_table(path)
    groups = table["group"].to_pylist()
    seconds = {"decode_s": [0.4 if g < 4 else 0.2 for g in groups], "score_s": [0.3 * (g == 2) for g in groups]}
    for name, values in seconds.items():
        table = table.set_column(table.schema.names.index(name), table.schema.field(name), pa.array(values))
    pq.write_table(table, path)
    reseal(copy)
    return Recording(copy)


@pytest.fixture
def slept(monkeypatch):
    """What was slept for, in seconds."""
    seconds, sleep = [], asyncio.sleep

    async def sleeping(delay):
        seconds.append(delay)
        await sleep(delay)

    monkeypatch.setattr(module.asyncio, "sleep", sleeping)
    return seconds


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [((0, 1, 2, 3), 0.4), ((4, 5), 0.2), ((0,), 0.1), ((3, 4), 0.1 + 0.1), ((0, 1, 2, 3, 4, 5), 0.6)],
)
def test_a_paced_engine_takes_as_long_as_its_batch_did_or_its_share_of_each(copy, slept, groups, seconds):
    recording = timed(copy)
    source = RecordedSource(recording)
    processed = [tiny.family().process(source[group]) for group in groups]
    requests = [GroupRequest(partition=0, group=g, prompt=p) for g, p in zip(groups, processed, strict=True)]
    asyncio.run(ReplayEngine(recording, paced=False).generate(requests, SAMPLING))
    assert slept == []
    begun = time.monotonic()
    asyncio.run(ReplayEngine(recording, paced=True).generate(requests, SAMPLING))
    assert time.monotonic() - begun > seconds - 0.01
    assert slept[0] < seconds  # reading takes its part


def test_paced_rewards_take_as_long_as_they_did(copy, slept):
    recording = timed(copy)
    for group, paced in ((2, True), (2, False), (1, True)):
        asyncio.run(RecordedRewards(recording, paced=paced).score(RecordedSource(recording)[group], []))
    assert slept == [0.3, 0.0]


def options(recording: Recording, *sets: str, **seams):
    base = replayed_options(recording)
    resolved = resolve(None, sets, {}, base=base, seams=recording.config.seams.model_copy(update=seams))
    recorded = {name: given.value for name, given in base.items()}
    return resolved, list(unmet(resolved.config, resolved.sources, recorded))


def recording_of(copy: Path, **blocks) -> Recording:
    """The recording as if its run had had other options."""
    recording = Recording(copy)
    changed = {name: getattr(recording.config, name).model_copy(update=values) for name, values in blocks.items()}
    recording.config = recording.config.model_copy(update=changed)
    return recording


def test_what_a_replay_changes_in_the_recorded_options(copy):
    recording = recording_of(copy, eval={"every": 25}, rollout={"refill_rounds": 3}, staleness={"max": 2})
    resolved, told = options(recording, replay=str(copy))
    config = resolved.config
    assert (told, resolved.problems) == ([], [])
    changed = {
        name
        for name, given in replayed_options(recording).items()
        if given.value != getattr(getattr(recording.config, name.split(".")[0]), name.split(".")[1])
    }
    assert changed == {"data.shuffle", "eval.every", "rollout.refill_rounds", "algorithm.importance_correction"}
    assert (config.data.shuffle, config.eval.every, config.rollout.refill_rounds) == (False, 0, 0)
    assert config.algorithm.importance_correction == "tis"  # what auto meant with staleness.max = 2
    assert resolved.sources["eval.every"] == "replay"
    assert resolved.sources["actor.lr"] == f"recording {copy}"


def test_staleness_of_a_replay_decides_no_correction(copy):
    """Recorded on-policy, it is replayed without correction whatever waits for what; and the other way round."""
    onpolicy = recording_of(copy, staleness={"max": 0})
    sets = "staleness.max=3", "switches.logprob_reuse=true"
    resolved, _ = options(onpolicy, *sets, replay=str(copy))
    assert resolved.problems == []
    assert resolved.config.importance_correction == "none"
    assert switches.refusals(resolved.config) == []
    live = resolved.config.with_seams(replay="")
    assert any("staleness.max = 3" in reason for reason in switches.refusals(live))
    stale = recording_of(copy, staleness={"max": 1})
    resolved, _ = options(stale, "staleness.max=0", replay=str(copy))
    assert (resolved.problems, resolved.config.importance_correction) == ([], "tis")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("rollout.prompts_per_partition=8", "partitions are those of the recording"),
        ("rollout.n_samples_per_prompt=4", "prompt groups are those of the recording"),
        ("rollout.temperature=0.5", "log-probs are those of responses drawn at this temperature"),
        ("rollout.max_response_tokens=64", "responses are those of the recording"),
        ("rollout.refill_rounds=2", "what was dropped is not recorded"),
        ("model.dtype=bfloat16", "it processes prompts and measures log-probs"),
        ("model.max_pixels=2048", "it processes prompts and measures log-probs"),
        ("data.shuffle=true", "prompts are those of the recording"),
        ("data.digits=3", "prompts are those of the recording"),
        ("reward.function=my:reward", "rewards are those of the recording"),
        ("eval.every=5", "nothing is generated, so that nothing can be evaluated"),
    ],
)
def test_what_a_recording_cannot_meet_is_refused_with_the_reason(copy, given, why):
    name = given.partition("=")[0]
    (told,) = options(Recording(copy), given, replay=str(copy))[1]
    assert told.startswith(f"{name} = ")
    assert "(--set): a replay takes it from the recording, where it is " in told
    assert why in told


def test_what_a_replay_may_change(copy):
    sets = [
        "actor.data_parallel=2",
        "actor.chunks_per_mini=3",
        "actor.layout=padded",
        "actor.max_tokens_per_microbatch=100",
        "actor.lr=0.1",
        "staleness.max=2",
        "rollout.replicas=2",
        "rollout.groups_per_decode_batch=1",
        "switches.processor_pool=2",
        "switches.chunk_overlap=true",
        "algorithm.truncated=drop",
    ]
    resolved, told = options(Recording(copy), *sets, replay=str(copy))
    assert (resolved.problems, told) == ([], [])
    moved = recording_of(copy, model={"path": "/there", "config": None})
    assert options(moved, "model.path=/here", replay=str(copy))[1] == []


@pytest.mark.parametrize(
    ("asked", "trained", "kept"),
    [((None, None), 5, 5), ((2, None), 2, 2), ((2, 6), 3, 2), ((None, 4), 2, 2), ((5, 10), 5, 5)],
)
def test_counts_of_a_recording(asked, trained, kept):
    """Ten updates of a recipe, two of them a partition."""
    assert counts(case.config().model_copy(update=ten()), *asked) == (trained, kept)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((None, 12), "12 updates are asked for, and the recipe ends before"),
        ((6, None), "12 updates are asked for"),
        ((None, 3), "every partition takes 2 updates"),
        ((3, 4), "4 updates train on 2 of them"),
    ],
)
def test_a_recording_beyond_what_is_trained_is_refused(asked, why):
    with pytest.raises(ConfigError, match=why):
        counts(case.config().model_copy(update=ten()), *asked)


def ten():
    config = case.config()
    return {
        "run": config.run.model_copy(update={"updates": 10}),
        "actor": config.actor.model_copy(update={"minis_per_partition": 2}),
    }


def test_stamps_of_a_recording_pass_the_check_of_staleness(recorded):
    """Version 0 for partition 5 is refused under staleness.max = 1, unless it was recorded so."""

    class Plane:
        def claim(self, partition, **_):
            record = Recording(recorded[0]).group(0, 0).record
            return SimpleNamespace(records=(replace(record, partition=partition),))

    config = case.config()
    with pytest.raises(StrettoError, match="generated by version 0"):
        WholePartition(config, Plane(), None, Tracer(None, "t"), "cpu")._claim(5, range(1), 0)
    config = config.with_seams(replay=str(recorded[0]))
    assert WholePartition(config, Plane(), None, Tracer(None, "t"), "cpu")._claim(5, range(1), 0)


def test_parts_of_a_replay_are_built_from_its_recording(recorded):
    config = case.config().with_seams(replay=str(recorded[0]), replay_timing="recorded", partitions=1)
    engine, rewards = build.engine(config, "cpu", 0), build.rewarder(config)
    assert isinstance(engine, ReplayEngine)
    assert isinstance(rewards, RecordedRewards)
    assert (engine.paced, rewards.paced) == (True, True)
    source = build.source(config, "train", keep=False)
    assert len(source) == 12
    assert source.facts()["recorded"] == {"rows": 12, "fingerprint": "f"}
    assert build.recorder(config) is None
    assert (config.partitions, config.updates_to_train, config.run.updates) == (1, 1, 150)
    assert set(module.CHECKED) == {"prompt_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw"}


def test_a_replay_begins_with_the_recorded_parameters(recorded):
    config = case.config().with_seams(replay=str(recorded[0]))
    check_model(config, {"fingerprint": "0" * 16})
    check_model(case.config(), {"fingerprint": "1" * 16})
    with pytest.raises(StrettoError, match="fingerprint 1111111111111111, the recorded ones 0000000000000000"):
        check_model(config, {"fingerprint": "1" * 16})
