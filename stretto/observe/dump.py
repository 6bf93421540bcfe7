"""Gradients and parameters of one update, whole, to find what differs between two runs: ``dump/``.

After the partition that ``seams.dump_partition`` names, each actor rank writes
``dump/update_000012-rank-0-of-2.safetensors``: float32 tensors ``parameters.<name>``, the masters that it owns, as the
update left them, and on rank 0 ``gradients.<name>`` of all of them, as the optimizer got them: reduced, normalised,
clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from stretto.types import StrettoError

GRADIENTS, PARAMETERS = "gradients.", "parameters."
"""What the names of tensors begin with."""


def dump_path(run_dir: Path | str, update: int, rank: int = 0, world: int = 1) -> Path:
    return Path(run_dir) / "dump" / f"update_{update:06d}-rank-{rank}-of-{world}.safetensors"


def write_dump(run_dir: Path | str, update: int, rank: int, world: int, tensors: Mapping[str, np.ndarray]) -> Path:
    """What one rank has of an update. Raises StrettoError where it cannot be written."""
    path = dump_path(run_dir, update, rank, world)
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(dict(tensors), temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise StrettoError(
            f"gradients and parameters of update {update} cannot be dumped to {path}: {error}"
        ) from error
    return path


def read_dump(run_dir: Path | str, update: int) -> dict[str, np.ndarray]:
    """The tensors of all ranks, by their names. Raises StrettoError where a rank's file is missing or cut short."""
    paths = sorted((Path(run_dir) / "dump").glob(f"update_{update:06d}-rank-*-of-*.safetensors"))
    worlds = {path.stem.rsplit("-", 1)[1] for path in paths}
    if len(worlds) != 1 or len(paths) != int(next(iter(worlds))):
        found = ", ".join(path.name for path in paths) or "nothing"
        raise StrettoError(f"{Path(run_dir) / 'dump'} holds no whole dump of update {update}: found {found}")
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise StrettoError(f"{path} is not whole: {error}") from None
    return tensors
