"""Files as a source: every row checked before a start, by reason; what is usable, kept and recognised (A1, A4, B1)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import tiny
from data_case import PICTURE, Notes, config, encoded, jsonl, opened, parquet, picture, refused
from PIL import Image

from stretto import build
from stretto.data import check, files
from stretto.data.cursor import rows_of_partition
from stretto.models.batch import SampleInput
from stretto.types import ConfigError, Prompt, StrettoError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def told(folder: Path, *paths: Path, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        opened(folder, *paths, **options)
    return caught.value.problems


def simple(folder: Path, count: int = 6, name: str = "train.jsonl") -> Path:
    """Rows ``0``, ``1``, ... with one picture each, in ``folder``."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        picture(folder / f"{i}.png", seed=i)
    return jsonl(folder / name, [{"prompt": "<image>Sum?", "images": [f"{i}.png"], "answer": i} for i in range(count)])


# Bad images (A4) -------------------------------------------------------------------------------------------------


def bomb(path: Path, side: int = 20000) -> None:
    """A one-colour PNG of side x side, whole and valid, 49 kB: every line is 2,500 zero bytes at one bit a pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    line = bytes(1 + side // 8)
    head = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(line * side)), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def twelve_rows(folder: Path) -> Path:
    path = simple(folder, 12)
    jpeg = encoded(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
    (folder / "3.png").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "4.png").write_bytes(b"")
    (folder / "5.png").write_bytes(b"<!DOCTYPE html><html><body>404</body></html>")
    (folder / "6.png").unlink()
    bomb(folder / "7.png")
    frames = [Image.new("RGB", (64, 32), colour) for colour in (RED, GREEN, BLUE)]
    (folder / "8.png").write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    return path


@pytest.mark.case("A4")
def test_bad_images_are_named_with_their_reason_and_the_others_are_all_there_once(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = opened(tmp_path, twelve_rows(tmp_path / "d"), bad_rows="skip", keep=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB; the bomb alone is 1.2 GB
    found = refused(source)
    assert list(found) == [f"train.jsonl:{n}" for n in (4, 5, 6, 7, 8)]
    assert {kind for kind, _ in found.values()} == {"bad"}
    words = ("truncated", "not an image", "not an image", "No such file", "400000000 pixels")
    assert all(word in reason for word, (_, reason) in zip(words, found.values(), strict=True))
    assert "model.max_pixels" in found["train.jsonl:8"][1]  # the remedy
    rows = [0, 1, 2, 8, 9, 10, 11]
    assert [p.answer for p in source] == [str(r) for r in rows]
    assert np.array_equal(source[3].images[0], np.broadcast_to(np.uint8(RED), (32, 64, 3)))
    # The cursor runs over usable rows: an epoch has each once, and partitions are whole.
    partitions = [rows_of_partition(k, 4, len(source), 0, True)[1] for k in range(7)]
    assert all(len(p) == 4 for p in partitions)
    assert np.bincount(np.concatenate(partitions)).tolist() == [4] * 7
    skipped = [json.loads(line) for line in (tmp_path / "run/data/skipped.jsonl").read_text().splitlines()]
    assert [(s["split"], s["row_id"], s["kind"]) for s in skipped] == [("train", name, "bad") for name in found]


@pytest.mark.case("A4")
def test_under_fail_all_bad_rows_are_told_in_one_error(tmp_path):
    (problem,) = told(tmp_path, twelve_rows(tmp_path / "d"))
    assert problem.startswith('data.bad_rows = "fail": 5 of 12 train rows cannot be used; mend them, or leave them out')
    assert [line.split(": ")[0].strip() for line in problem.splitlines()[1:]] == [
        f"row train.jsonl:{n}" for n in (4, 5, 6, 7, 8)
    ]
    many = jsonl(tmp_path / "many.jsonl", [{"prompt": 7, "answer": 1}] * 45)
    (problem,) = told(tmp_path, many)
    lines = problem.splitlines()
    assert "45 of 45 train rows" in lines[0] and len(lines) == 7 and lines[-1].strip() == "and 40 more"


def test_a_truncated_animation_gives_its_whole_first_frame_or_is_refused(tmp_path):
    noise = [np.random.default_rng(i).integers(0, 256, (64, 64), dtype=np.uint8) for i in range(3)]
    data = encoded(
        Image.fromarray(noise[0]), "GIF", save_all=True, append_images=[Image.fromarray(n) for n in noise[1:]]
    )
    path = simple(tmp_path / "d", 3)
    (tmp_path / "d/0.png").write_bytes(data[: len(data) * 5 // 6])  # within the last frame
    (tmp_path / "d/1.png").write_bytes(data[: len(data) // 6])  # within the first
    source = opened(tmp_path, path, bad_rows="skip")
    assert list(refused(source)) == ["train.jsonl:2"]
    assert np.array_equal(source[0].images[0][..., 0], noise[0])


# Picture modes (A1) ----------------------------------------------------------------------------------------------


def pictures_of_every_mode(folder: Path) -> dict[str, np.ndarray]:
    """Files of A1 and their siblings -> the pixels they mean, computed without Pillow's conversions."""
    folder.mkdir()
    size = (256, 256)
    noise = np.random.default_rng(0).integers(0, 256, (*size, 4), dtype=np.uint8)
    noise[..., 3] = 0
    noise[64:128, 64:128] = (255, 0, 0, 255)
    on_white = np.full((*size, 3), 255, np.uint8)
    on_white[64:128, 64:128] = RED
    palette = Image.new("P", size, 0)
    palette.putpalette([0, 0, 0, 255, 255, 255, 0, 0, 255])
    palette.paste(2, (64, 64, 128, 128))
    blue_on_white = np.full((*size, 3), 255, np.uint8)
    blue_on_white[64:128, 64:128] = BLUE
    ramp = np.arange(65536, dtype=np.uint16).reshape(size)
    grey = np.random.default_rng(2).integers(0, 256, size, dtype=np.uint8)
    faint = np.stack([np.full(size, 100, np.uint8), np.full(size, 51, np.uint8)], -1)  # a fifth of 100 over white: 224
    turned = Image.new("RGB", size, RED)
    turned.paste(GREEN, (0, 0, 256, 128))  # top half
    exif = turned.getexif()
    exif[0x0112] = 6  # shown turned a quarter clockwise: green on the right
    right = np.full((*size, 3), RED, np.uint8)
    right[:, 128:] = GREEN
    made = {
        "rgba.png": (encoded(noise), on_white),
        "p.png": (encoded(palette, transparency=0), blue_on_white),
        "16.png": (encoded(ramp), np.repeat(np.rint(ramp / 257).astype(np.uint8)[..., None], 3, 2)),
        "16.tiff": (encoded(ramp, "TIFF"), np.repeat(np.rint(ramp / 257).astype(np.uint8)[..., None], 3, 2)),
        "cmyk.tiff": (encoded(Image.new("CMYK", size, (0, 255, 255, 0)), "TIFF"), np.full((*size, 3), RED, np.uint8)),
        "l.png": (encoded(grey), np.repeat(grey[..., None], 3, 2)),
        "la.png": (encoded(Image.fromarray(faint, "LA")), np.full((*size, 3), 224, np.uint8)),
        "1.PNG": (encoded(Image.fromarray(grey > 99)), np.repeat((grey > 99)[..., None], 3, 2).astype(np.uint8) * 255),
        "turned.png": (encoded(turned, exif=exif), right),
    }  # fmt: skip
    for name, (data, _) in made.items():
        (folder / name).write_bytes(data)
    return {name: pixels for name, (_, pixels) in made.items()}


