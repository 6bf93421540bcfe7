"""The digits data set: what is in it, who may see what, and that rows never change."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from stretto.config import DataConfig
from stretto.data.digits import answer, labelled, longest_answer, split_images
from stretto.data.source import open_source
from stretto.types import ConfigError, Prompt

SPLITS = ("train", "validation", "test")


def source(split: str = "train", **options: Any) -> Any:
    return open_source(DataConfig(**options), split)  # type: ignore[arg-type]


def show(image: np.ndarray) -> np.ndarray:
    """The 8x8 original, values 0..16, of one enlarged digit: the centre pixel of every 4x4 block."""
    return np.rint(image[2::4, 2::4, 0] * (16 / 255)).astype(int)


def test_no_image_is_in_two_splits_and_none_is_lost() -> None:
    seen = [{image.tobytes() for image in split_images(s)[0]} for s in SPLITS]  # type: ignore[arg-type]
    counts = [len(split_images(s)[0]) for s in SPLITS]  # type: ignore[arg-type]
    assert counts == [1400, 198, 199]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    originals = {image.astype(int).tobytes() for image in load_digits().images}
    ours = {show(image).tobytes() for s in SPLITS for image in split_images(s)[0]}  # type: ignore[arg-type]
    assert ours == originals


def test_images_are_the_originals_enlarged_with_their_labels() -> None:
    label_of = {
        i.astype(int).tobytes(): int(t) for i, t in zip(load_digits().images, load_digits().target, strict=True)
    }
    for split in SPLITS:
        images, digits = split_images(split)  # type: ignore[arg-type]
        assert images.dtype == np.uint8
        assert images.shape[1:] == (32, 32, 3)
        assert [label_of[show(image).tobytes()] for image in images] == digits.tolist()
        assert (images == images[:, 2::4, 2::4].repeat(4, axis=1).repeat(4, axis=2)).all()
    assert images.max() == 255


def test_labelled_images_are_the_first_of_train_and_balanced() -> None:
    images, digits = labelled(64)
    assert (images == split_images("train")[0][:64]).all()
    assert sorted(np.bincount(digits, minlength=10)) == [6] * 6 + [7] * 4
    assert np.bincount(labelled(60)[1]).tolist() == [6] * 10
    seen = {image.tobytes() for image in images}
    rows = source("labelled", labelled_images=64)
    for r in range(200):
        (picture,) = rows[r].images
        assert picture[:, :32].tobytes() in seen
        assert picture[:, 32:].tobytes() in seen


def test_more_labelled_images_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.labelled_images = 1401: the train split has 1400"):
        source("labelled", labelled_images=1401)


def test_two_digits_in_one_image() -> None:
    prompt = source()[123]
    assert prompt.row_id == "digits/train/000123"
    assert prompt.source == "digits/one-image"
    (message,) = prompt.messages
    assert message["role"] == "user"
    assert message["content"] == [{"type": "image"}, {"type": "text", "text": "Sum?"}]
    (image,) = prompt.images
    assert (image.dtype, image.shape) == (np.uint8, (32, 64, 3))
    images, digits = split_images("train")
    shown = [int(digits[(images == half).all((1, 2, 3))][0]) for half in (image[:, :32], image[:, 32:])]
    assert prompt.answer == f"{shown[0]}+{shown[1]}={sum(shown)}"


@pytest.mark.parametrize("digits", [1, 2, 3, 16])
def test_a_row_shows_the_same_digits_in_every_layout(digits: int) -> None:
    layouts = {name: source(layout=name, digits=digits) for name in ("one-image", "many-images", "text")}
    for row in (0, 1, 4095):
        one, many, text = (layouts[name][row] for name in ("one-image", "many-images", "text"))
        assert one.answer == many.answer == text.answer
        assert (np.concatenate(many.images, axis=1) == one.images[0]).all()
        assert len(many.images) == digits
        numbers = one.answer.split("=")[0].split("+")
        assert text.messages[0]["content"] == [{"type": "text", "text": ",".join(numbers) + " Sum?"}]
        assert text.images == ()


@given(digits=st.integers(1, 16), row=st.integers(0, 8191))
def test_every_image_part_has_an_image_and_text_after_it(digits: int, row: int) -> None:
    prompt = source(layout="mixed", digits=digits)[row]
    kinds = [part["type"] for part in prompt.messages[0]["content"]]
    assert kinds.count("image") == len(prompt.images)
    assert kinds[-1] == "text"
    assert ("image", "image") not in set(pairwise(kinds))


def test_mixed_holds_all_layouts_in_about_equal_parts() -> None:
    rows = source(layout="mixed")
    counts = {name: sum(rows[r].source == f"digits/{name}" for r in range(600)) for name in ("one-image", "text")}
    assert all(150 < count < 250 for count in counts.values())


def test_answers_add_up() -> None:
    assert answer([3, 5], False) == answer([3, 5], True) == "3+5=8"
    assert answer([3, 5, 4], False) == "3+5+4=12"
    assert answer([3, 5, 4], True) == "3+5=8,8+4=12"
    assert answer([7], False) == answer([7], True) == "7=7"


@given(st.lists(st.integers(0, 9), min_size=2, max_size=16))
def test_worked_answers_are_true_running_sums(digits: list[int]) -> None:
    steps = [tuple(map(int, re.split(r"[+=]", step))) for step in answer(digits, True).split(",")]
    sums = list(accumulate(digits))
    assert steps == [(a, d, b) for a, d, b in zip(sums, digits[1:], sums[1:], strict=False)]
    for worked in (False, True):
        assert len(answer(digits, worked)) <= longest_answer(DataConfig(digits=len(digits), worked=worked))


def same(a: Prompt, b: Prompt) -> bool:
    return (a.row_id, a.messages, a.answer, a.source) == (b.row_id, b.messages, b.answer, b.source) and all(
        (x == y).all() for x, y in zip(a.images, b.images, strict=True)
    )


def test_a_row_is_the_same_prompt_whenever_it_is_asked_for() -> None:
    forwards, backwards = source(layout="mixed"), source(layout="mixed")
    ahead = [forwards[r] for r in range(50)]
    back = [backwards[r] for r in reversed(range(50))]
    assert all(same(a, b) for a, b in zip(ahead, reversed(back), strict=True))
    ahead[0].messages[0]["content"].clear()
    assert forwards[0].messages[0]["content"]


def test_what_a_caller_does_to_an_image_stays_with_the_caller() -> None:
    rows = source(layout="many-images")
    before = rows[5].images[0].copy()
    rows[5].images[0][:] = 0
    assert (rows[5].images[0] == before).all()


def test_splits_have_a_stated_length_and_end_there() -> None:
    assert [len(source(s)) for s in (*SPLITS, "labelled")] == [8192, 1024, 1024, 8192]
    for row in (-1, 1024):
        with pytest.raises(IndexError, match=f"row {row} of digits/test, which has rows 0 to 1023"):
            source("test")[row]


def test_fingerprints_tell_contents_apart_and_agree_between_processes() -> None:
    prints = [source(s).fingerprint() for s in (*SPLITS, "labelled")]
    prints += [source(digits=3).fingerprint(), source(worked=True).fingerprint(), source(layout="text").fingerprint()]
    assert len(set(prints)) == len(prints)
    code = (
        "from stretto.config import DataConfig; from stretto.data.source import open_source; "
        "print(open_source(DataConfig(), 'train').fingerprint())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == prints[0]


def test_a_different_run_seed_or_shuffle_does_not_move_an_image_between_splits() -> None:
    assert source(shuffle=False).fingerprint() == source(shuffle=True).fingerprint()
