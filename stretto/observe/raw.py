"""Raw per-sample values of every update, stored as they were used: ``raw/update_000012.safetensors``.

One safetensors file per update, rows sorted by ``global_index``. A column holds one value per sample, [B], or, for the
names in ``RAGGED``, one per response token, flat in row order, [T]: ``lengths`` cuts it (see ``ragged``).

================  =======  ===  ======================================================
global_index      int64    [B]  unique within the partition
lengths           int32    [B]  response tokens of each sample; their sum is T
rewards           float64  [B]  what advantages are computed from: less the KL, where the reward bears one
raw_rewards       float64  [B]  as the reward function gave them
valid             bool     [B]  False: reward or engine failed
truncated         bool     [B]  cut by length
advantages        float32  [B]
version_start     int32    [B]  policy version at the first token
version_end       int32    [B]  and at the last
chunk             int32    [B]  where it was trained: chunk of the partition,
rank              int32    [B]  actor rank,
microbatch        int32    [B]  microbatch of that rank within the chunk,
row               int32    [B]  and row of the microbatch
prompt_hash       uint64   [B]  ``fingerprint`` of prompt_ids and mm_token_type_ids
image_hash        uint64   [B]  ``fingerprint`` of pixel_values and image_grid_thw of its prompt group
response_ids      int32    [T]
rollout_logprobs  float32  [T]  as the rollout engine reported them
old_logprobs      float32  [T]  under the weights before the update
train_logprobs    float32  [T]  of the training forward
loss_mask         uint8    [T]  1 for tokens that the loss took in
================  =======  ===  ======================================================

``hash.parameters``, ``hash.gradients`` and ``hash.optimizer`` (uint64) hold one hash a tensor at the end of the update;
``raw/tensors.json`` names the tensors of each, in order (``read_tensor_names``).

The dtypes are the caller's; only ``global_index`` and ``lengths`` are required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from stretto.observe.lineage import write_atomically
from stretto.types import StrettoError

RAGGED = frozenset({"response_ids", "rollout_logprobs", "old_logprobs", "train_logprobs", "loss_mask"})
HASH = "hash."
"""Begins the names of columns that hold a value for each tensor."""
_FILE = re.compile(r"update_(\d{6,})\.safetensors")


def raw_path(run_dir: Path | str, update: int) -> Path:
    return Path(run_dir) / "raw" / f"update_{update:06d}.safetensors"


def tensors_path(run_dir: Path | str) -> Path:
    return Path(run_dir) / "raw" / "tensors.json"


class RawLog:
    """Writes the raw values of each update. Opening at ``first_update`` moves files of that update and later ones
    (undone work of an earlier session) to ``raw/undone/``.
    """

    def __init__(self, run_dir: Path | str, first_update: int = 0):
        self.run_dir = Path(run_dir)
        self._names: dict[str, list[str]] | None = None
        directory = self.run_dir / "raw"
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) >= first_update:
                (directory / "undone").mkdir(exist_ok=True)
                path.replace(directory / "undone" / path.name)

    def write(
        self, update: int, *parts: Mapping[str, np.ndarray], hashes: Mapping[str, Mapping[str, int]] | None = None
    ) -> Path:
        """Stores one update, given the columns of each rank (one part: all of it), rows in any order; and ``hashes`` of
        tensors by kind and name, whose names are the same in every update.

        Raises StrettoError where a sample occurs twice, columns do not fit one another, or names have changed.
        """
        try:
            columns = _merge(parts)
        except ValueError as error:
            raise StrettoError(f"raw values of update {update}: {error}") from None
        if hashes:
            self._name_tensors({kind: list(named) for kind, named in hashes.items()})
            columns |= {f"{HASH}{kind}": np.array([*named.values()], np.uint64) for kind, named in hashes.items()}
        path = raw_path(self.run_dir, update)
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(save(columns))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    def _name_tensors(self, names: dict[str, list[str]]) -> None:
        """Writes them once, for this run and for those that go on with it."""
        if self._names is None:
            path = tensors_path(self.run_dir)
            if not path.exists():
                write_atomically(path, (json.dumps(names, indent=1) + "\n").encode())
            self._names = read_tensor_names(self.run_dir)
        if names != self._names:
            raise StrettoError(
                f"{tensors_path(self.run_dir)} names other tensors than this update has: hashes would be read as those "
                "of others; go on with the version of stretto that began the run, or choose another run.dir"
            )


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


def read_tensor_names(run_dir: Path | str) -> dict[str, list[str]]:
    """Names of ``parameters``, ``gradients`` and ``optimizer``, in the order of the ``hash.`` columns. Raises
    StrettoError where there are none on record.
    """
    path = tensors_path(run_dir)
    try:
        names: dict[str, list[str]] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StrettoError(f"no names of tensors at {path}: {error}") from None
    return names


def ragged(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cuts a flat column [T] into one array per sample."""
    return np.split(flat, np.cumsum(lengths)[:-1])