@pytest.mark.case("A1")
def test_trainer_and_rollout_see_identical_pixels_of_every_mode(tmp_path):
    expected = pictures_of_every_mode(tmp_path / "d")
    path = jsonl(tmp_path / "d/train.jsonl", [{"prompt": "<image>?", "images": [n], "answer": n} for n in expected])
    source = opened(tmp_path, path)
    family = tiny.family()
    for prompt in source:
        (pixels,) = prompt.images
        assert np.abs(pixels.astype(int) - expected[prompt.answer]).max() <= (1 if prompt.answer == "la.png" else 0)
        # The real processor on the source's prompt gives what it gives for those pixels; it runs once, and what it
        # makes is what both the engine and the trainer get.
        plain = Prompt(row_id="x", messages=prompt.messages, images=(pixels,))
        one, other = family.process(prompt), family.process(plain)
        assert np.array_equal(one.pixel_values, other.pixel_values) and len(one.pixel_values)
        rollout = family.collate_prompts([one]).inputs
        trainer = family.collate([SampleInput(one, np.array([5, 6], np.int32))]).inputs
        assert rollout.pixel_values.equal(trainer.pixel_values)


@pytest.mark.case("A1")
@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_a_mode_without_a_rule_is_refused_by_row_id(tmp_path, mode):
    Image.new(mode, (64, 32)).save(tmp_path / "0.tiff")
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "<image>?", "images": ["0.tiff"], "answer": 1, "id": "mine"}])
    (problem,) = told(tmp_path, path, id_column="id")
    assert f"row mine: image 0: pictures of mode '{mode}' have no rule" in problem


