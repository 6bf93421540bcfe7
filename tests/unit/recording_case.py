"""A recording of two partitions of the tiny model, its images given in every form that there is."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from PIL import Image
from rollout_case import SAMPLING, hf, published, rollout

from stretto.config import Config
from stretto.data.images import Images, originals
from stretto.recording.writer import Writer, seal
from stretto.rollout.recorder import Recorder
from stretto.rollout.router import Offer
from stretto.types import PartitionPlan, Prompt, Score, Truncated

GROUPS, PARTITIONS, N = 6, 2, SAMPLING.n


class Oddly:
    """Rewards that a float32 or a JSON number would not bring back; one sample of every third row has none."""

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, responses: Any) -> list[Score]:
        row = int(prompt.row_id.removeprefix("row-"))
        scores = [Score(value=0.1 + row * 1e-15 + i) for i in range(len(responses))]
        if row % 3 == 0:
            scores[0] = Score(value=0.0, valid=False, error="reward raised é", failure="raised")
        if row == 1:
            scores[0] = Score(value=-0.0)
        return scores

    def check_partition(self, partition: int, scores: Any) -> None:
        pass

    def close(self) -> None:
        pass


def pixels(row: int, height: int = 32, width: int = 64) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(row: int, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(row)).save(file, kind, **options)
    return file.getvalue()


def given(row: int, folder: Path) -> list[Any]:
    """Images of a row as data files give them: a turned JPEG, bytes, a data URI, an array, two of them, or none."""
    turned = Image.Exif()
    turned[0x0112] = 6
    if row % 6 == 0:
        if not (folder / f"{row}.JPG").exists():
            (folder / f"{row}.JPG").write_bytes(encoded(row, "jpeg", exif=turned))
        return [f"{row}.JPG"]
    if row % 6 == 1:
        return [{"bytes": encoded(row, "webp", lossless=True), "path": None}]
    if row % 6 == 2:
        return ["data:image/png;base64," + base64.b64encode(encoded(row, "png")).decode()]
    return [[pixels(row)], [pixels(row), pixels(row + 100, 64, 32)], []][row % 6 - 3]


def reader(folder: Path) -> Any:
    def read(row: int) -> Prompt:
        images = given(row, folder)
        plain = tiny.prompt(row, ((32, 64),) * len(images))
        return Prompt(
            row_id=plain.row_id,
            messages=plain.messages,
            images=Images(images, plain.row_id, folder),
            answer="3+5=8 é",
            source="forms",
        )

    return read


def plan(partition: int) -> PartitionPlan:
    rows = tuple(range(partition * GROUPS, (partition + 1) * GROUPS))
    return PartitionPlan(partition=partition, version=partition, epochs=(0,) * GROUPS, rows=rows)


def config() -> Config:
    rollout = {"prompts_per_partition": GROUPS, "n_samples_per_prompt": N, "max_response_tokens": SAMPLING.max_tokens}
    return Config.model_validate({"model": {"config": tiny.BLOCK}, "rollout": rollout, "eval": {"every": 0}})


def recorder(folder: Path, partitions: int = PARTITIONS, truncated: Truncated = "train") -> Recorder:
    return Recorder(
        Writer(folder),
        partitions=partitions,
        truncated=truncated,
        originals=lambda prompt: originals(prompt.images),
    )


def sealed(folder: Path) -> None:
    seal(
        folder,
        config=config().model_dump(mode="json"),
        model={"fingerprint": "0" * 16, "parameters": 1},
        data={"rows": 12, "fingerprint": "f"},
        partitions=PARTITIONS,
        groups=GROUPS,
        n=N,
    )


async def record(folder: Path, data: Path) -> list[Any]:
    """Records the first two of three partitions that real parts generate; all that was put, in order."""
    async with rollout(hf, m=4, rewarder=Oddly(), recorder=recorder(folder)) as case:
        for k in range(PARTITIONS + 1):
            await case.scheduler.run(plan(k), reader(data), Offer(k, published(k).weights))
        sealed(folder)
        return sorted(case.arrived, key=lambda put: (put[0].partition, put[0].group))
