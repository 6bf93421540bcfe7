"""Raw per-sample values of every update, stored as they were used: ``raw/update_000012.safetensors``.

One safetensors file per update, rows sorted by ``global_index``. Per-sample columns are [B]; ragged columns are one
flat array, cut by ``response_tokens``:

===================  =======  =====  =====================================================
global_index         int64    [B]    unique within the partition
response_tokens      int32    [B]    length of each response, R
rewards              float32  [B]
advantages           float32  [B]
old_logprobs         float32  [T]    per response token, T = sum of response_tokens
===================  =======  =====  =====================================================

Further columns that the caller names (``valid``, ``rollout_logprobs``, …) follow the same two forms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from stretto.types import StrettoError

Column = np.ndarray | Sequence[np.ndarray] | Sequence[float] | Sequence[int] | Sequence[bool]
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

    def write(
        self,
        update: int,
        *,
        global_index: Sequence[int] | np.ndarray,
        old_logprobs: Sequence[np.ndarray],
        advantages: Sequence[float] | np.ndarray,
        rewards: Sequence[float] | np.ndarray,
        **columns: Column,
    ) -> Path:
        """Stores one update. Rows may come in any order; a list of arrays is a ragged column, one array per sample.

        Raises StrettoError for a duplicate index or a column of another length.
        """
        index = np.asarray(global_index, np.int64)
        order = np.argsort(index, kind="stable")
        if len(np.unique(index)) != len(index):
            raise StrettoError(f"raw values of update {update}: a global_index occurs twice")
        lengths = np.array([len(row) for row in old_logprobs], np.int32)
        stored: dict[str, np.ndarray] = {"global_index": index[order]}
        ragged = {"old_logprobs": old_logprobs}
        flat: dict[str, Column] = {"advantages": np.asarray(advantages, np.float32)}
        flat["rewards"] = np.asarray(rewards, np.float32)
        for name, column in columns.items():
            if isinstance(column, np.ndarray) or not len(column) or not isinstance(column[0], np.ndarray):
                flat[name] = column
            else:
                ragged[name] = column  # type: ignore[assignment]
        for name, rows in ragged.items():
            if len(rows) != len(index) or any(len(row) != n for row, n in zip(rows, lengths, strict=True)):
                raise StrettoError(f"raw values of update {update}: {name} and old_logprobs differ in length")
            stored[name] = np.concatenate([rows[i] for i in order]) if len(rows) else np.zeros(0, np.float32)
        stored["response_tokens"] = lengths[order]
        for name, column in flat.items():
            values = np.asarray(column)
            if values.shape != index.shape:
                raise StrettoError(f"raw values of update {update}: {name} is {values.shape}, not {index.shape}")
            stored[name] = values[order]
        path = raw_path(self.run_dir, update)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(save(stored))
        temporary.replace(path)
        return path


def read_raw(run_dir: Path | str, update: int) -> dict[str, np.ndarray]:
    """The columns of one update; ``ragged`` cuts the flat ones. Raises StrettoError where there is none."""
    path = raw_path(run_dir, update)
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise StrettoError(f"no raw values of update {update} at {path}: {error}") from None


def ragged(flat: np.ndarray, response_tokens: np.ndarray) -> list[np.ndarray]:
    """Cuts a flat column [T] into one array per sample."""
    return np.split(flat, np.cumsum(response_tokens)[:-1])