# Long prompts (B1) -----------------------------------------------------------------------------------------------


@pytest.fixture
def long_rows(tmp_path):
    """B1: 300 text tokens and a 256-token image; 20 and a 1024-token image; 20 alone. One byte is one token here."""
    for side in (512, 1024):
        picture(tmp_path / f"{side}.png", size=(side, side))
    rows = [
        {"prompt": "x" * 300 + "<image>", "images": ["512.png"], "answer": 1},
        {"prompt": "x" * 20 + "<image>", "images": ["1024.png"], "answer": 2},
        {"prompt": "x" * 20, "answer": 3},
    ]
    return jsonl(tmp_path / "train.jsonl", rows)


@pytest.mark.case("B1")
def test_long_prompts_are_counted_with_their_image_tokens_and_left_out_the_same_twice(tmp_path, long_rows):
    content = long_rows.read_bytes()
    for _ in range(2):
        source = opened(tmp_path, long_rows, max_prompt_tokens=512)
        found = refused(source)
        assert [p.answer for p in source] == ["3"]
        frame = len(tiny.family().process(source[0]).prompt_ids) - 20  # of the chat template, without an image
        for row, text, image in (("train.jsonl:1", 300, 256), ("train.jsonl:2", 20, 1024)):
            tokens = frame + text + image + 2  # the image's two frame tokens
            assert found[row] == (
                "overlong",
                f"{tokens} tokens, image tokens included; the limit is 512 (data.max_prompt_tokens)",
            )
    assert long_rows.read_bytes() == content


@pytest.mark.case("B1")
def test_without_a_limit_of_its_own_a_prompt_must_fit_a_microbatch_and_is_never_cut(tmp_path, long_rows):
    source = opened(tmp_path, long_rows)
    assert len(source) == 3
    for prompt in source:
        made = tiny.family().process(prompt)
        assert int(made.mm_token_type_ids.sum()) * 4 == len(made.pixel_values)  # no part of an image block is missing
    (problem,) = told(tmp_path, long_rows, overlong_prompts="fail", actor={"max_tokens_per_microbatch": 700})
    assert problem.startswith('data.overlong_prompts = "fail": 1 of 3 train rows have a prompt that is too long')
    assert "the limit is 684 (actor.max_tokens_per_microbatch less rollout.max_response_tokens)" in problem
    found = refused(opened(tmp_path, long_rows, actor={"max_patches_per_microbatch": 1024}))
    assert found == {
        "train.jsonl:2": ("overlong", "4096 image patches; the limit is 1024 (actor.max_patches_per_microbatch)")
    }


@pytest.mark.case("B1")
def test_what_is_too_long_is_told_with_the_options_that_bind_and_the_values_that_keep_every_row(tmp_path, long_rows):
    budget = {"max_tokens_per_microbatch": 700, "max_patches_per_microbatch": 4000}
    source = opened(tmp_path, long_rows, actor=budget, max_prompt_tokens=1000)
    (said,) = source.cautions
    assert said.startswith(
        "1 of 3 train rows are too long and are left out (data.overlong_prompts); to keep all, raise "
    )
    whole = opened(tmp_path, long_rows)
    tokens = len(tiny.family().process(whole[1]).prompt_ids)
    wanted = {
        "actor.max_tokens_per_microbatch": tokens + 16, "data.max_prompt_tokens": tokens,
        "actor.max_patches_per_microbatch": 4096,
    }  # fmt: skip
    raised = " and ".join(f"{option} to {value}" for option, value in wanted.items())
    assert f"raise {raised}\n    row train.jsonl:2: {tokens} tokens" in said
    actor = {name.split(".")[1]: value for name, value in wanted.items() if name.startswith("actor.")}
    kept = opened(tmp_path, long_rows, actor=actor, max_prompt_tokens=wanted["data.max_prompt_tokens"])
    assert (len(kept), kept.cautions) == (3, ())
    (problem,) = told(tmp_path, long_rows, actor=budget, overlong_prompts="fail")
    assert f"; raise actor.max_tokens_per_microbatch to {tokens + 16} and " in problem


