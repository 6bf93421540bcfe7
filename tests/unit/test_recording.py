"""Recordings: read by others, read back to the bit, refused where they are damaged or unfinished."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recording_case as case
from PIL import Image
from rollout_case import rollout
from stub_engine import StubEngine, response, weights

from stretto.data.images import originals, to_rgb
from stretto.recording import RecordedGroup, RecordedPrompt, Recording, Timing
from stretto.recording.writer import Writer, reseal, seal
from stretto.rollout.refill import Refill
from stretto.rollout.router import Offer
from stretto.types import GroupRecord, PartitionPlan, Response, Score, StrettoError

DOCS = Path(__file__).parents[2] / "docs" / "recording-format.md"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a recording, and what was put into the plane while it was made."""
    folder = tmp_path_factory.mktemp("recorded")
    data = folder / "data"
    data.mkdir()
    put = asyncio.run(case.record(folder / "recording", data))
    return folder / "recording", put


@pytest.fixture
def copy(recorded, tmp_path):
    shutil.copytree(recorded[0], tmp_path / "recording")
    return tmp_path / "recording"


def test_pyarrow_and_safetensors_read_it_without_this_package(recorded, tmp_path):
    """The example of the documentation, and every number of every sample, held against what was put."""
    folder, put = recorded
    example = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[-1]
    (tmp_path / "recording").symlink_to(folder)
    code = example + (
        "import sys, hashlib\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('stretto', 'torch', 'ray')]\n"
        "import numpy as np\n"
        "for k in range(record['partitions']):\n"
        "    table = pq.read_table(folder / 'partitions' / f'{k:06d}.parquet')\n"
        "    for i in range(table.num_rows):\n"
        "        numbers = [table[c][i].values.to_numpy(zero_copy_only=False) for c in\n"
        "                   ('prompt_ids', 'mm_token_type_ids', 'response_ids', 'rollout_logprobs')]\n"
        "        tensors = load_file(folder / 'payloads' / table['payload'][i].as_py())\n"
        "        numbers += [tensors['pixel_values'], tensors['image_grid_thw']]\n"
        "        numbers += [np.array(table['reward'][i].as_py())]\n"
        "        digest = hashlib.sha256(b''.join(a.tobytes() for a in numbers)).hexdigest()\n"
        "        print(k, table['global_index'][i].as_py(), [str(a.dtype) for a in numbers], digest)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"}
    )
    assert printed.returncode == 0, printed.stderr
    wanted = []
    for record, fields in put[: case.PARTITIONS * case.GROUPS]:
        for i in range(case.N):
            numbers = [
                *(fields[name] for name in ("prompt_ids", "mm_token_type_ids")),
                *(fields[name][i] for name in ("response_ids", "rollout_logprobs")),
                *(fields[name] for name in ("pixel_values", "image_grid_thw")),
                np.array(record.rewards[i]),
            ]
            digest = hashlib.sha256(b"".join(a.tobytes() for a in numbers)).hexdigest()
            kinds = [str(a.dtype) for a in numbers]
            wanted.append(f"{record.partition} {record.group * case.N + i} {kinds} {digest}")
    assert printed.stdout.splitlines() == wanted


def test_every_group_is_read_back_as_it_was_put(recorded):
    folder, put = recorded
    recording = Recording(folder)
    assert (recording.partitions, recording.groups, recording.n) == (2, 6, 2)
    assert recording.config == case.config()
    for record, fields in put[:12]:
        group = recording.group(record.partition, record.group)
        assert group.record == record
        assert group.fields.keys() == fields.keys()
        for name, column in fields.items():
            mine = group.fields[name]
            pairs = zip(mine, column, strict=True) if isinstance(column, list) else [(mine, column)]
            for a, b in pairs:
                assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
        for sample, mask, valid in zip(group.responses, group.loss_mask, record.valid, strict=True):
            assert (sample.version_start, sample.version_end) == (record.partition, record.partition)
            assert mask.tolist() == [int(valid)] * len(sample.token_ids)
    with pytest.raises(StrettoError, match="no partition 2, group 0; it holds 2 partitions of 6 groups"):
        recording.group(2, 0)


