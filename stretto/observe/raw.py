"""Raw per-sample values of every update, stored as they were used: ``raw/update_000012.safetensors``.

One safetensors file per update, rows sorted by ``global_index``. A column holds one value per sample, [B], or, for the
names in ``RAGGED``, one per response token, flat in row order, [T]: ``lengths`` cuts it (see ``ragged``).

================  =======  ===  ======================================================
global_index      int64    [B]  unique within the partition
lengths           int32    [B]  response tokens of each sample; their sum is T
rewards           float64  [B]
valid             bool     [B]  False: reward or engine failed
advantages        float32  [B]
version_start     int32    [B]  policy version at the first token
version_end       int32    [B]  and at the last
response_ids      int32    [T]
rollout_logprobs  float32  [T]  as the rollout engine reported them
old_logprobs      float32  [T]  under the weights before the update
train_logprobs    float32  [T]  of the training forward
================  =======  ===  ======================================================

The dtypes are the caller's; only ``global_index`` and ``lengths`` are required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from stretto.types import StrettoError

RAGGED = frozenset({"response_ids", "rollout_logprobs", "old_logprobs", "train_logprobs"})
_FILE = re.compile(r"update_(\d{6,})\.safetensors")


def raw_path(run_dir: Path | str, update: int) -> Path:
    return Path(run_dir) / "raw" / f"update_{update:06d}.safetensors"


class RawLog:
    """Writes the raw values of each update. Opening at ``first_update`` moves files of that update and later ones
    (undone work of an earlier session) to ``raw/undone/``.
    """

    def __init__(self, run_dir: Path | str, first_update: int = 0):
        self.run_dir = Path(run_dir)
        directory = self.run_dir / "raw"
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) >= first_update:
                (directory / "undone").mkdir(exist_ok=True)
                path.replace(directory / "undone" / path.name)

    def write(self, update: int, *parts: Mapping[str, np.ndarray]) -> Path:
        """Stores one update, given the columns of each rank (one part: all of it), rows in any order.

        Raises StrettoError where a sample occurs twice, or columns do not fit one another.
        """
        try:
            columns = _merge(parts)
        except ValueError as error:
            raise StrettoError(f"raw values of update {update}: {error}") from None
        path = raw_path(self.run_dir, update)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(save(columns))
        temporary.replace(path)
        return path


def _merge(parts: tuple[Mapping[str, np.ndarray], ...]) -> dict[str, np.ndarray]:
    names = set(parts[0])
    if any(set(part) != names for part in parts):
        raise ValueError(f"ranks have different columns: {[sorted(part) for part in parts]}")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    index, lengths = joined["global_index"], joined["lengths"]
    for name, values in joined.items():
        rows = int(lengths.sum()) if name in RAGGED else len(index)
        if values.shape != (rows,):
            raise ValueError(f"column {name} has shape {values.shape}, not ({rows},)")
    order = np.argsort(index, kind="stable")
    if (np.diff(index[order]) == 0).any():
        twice = index[order][:-1][np.diff(index[order]) == 0]
        raise ValueError(f"global_index {int(twice[0])} occurs twice")
    # Where row order[j] starts among the tokens, repeated over its tokens, plus the position within the row.
    starts, sizes = (np.cumsum(lengths) - lengths)[order], lengths[order]
    tokens = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    return {name: values[tokens if name in RAGGED else order] for name, values in joined.items()}


def read_raw(run_dir: Path | str, update: int) -> dict[str, np.ndarray]:
    """The columns of one update. Raises StrettoError where there is no such file, or none that is whole."""
    path = raw_path(run_dir, update)
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise StrettoError(f"no raw values of update {update} at {path}: {error}") from None


def ragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cuts a flat column [T] into one array per sample."""
    return np.split(flat, np.cumsum(lengths)[:-1])