def test_reasons_that_differ_in_numbers_and_names_only_are_told_five_times(tmp_path):
    rows = [{"prompt": "x" * (600 + i), "answer": 1} for i in range(220)]
    source = opened(tmp_path, jsonl(tmp_path / "x.jsonl", [*rows, {"prompt": "?", "answer": 1}]), max_prompt_tokens=512)
    lines = source.cautions[0].splitlines()
    assert len(lines) == 7 and lines[-1].strip() == "and 215 more"


def answers(folder: Path, *lengths: int) -> Path:
    """Rows whose answers have so many bytes: as many tokens here, and one for the end."""
    return jsonl(folder / "answers.jsonl", [{"prompt": "?", "answer": "x" * length} for length in lengths])


def test_answers_longer_than_a_response_are_told_with_the_value_that_holds_all(tmp_path):
    room = {"max_response_tokens": 8}
    notes = Notes()
    source = opened(tmp_path, answers(tmp_path, 7, 8, 12), rollout=room, note=notes)
    assert (len(source), source.found.long_answers, source.facts()["longest_answer_tokens"]) == (3, 2, 13)
    assert source.cautions == (
        "rollout.max_response_tokens = 8: 2 of 3 train rows have a longer answer, the longest 13 tokens with its end, "
        "and exact match needs all of it: they are never scored as right; raise rollout.max_response_tokens to at "
        "least 13",
    )
    assert notes[-1].endswith(source.cautions[0])
    for split in ("train", "labelled"):
        (problem,) = told(tmp_path, answers(tmp_path, 8, 12), rollout=room, split=split)
        assert problem.startswith(f"rollout.max_response_tokens = 8: all 2 {split} rows have a longer answer")
        assert problem.endswith("nothing can be learned; raise rollout.max_response_tokens to at least 13")


def test_answers_of_any_length_will_do_for_other_rewards_but_not_for_a_warm_start(tmp_path):
    options = {"rollout": {"max_response_tokens": 8}, "reward": {"function": "mine:score"}}
    assert opened(tmp_path, answers(tmp_path, 12), **options).cautions == ()
    assert "at least 13" in told(tmp_path, answers(tmp_path, 12), split="labelled", **options)[0]


def test_a_kept_check_is_not_used_under_another_length_of_responses(tmp_path):
    path = answers(tmp_path, 7, 12)
    for most, long in ((8, 1), (16, 0)):
        source = opened(tmp_path, path, rollout={"max_response_tokens": most}, max_prompt_tokens=100, keep=True)
        assert source.found.long_answers == long


@pytest.mark.case("A5")
def test_an_exception_is_never_counted_as_too_long(tmp_path):
    picture(tmp_path / "thin.png", size=(1, 400))  # the processor refuses such a shape
    rows = [
        {"prompt": "<image>" + "x" * 600, "images": [7], "answer": 1},
        {"prompt": "x<|image_pad|>" + "y" * 600, "answer": 1},
        {"prompt": "<image>" + "y" * 600, "images": ["thin.png"], "answer": 1},
        {"prompt": "y" * 600, "answer": 1},
        {"prompt": "y", "answer": 1},
    ]
    source = opened(tmp_path, jsonl(tmp_path / "x.jsonl", rows), max_prompt_tokens=512, bad_rows="skip")
    found = refused(source)
    assert [kind for kind, _ in found.values()] == ["bad", "bad", "bad", "overlong"]
    assert "type int" in found["x.jsonl:1"][1]
    assert "keep '<|image_pad|>' out of the text" in found["x.jsonl:2"][1]
    assert "aspect ratio" in found["x.jsonl:3"][1]
    assert source.facts() | {"fingerprint": ""} == {
        "rows": 1, "fingerprint": "", "rows_in_files": 5, "bad": 3, "overlong": 1,
        "longest_prompt_tokens": len(tiny.family().process(source[0]).prompt_ids), "most_patches": 0,
            "longest_answer_tokens": 2,
    }  # fmt: skip