def test_scores_prompts_and_times_come_back(recorded):
    recording = Recording(recorded[0])
    group = recording.group(0, 3)
    assert group.scores == [
        Score(value=0.0, valid=False, error="reward raised é", failure="raised"),
        Score(value=0.1 + 3e-15 + 1),
    ]
    assert np.signbit(recording.group(0, 1).scores[0].value)
    assert recording.group(0, 1).scores[0].value == 0
    assert group.prompt.messages == case.reader(recorded[0].parent / "data")(3).messages
    assert (group.prompt.row_id, group.prompt.answer, group.prompt.source) == ("row-3", "3+5=8 é", "forms")
    assert (group.prompt.partition, group.prompt.group) == (0, 3)
    # Six groups in decode batches of four: 0 1 2 3 and 4 5, each of which took its time once.
    batches = [recording.group(1, g).timing.batch for g in range(6)]
    assert batches == [0, 0, 0, 0, 1, 1]
    taken = recording.batches(1)
    assert {batch: groups for batch, (_, groups) in taken.items()} == {0: 4, 1: 2}
    for g in range(6):
        timing = recording.group(1, g).timing
        assert timing.decode_s == taken[timing.batch][0] > 0
        assert timing.score_s >= 0
        assert timing.put_s >= timing.decode_s


def test_images_are_the_files_that_were_given(recorded):
    """Encoded ones byte for byte, pixels as a PNG of the same pixels; what any of them shows is the same."""
    folder, _ = recorded
    data, recording = folder.parent / "data", Recording(folder)
    jpeg, webp, png = (recording.group(0, g).images[0] for g in (0, 1, 2))
    assert jpeg.read_bytes() == (data / "0.JPG").read_bytes()
    assert webp.read_bytes() == case.encoded(1, "webp", lossless=True)
    assert png.read_bytes() == case.encoded(2, "png")
    assert [path.suffix for path in (jpeg, webp, png)] == [".jpeg", ".webp", ".png"]
    assert to_rgb(jpeg, "turned").shape == (64, 32, 3)
    (array,) = recording.group(0, 3).images
    assert np.array_equal(np.asarray(Image.open(array)), case.pixels(3))
    first, second = recording.group(1, 4).images
    assert np.array_equal(np.asarray(Image.open(first)), case.pixels(10))
    assert np.array_equal(np.asarray(Image.open(second)), case.pixels(110, 64, 32))
    assert recording.group(0, 5).images == ()
    for path in folder.rglob("*"):
        if path.parent.name in ("images", "payloads"):
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem


def test_a_prompt_that_comes_twice_is_stored_once(tmp_path):
    writer = Writer(tmp_path)
    pixels, grid = np.ones((8, 4), np.float32), np.array([[1, 2, 4]], np.int32)
    assert writer.payload(pixels, grid) == writer.payload(pixels.copy(), grid)
    assert writer.payload(pixels, grid) != writer.payload(pixels, grid[:, ::-1])
    assert writer.image(b"x", "png") == writer.image(b"x", "png")
    assert len(list((tmp_path / "payloads").iterdir())) == 2
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_originals_of_plain_arrays_are_png_files():
    picture = case.pixels(0, 3, 5)
    ((content, kind),) = originals((picture,))
    assert kind == "png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), picture)


