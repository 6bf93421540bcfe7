"""Published weights as a folder of safetensors files, for servers that read them from a shared file system.

::

    run.dir/http-weights/<engine>/lock               held as long as the engine lives
                                  version-7-5f3a/    whole, or not there: written beside and renamed into place
                                      model-00001-of-00003.safetensors ...
                                      model.safetensors.index.json

An engine has a folder of its own, so that none removes what another's server still reads. What an engine that was
killed has left is removed by the next one that starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from stretto.models.weights_io import from_host
from stretto.types import StrettoError, WeightBucket

INDEX = "model.safetensors.index.json"


class WeightFolder:
    """What one engine writes under ``parent``, which is made where it is not there.

    Raises StrettoError where it cannot be written.
    """

    def __init__(self, parent: Path):
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            self.path = parent / secrets.token_hex(4)
            part = self.path.with_suffix(".part")  # until it is locked, for another that starts at the same moment
            part.mkdir()
            self._lock: int | None = os.open(part / "lock", os.O_CREAT | os.O_RDWR)
            with suppress(OSError):  # of a file system without locks: others then leave this folder alone
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.rename(self.path)
        except OSError as error:
            raise StrettoError(
                f"run.dir: {parent} cannot be written ({error.strerror}); servers read new weights there"
            ) from None

    def probe(self) -> Path:
        """A folder with a file of no weights: a server that can read it will see what ``write`` makes."""
        path = self.path / "probe"
        path.mkdir(exist_ok=True)
        save_file({}, path / "model.safetensors")
        return path

    def write(self, version: int, buckets: Sequence[WeightBucket]) -> Path:
        """The whole folder of a version, under a name that was never used: file systems of a network remember what a
        name was. One bucket is in memory at a time, beside those given.

        Raises OSError where it cannot be written, a full disk for one.
        """
        name = f"version-{version}-{secrets.token_hex(2)}"
        part = self.path / f"{name}.part"
        part.mkdir()
        where: dict[str, str] = {}
        for bucket in buckets:
            file = f"model-{bucket.index + 1:05}-of-{bucket.count:05}.safetensors"
            tensors = {
                meta.name: from_host(array, meta.dtype) for meta, array in zip(bucket.metas, bucket.data, strict=True)
            }
            save_file(tensors, part / file, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, file)
        size = sum(array.nbytes for bucket in buckets for array in bucket.data)
        (part / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1))
        return part.rename(self.path / name)

    def keep_only(self, path: Path) -> None:
        """Remove all versions but that one."""
        for other in self.path.glob("version-*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """All of it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob("*/lock"):
        if lock.parent.suffix:
            continue
        with suppress(OSError):  # it is held, or was just removed
            held = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)


def digests(buckets: Sequence[WeightBucket], dtype: torch.dtype) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor as a server of ``dtype`` would hold it, by its published name."""
    found: dict[str, str] = {}
    for bucket in buckets:
        for meta, array in zip(bucket.metas, bucket.data, strict=True):
            held = from_host(array, meta.dtype).to(dtype).contiguous().view(-1).view(torch.uint8)
            found[meta.name] = hashlib.sha256(held.numpy().data).hexdigest()
    return found