@pytest.mark.parametrize("images", [(), ((32, 64),), ((32, 32), (64, 96), (40, 70)), ((8, 8),), ((900, 1400),)])
@pytest.mark.parametrize("text", ["Sum?", "", "größe 漢字 " * 20])
def test_tokens_are_counted_as_the_processor_makes_them(images, text):
    prompt = tiny.prompt(3, images, text)
    family = tiny.family()
    made = family.process(prompt)
    assert family.prompt_tokens(prompt) == len(made.prompt_ids)
    assert sum(family.patches(prompt.images)) == len(made.pixel_values)


def test_images_side_by_side_with_nothing_between_have_positions_as_the_library_gives_them():
    """The template keeps each image in its vision_start and vision_end, so that neighbours stay two images."""
    family = tiny.family()
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]
    images = tiny.prompt(1, ((32, 64), (64, 32))).images
    made = family.process(Prompt(row_id="x", messages=({"role": "user", "content": content},), images=images))
    inputs = family.collate_prompts([made]).inputs
    import torch

    expected, _ = tiny.model().model.get_rope_index(
        inputs.input_ids,
        mm_token_type_ids=torch.from_numpy(made.mm_token_type_ids[None].astype(np.int64)),
        image_grid_thw=inputs.image_grid_thw,
    )
    assert torch.equal(inputs.position_ids, expected)


# The split as a whole ----------------------------------------------------------------------------------------------


@pytest.mark.case("A5")
@pytest.mark.parametrize("rows", [[], [{"prompt": 7, "answer": 1}]])
def test_a_split_without_a_usable_row_stops_the_start(tmp_path, rows):
    (problem,) = told(tmp_path, jsonl(tmp_path / "x.jsonl", rows), bad_rows="skip")
    assert problem.startswith(f"none of {len(rows)} train rows can be used; a run needs at least one")


def test_several_files_of_both_kinds_are_one_split(tmp_path):
    one = simple(tmp_path / "a", 3)
    rows = [{"prompt": "<image>?", "images": [{"bytes": encoded(PICTURE), "path": None}], "answer": i} for i in (3, 4)]
    two = parquet(tmp_path / "b.parquet", rows)
    three = simple(tmp_path / "c", 1)  # train.jsonl too
    source = opened(tmp_path, one, two, three)
    assert [p.answer for p in source] == ["0", "1", "2", "3", "4", "0"]
    names = [f"{one}:1", f"{one}:2", f"{one}:3", "b.parquet:1", "b.parquet:2", f"{three}:1"]
    assert [p.row_id for p in source] == names
    assert np.array_equal(source[3].images[0], PICTURE)
    with pytest.raises(IndexError):
        source[6]


def test_images_lie_beside_their_file_or_in_the_image_folder_also_through_links(tmp_path):
    pixels = picture(tmp_path / "real.png")
    (tmp_path / "images").mkdir()
    os.symlink(tmp_path / "real.png", tmp_path / "images" / "0.PNG")
    (tmp_path / "data").mkdir()
    path = jsonl(tmp_path / "data/x.jsonl", [{"prompt": "?", "images": ["0.PNG"], "answer": 1}])
    link = tmp_path / "link.jsonl"
    os.symlink(path, link)
    for given in (path, link):
        assert np.array_equal(opened(tmp_path, given, image_folder=str(tmp_path / "images"))[0].images[0], pixels)
    assert "No such file" in told(tmp_path, path)[0]


def test_ids_given_twice_are_an_error_under_any_policy(tmp_path):
    rows = [{"prompt": "?", "answer": 1, "id": i} for i in ("a", 1, "1", "b", "a")]
    (problem,) = told(tmp_path, jsonl(tmp_path / "x.jsonl", rows), id_column="id", bad_rows="skip")
    assert problem.startswith(
        "data.id_column = \"id\": 2 id(s) are given to more than one row, such as 'a' (x.jsonl:1, "
    )
    assert "x.jsonl:5" in problem
    source = opened(tmp_path, jsonl(tmp_path / "x.jsonl", [*rows[:2], rows[3], {"prompt": "?", "answer": 1}]),
                    id_column="id", bad_rows="skip")  # fmt: skip
    assert [p.row_id for p in source] == ["a", "1", "b"]
    assert "its id (column 'id') is missing" in refused(source)["x.jsonl:4"][1]