def made(logprobs=(0.0,), reward=1.0, group=0, **changes) -> RecordedGroup:
    """A group of one sample and no image."""
    ids = np.arange(len(logprobs), dtype=np.int32)
    sample = Response(
        token_ids=ids,
        logprobs=np.asarray(logprobs, np.float32),
        text="",
        finish_reason="stop",
        version_start=0,
        version_end=0,
    )
    record = GroupRecord(
        partition=0,
        group=group,
        row_id="r",
        prompt_tokens=1,
        patches=0,
        images=0,
        response_tokens=(len(ids),),
        rewards=(reward,),
        valid=(True,),
        truncated=(False,),
        version_start=(0,),
        version_end=(0,),
    )
    return RecordedGroup(
        record=record,
        fields={"prompt_ids": np.array([7], np.int32), "mm_token_type_ids": np.zeros(1, np.int8)},
        prompt=RecordedPrompt(row_id="r", messages=({"role": "user", "content": []},), partition=0, group=group),
        images=(),
        responses=[sample],
        scores=[Score(value=reward)],
        loss_mask=[np.ones(len(ids), np.uint8)],
        timing=Timing(batch=0, decode_s=0.5, score_s=0.25, put_s=1.0),
    )


def written(folder: Path, *groups: RecordedGroup) -> Recording:
    writer = Writer(folder)
    payload = writer.payload(np.zeros((0, 1536), np.float32), np.zeros((0, 3), np.int32))
    writer.partition([(group, payload) for group in groups])
    options = case.config().model_dump(mode="json")
    seal(folder, config=options, model={}, data={}, partitions=1, groups=len(groups), n=1)
    return Recording(folder)


def test_bits_survive(tmp_path):
    """Two NaNs with other bits, both zeros, the smallest and largest numbers; more than one of each in a column."""
    bits = [0x7FC00000, 0x7FC00001, 0xFFC12345, 0x80000000, 0, 1, 0x7F7FFFFF, 0xFF800000] * 3
    logprobs = np.array(bits, np.uint32).view(np.float32)
    nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]
    recording = written(tmp_path, made(logprobs, group=1), made(logprobs[::-1], reward=-0.0), made((), nan, group=2))
    assert recording.group(0, 1).responses[0].logprobs.view(np.uint32).tolist() == bits
    assert recording.group(0, 0).responses[0].logprobs.view(np.uint32).tolist() == bits[::-1]
    assert np.signbit(recording.group(0, 0).scores[0].value)
    reward = np.array(recording.group(0, 2).scores[0].value)
    assert reward.view(np.uint64) == 0x7FF8000000000123
    assert recording.group(0, 2).responses[0].token_ids.shape == (0,)


def test_dynamic_sampling_records_what_was_kept_under_its_group_numbers(tmp_path):
    """Of rows 0 1 | 2 | 3 | 4 | 5 the rewards of 1 and 5 differ; row 1 takes longest."""

    class ByRow(case.Oddly):
        async def score(self, prompt, responses):
            row = int(prompt.row_id.removeprefix("row-"))
            await asyncio.sleep(0.05 if row == 1 else 0)
            return [Score(value=float(i * (row in (1, 5)))) for i in range(len(responses))]

    def by_candidate(request, sample, version):
        return response([5 + request.group, sample], version, finish_reason=("stop", "length")[sample])

    async def run():
        refill = Refill(groups=2, rounds=5, truncated="mask", row_at=lambda position: position)
        recorder = case.recorder(tmp_path, partitions=1, truncated="mask")
        stub = StubEngine(answer=by_candidate)
        async with rollout(lambda _: stub, m=2, rewarder=ByRow(), recorder=recorder, refill=refill) as parts:
            plan = PartitionPlan(partition=0, version=0, start=0)
            await parts.scheduler.run(plan, case.reader(tmp_path), Offer(0, weights(0)))
            return parts.arrived

    put = sorted(asyncio.run(run()), key=lambda group: group[0].group)
    seal(tmp_path, config=case.config().model_dump(mode="json"), model={}, data={}, partitions=1, groups=2, n=2)
    recording = Recording(tmp_path)
    groups = [recording.group(0, g) for g in range(2)]
    assert [group.prompt.row_id for group in groups] == ["row-1", "row-5"]
    assert [group.record for group in groups] == [record for record, _ in put]
    assert [group.responses[1].token_ids.tolist() for group in groups] == [[6, 1], [10, 1]]
    assert [score.value for group in groups for score in group.scores] == [0.0, 1.0, 0.0, 1.0]
    assert [mask.tolist() for mask in groups[0].loss_mask] == [[1, 1], [0, 0]]
    assert [sample.finish_reason for sample in groups[0].responses] == ["stop", "length"]


