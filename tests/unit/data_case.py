"""Small data files and pictures, and how to open them as a run does; shared by tests."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiny
from PIL import Image

from stretto import build
from stretto.config import Config
from stretto.data.files import Files

PICTURE = np.random.default_rng(5).integers(0, 256, (32, 64, 3), dtype=np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, kind, **options)
    return file.getvalue()


def picture(path: Path, seed: int = 5, size: tuple[int, int] = (32, 64)) -> np.ndarray:
    """A PNG of noise at ``path``, of (height, width); its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.write_bytes(encoded(pixels))
    return pixels


def jsonl(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    """Rows that are strings are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, group: int = 2) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, row_group_size=group)
    return path


def config(folder: Path, *files: Path, model: Mapping[str, Any] | None = None, **data: Any) -> Config:
    """Of a run in ``folder``/run that trains on ``files``; further blocks by their names, the rest is of [data]."""
    blocks = {name: data.pop(name) for name in ("actor", "rollout", "reward", "eval", "sft") if name in data}
    return Config.model_validate(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"config": tiny.BLOCK, **(model or {})},
            "data": {"source": "files", "train_files": tuple(map(str, files)), **data},
            "eval": {"every": 0},
            **blocks,
        }
    )


class Notes(list[str]):
    """A ``Note`` that remembers."""

    def __call__(self, message: str, *, stays: bool = False) -> None:
        self.append(message)


def opened(
    folder: Path, *files: Path, split: str = "train", keep: bool = False, note: Any = None, **data: Any
) -> Files:
    source = build.source(
        config(folder, *files, **data), split, None if "model" in data else tiny.family(), keep=keep, note=note
    )
    assert isinstance(source, Files)
    return source


def refused(source: Files) -> dict[str, tuple[str, str]]:
    """Row id -> (kind, reason)."""
    return {r.row_id: (r.kind, r.reason) for r in source.found.refused}