def test_columns_that_no_row_has_are_one_error_that_lists_those_there_are(tmp_path):
    rows = [{"question": "?", "solution": 1}, {"question": "?", "image": None}]
    problems = told(tmp_path, jsonl(tmp_path / "x.jsonl", rows), images_column="picture", bad_rows="skip")
    assert [p.split(":")[0] for p in problems] == [
        'data.prompt_column = "prompt"', 'data.images_column = "picture"', 'data.answer_column = "answer"'
    ]  # fmt: skip
    assert all(p.endswith("no train row has such a column; there are image, question, solution") for p in problems)
    both = parquet(tmp_path / "x.parquet", [{"question": "?", "solution": 1, "n": 2}])
    assert told(tmp_path, both, prompt_column="question", answer_column="soluton") == [
        'data.answer_column = "soluton": no train row has such a column; there are n, question, solution; '
        "did you mean solution?"
    ]
    assert opened(tmp_path, both, prompt_column="question", answer_column="solution")[0].answer == "1"


def test_files_that_can_not_be_opened_are_told_together(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no")
    problems = told(tmp_path, tmp_path / "x.parquet", tmp_path / "y.jsonl")
    assert len(problems) == 2 and "x.parquet" in problems[0] and "No such file" in problems[1]
    with pytest.raises(ConfigError, match=r"data.test_files = \[\]"):
        opened(tmp_path, simple(tmp_path / "d"), split="test")
    assert len(opened(tmp_path, simple(tmp_path / "d"), split="labelled")) == 6


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_keep_their_order_and_progress_is_told(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(check, "REPORT_S", 0.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(threads)))
    notes = Notes()
    rows = [{"prompt": "?" if i % 3 else 7, "answer": i} for i in range(200)]
    source = opened(tmp_path, jsonl(tmp_path / "x.jsonl", rows), bad_rows="skip", note=notes)
    assert [int(p.answer) for p in source] == [i for i in range(200) if i % 3]
    assert list(refused(source)) == [f"x.jsonl:{i + 1}" for i in range(0, 200, 3)]
    assert notes[-3:-1] == ["checked 200 of 200 train rows", "data        133 of 200 train rows can be used; 67 bad"]
    assert "67 of 200 train rows can not be used and are left out (data.bad_rows)" in notes[-1]
    assert notes[-1].endswith("and 62 more")


def test_row_groups_that_make_shuffled_rows_slow_are_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGE_GROUP_BYTES", 2**20)
    image = {"bytes": np.random.default_rng(0).bytes(2**19), "path": None}
    rows = [{"prompt": "?", "answer": i, "other": image} for i in range(6)]
    quiet, notes = Notes(), Notes()
    opened(tmp_path, parquet(tmp_path / "x.parquet", rows, group=6), note=quiet)  # the large column is not read
    assert len(quiet) == 1
    noise = np.random.default_rng(0).integers(0, 256, (20, 256, 256, 3), dtype=np.uint8)
    rows = [{"prompt": "?", "answer": i, "images": encoded(pixels, "BMP")} for i, pixels in enumerate(noise)]
    path = parquet(tmp_path / "y.parquet", rows, group=20)
    opened(tmp_path, path, note=notes, shuffle=False)
    assert len(notes) == 1
    opened(tmp_path, path, note=notes)
    assert "y.parquet has row groups of " in notes[-1] and "about 100 rows a group" in notes[-1]


# What is kept --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checks(monkeypatch):
    """How often rows were checked."""
    made = []

    def counted(*arguments):
        made.append(1)
        return check.check_rows(*arguments)

    monkeypatch.setattr(files, "check_rows", counted)
    return made


def kept(folder: Path) -> Path:
    (path,) = (folder / "run/data").glob("train-*.json")
    return path


def test_a_second_opening_needs_no_second_check_and_is_the_same(tmp_path, checks):
    path = twelve_rows(tmp_path / "d")
    first = opened(tmp_path, path, bad_rows="skip", keep=True)
    second = opened(tmp_path, path, bad_rows="skip", keep=True)
    assert len(checks) == 1
    assert (second.found, second.fingerprint()) == (first.found, first.fingerprint())
    assert "5 of 12 train rows" in told(tmp_path, path, bad_rows="fail", keep=True)[0]
    assert len(checks) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-40]),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_text(p.read_text().replace('"usable": [0, ', '"usable": [0, 0, ')),
        lambda p: p.write_text("[]"),
        lambda p: p.unlink(),
    ],
)
def test_a_damaged_check_is_made_again(tmp_path, checks, damage):
    path = simple(tmp_path / "d")
    first = opened(tmp_path, path, keep=True)
    damage(kept(tmp_path))
    assert opened(tmp_path, path, keep=True).found == first.found
    assert len(checks) == 2