def test_an_unfinished_recording_is_refused(copy, tmp_path):
    (copy / "record.json").unlink()
    with pytest.raises(StrettoError, match=r"unfinished recording: it was interrupted \(there is no record.json\)"):
        Recording(copy)
    with pytest.raises(StrettoError, match="holds no recording"):
        Recording(tmp_path / "nothing")


@pytest.mark.parametrize("number", [2, "1", None])
def test_another_format_is_refused(copy, number):
    record = json.loads((copy / "record.json").read_text()) | {"format": number}
    (copy / "record.json").write_text(json.dumps(record))
    with pytest.raises(StrettoError, match=f"format {number!r}, this version of stretto reads format 1"):
        Recording(copy)


def test_a_record_of_other_options_is_refused(copy):
    record = json.loads((copy / "record.json").read_text())
    record["config"]["actor"]["of_a_later_version"] = 1
    (copy / "record.json").write_text(json.dumps(record))
    with pytest.raises(StrettoError, match="does not say what this version of stretto asks"):
        Recording(copy)


@pytest.mark.parametrize("kind", ["partitions", "payloads", "images"])
def test_a_changed_file_is_refused_by_name_until_it_is_meant(copy, kind):
    recording = Recording(copy)
    payload = pq.read_table(copy / "partitions" / "000000.parquet")["payload"][0].as_py()
    path = {
        "partitions": copy / "partitions" / "000000.parquet",
        "payloads": copy / "payloads" / payload,
        "images": recording.prompt(0, 0)[1][0],
    }[kind]
    content = path.read_bytes()

    def read():
        group = Recording(copy).group(0, 0)
        for image in group.images:
            Recording(copy).check_file(image)

    read()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StrettoError, match=f"{path.name} is not what was recorded: its content has changed"):
        read()
    path.unlink()
    with pytest.raises(StrettoError, match=f"{path.name}, which is part of the recording, cannot be read: No such"):
        read()
    path.write_bytes(content)
    read()


def test_rows_out_of_order_are_refused(copy):
    path = copy / "partitions" / "000000.parquet"
    table = pq.read_table(path)
    order = [1, 0, *range(2, table.num_rows)]
    pq.write_table(table.take(order), path)
    reseal(copy)
    with pytest.raises(StrettoError, match="row 0 is sample 1 of group 0, partition 0"):
        Recording(copy).group(0, 0)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), path)
    reseal(copy)
    with pytest.raises(StrettoError, match="has 13 rows"):
        Recording(copy).group(0, 0)


@contextmanager
def largest_file(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_ends_the_partition_and_says_why(tmp_path):
    """As a full disk does: the system takes no more bytes of a file."""

    async def run():
        recorder = case.recorder(tmp_path / "recording")
        async with rollout(lambda _: StubEngine(), rewarder=case.Oddly(), recorder=recorder) as parts:
            with largest_file(1000):
                await parts.scheduler.run(case.plan(0), case.reader(tmp_path), Offer(0, weights(0)))

    case.given(0, tmp_path)  # a file that is there before
    with pytest.raises(StrettoError, match=r"the recording cannot be written: .*: File too large; make room"):
        asyncio.run(run())
    assert not [path for path in (tmp_path / "recording").rglob("*.tmp")]
    assert not list((tmp_path / "recording" / "partitions").iterdir())


def test_a_partition_that_is_missing_makes_no_recording(tmp_path):
    Writer(tmp_path)
    with pytest.raises(StrettoError, match="partition 0 was not recorded"):
        seal(tmp_path, config={}, model={}, data={}, partitions=1, groups=1, n=1)
    assert not (tmp_path / "record.json").exists()
