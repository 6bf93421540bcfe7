"""The built-in data set: sums of handwritten digits.

The images are scikit-learn's ``load_digits`` (1,797 real digits written by 43 people, 8x8 pixels, 17 grey levels),
enlarged to 32x32 RGB by repeating pixels. Repeating is exact and needs no imaging library, so the content, and with it
the fingerprint, is the same everywhere; a linear patch embedding sees no less in it than in a smooth enlargement.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import distribution
from typing import Any, Literal

import numpy as np

from stretto.config import DataConfig
from stretto.data.cursor import permutation
from stretto.types import ConfigError, Prompt, Split

Layout = Literal["one-image", "many-images", "text"]

SIDE = 32
QUESTION = "Sum?"
IMAGES = {"train": 1400, "validation": 198, "test": 199}
ROWS = {"train": 8192, "validation": 1024, "test": 1024, "labelled": 8192}
LAYOUTS: tuple[Layout, ...] = ("one-image", "many-images", "text")

_SPLIT_STREAM = 0x57E770  # never the seed of a run: every run and every seed has the same split
_ROW_STREAM = {"train": 1, "validation": 2, "test": 3, "labelled": 4}
_VERSION = 1  # of how rows are drawn; part of the fingerprint


class Digits:
    """One split of the data set: ``len()`` prompts, each a pure function of (split, row, options) and made when asked.

    ``train``, ``validation`` and ``test`` are drawn from 1,400, 198 and 199 images; no image is in two of them.
    ``labelled`` is drawn from the first ``data.labelled_images`` images of ``train``, balanced over the ten digits, and
    is what the supervised warm-start may see.

    Raises:
        ConfigError: more labelled images than ``train`` has.
    """

    def __init__(self, cfg: DataConfig, split: Split):
        self.cfg = cfg
        self.split = split
        if split == "labelled":
            self.images, self.digits = labelled(cfg.labelled_images)
        else:
            self.images, self.digits = split_images(split)

    def __len__(self) -> int:
        return ROWS[self.split]

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of digits/{self.split}, which has rows 0 to {len(self) - 1}")
        key = np.array([_ROW_STREAM[self.split], row], dtype=np.uint64)
        draws = np.random.Philox(key=key).random_raw(1 + self.cfg.digits)
        picks = [int(draw) % len(self.images) for draw in draws[1:]]
        wanted = self.cfg.layout
        layout = LAYOUTS[int(draws[0]) % len(LAYOUTS)] if wanted == "mixed" else wanted
        digits = [int(self.digits[i]) for i in picks]
        content, images = _lay_out(layout, digits, [self.images[i] for i in picks])
        return Prompt(
            row_id=f"digits/{self.split}/{row:06d}",
            messages=({"role": "user", "content": content},),
            images=images,
            answer=answer(digits, self.cfg.worked),
            source=f"digits/{layout}",
        )

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the pixels, the labels and everything that decides a row."""
        options = (_VERSION, self.split, len(self), self.cfg.digits, self.cfg.worked, self.cfg.layout, QUESTION)
        digest = hashlib.sha256(repr(options).encode())
        digest.update(self.images.tobytes())
        digest.update(self.digits.tobytes())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        return {"rows": len(self), "fingerprint": self.fingerprint()}


def answer(digits: list[int], worked: bool) -> str:
    """The answer wanted: ``3+5=8``; worked out with running sums, ``3+5=8,8+4=12``. One digit is ``3=3`` in both.

    >>> answer([3, 5, 4], worked=False), answer([3, 5, 4], worked=True)
    ('3+5+4=12', '3+5=8,8+4=12')
    """
    if not worked or len(digits) == 1:
        return "+".join(map(str, digits)) + f"={sum(digits)}"
    steps, total = [], digits[0]
    for digit in digits[1:]:
        steps.append(f"{total}+{digit}={total + digit}")
        total += digit
    return ",".join(steps)


def longest_answer(cfg: DataConfig) -> int:
    """Characters of the longest answer these options can ask for: all nines."""
    return len(answer([9] * cfg.digits, cfg.worked))


def split_images(split: Literal["train", "validation", "test"]) -> tuple[np.ndarray, np.ndarray]:
    """The images of a split, uint8 [n, 32, 32, 3], and what they show, int64 [n]. Read-only."""
    images, digits = _enlarged()
    rows = _split_rows()[split]
    return images[rows], digits[rows]


def labelled(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``count`` images of the train split and their labels; of every digit equally many, or one more.

    Raises:
        ConfigError: ``count`` above the size of the split.
    """
    if count > IMAGES["train"]:
        raise ConfigError(
            [f"data.labelled_images = {count}: the train split has {IMAGES['train']} images; ask for at most that many"]
        )
    images, digits = split_images("train")
    return images[:count], digits[:count]


@cache
def _enlarged() -> tuple[np.ndarray, np.ndarray]:
    """All images and what they show, from the file that ``load_digits`` reads: importing sklearn takes every process
    that opens this data set two to three seconds.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    grey = np.rint(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = grey.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
    images = np.repeat(large[..., None], 3, axis=3)
    return images, rows[:, -1].astype(np.int64)


@cache
def _split_rows() -> dict[str, np.ndarray]:
    """Indexes into ``load_digits`` by split. ``train`` deals the ten digits out in turn, for as long as each lasts."""
    digits = _enlarged()[1]
    order = permutation(len(digits), _SPLIT_STREAM, 0)
    ends = np.cumsum([IMAGES["train"], IMAGES["validation"], IMAGES["test"]])
    train, validation, test, _ = np.split(order, ends)
    turn = np.empty(len(train), dtype=np.int64)
    for digit in range(10):
        mine = digits[train] == digit
        turn[mine] = np.arange(mine.sum())
    return {"train": train[np.lexsort((digits[train], turn))], "validation": validation, "test": test}


def _lay_out(
    layout: Layout, digits: list[int], images: list[np.ndarray]
) -> tuple[list[dict[str, str]], tuple[np.ndarray, ...]]:
    """Message content, and the images that its ``image`` parts take in order. Images always have text between them."""
    if layout == "text":
        return [_text(",".join(map(str, digits)) + " " + QUESTION)], ()
    if layout == "one-image":
        return [{"type": "image"}, _text(QUESTION)], (np.concatenate(images, axis=1),)
    content = [part for _ in images for part in ({"type": "image"}, _text(","))]
    content[-1] = _text(QUESTION)
    return content, tuple(image.copy() for image in images)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