def test_other_files_images_limits_or_columns_are_checked_again(tmp_path, checks):
    path = simple(tmp_path / "d")
    first = opened(tmp_path, path, keep=True)
    picture(tmp_path / "d/1.png", seed=99)
    assert opened(tmp_path, path, keep=True).fingerprint() != first.fingerprint()
    (tmp_path / "d/2.png").unlink()
    assert len(opened(tmp_path, path, keep=True, bad_rows="skip")) == 5
    opened(tmp_path, path, keep=True, bad_rows="skip", max_prompt_tokens=400)
    opened(tmp_path, path, keep=True, bad_rows="skip", actor={"max_tokens_per_microbatch": 4000})
    opened(tmp_path, path, keep=True, bad_rows="skip", model={"max_pixels": 2048})
    assert len(checks) == 6
    jsonl(path, [{"prompt": "?", "answer": 1}])
    assert len(opened(tmp_path, path, keep=True)) == 1
    assert (tmp_path / "run/data/skipped.jsonl").read_text() == ""


def test_rows_left_out_of_each_split_stand_in_one_file(tmp_path):
    bad = [{"prompt": "?", "answer": 1}, {"prompt": 7, "answer": 1}]
    train, other = jsonl(tmp_path / "a.jsonl", bad), jsonl(tmp_path / "b.jsonl", bad)
    for split in ("train", "validation", "train"):
        opened(tmp_path, train, split=split, validation_files=(str(other),), bad_rows="skip", keep=True)
    lines = [json.loads(line) for line in (tmp_path / "run/data/skipped.jsonl").read_text().splitlines()]
    assert [(line["split"], line["row_id"]) for line in lines] == [("train", "a.jsonl:2"), ("validation", "b.jsonl:2")]


def test_the_fingerprint_tells_content_columns_and_rows_apart_and_not_folders_or_processes(tmp_path):
    path = simple(tmp_path / "d")
    whole = opened(tmp_path, path)
    moved = shutil.copytree(tmp_path / "d", tmp_path / "moved")
    assert opened(tmp_path, moved / "train.jsonl").fingerprint() == whole.fingerprint()
    code = (
        "from data_case import opened; from pathlib import Path; "
        f"print(opened(Path({str(tmp_path)!r}), Path({str(path)!r})).fingerprint())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert there.stdout.strip() == whole.fingerprint(), there.stderr
    others = [
        opened(tmp_path, path, answer_column=""),
        opened(tmp_path, path, id_column="answer"),
        opened(tmp_path, jsonl(moved / "train.jsonl", [{"prompt": "<image>?", "images": ["1.png"], "answer": 1}])),
    ]
    assert len({whole.fingerprint(), *(o.fingerprint() for o in others)}) == 4


def test_a_row_that_is_broken_after_the_check_is_an_error_that_names_it(tmp_path):
    path = simple(tmp_path / "d")
    source = opened(tmp_path, path)
    (tmp_path / "d/2.png").unlink()
    with pytest.raises(StrettoError, match=r"row train.jsonl:3, image 0: .*No such file"):
        tiny.family().process(source[2])
    jsonl(path, [{"prompt": "?", "answer": 1}])
    with pytest.raises(StrettoError, match=r"train.jsonl has changed since the run began"):
        source[0]


def test_the_built_in_data_needs_no_model(tmp_path):
    digits = config(tmp_path).model_copy(update={"data": type(config(tmp_path).data)()})
    source = build.source(digits, "train", keep=True)
    assert source.facts() == {"rows": 8192, "fingerprint": source.fingerprint()}
    assert not (tmp_path / "run").exists()
