"""Checkpoints: whole or not at all. Tensors in safetensors files, everything else in ``state.json``; no pickle.

``step_000012/`` holds ``masters`` (float32 parameters), ``optimizer``, ``rng`` and one ``published_000011`` a kept
version, all ``.safetensors``; ``state.json`` is written last, with the size and SHA-256 of each of them. The
folder is written as ``step_000012.tmp``, synced and renamed, so that a reader sees a whole one or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.models.weights_io import from_host
from stretto.types import StrettoError, WeightBucket

FORMAT = 2
STATE = "state.json"
REQUIRED = ("masters.safetensors", "optimizer.safetensors", "rng.safetensors")
_STEP = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole (``path`` None: there is none), and the newer ones that are not, with why."""

    path: Path | None
    state: dict[str, Any]
    passed_over: tuple[tuple[Path, str], ...]


FREE_BLOCKS = frozenset({"cluster", "checkpoint", "eval", "plane", "sft"})
FREE_OPTIONS = frozenset({"run.dir", "reward.timeout_s", "reward.workers"})
"""Blocks and options that may change when a run goes on: where it runs, what it saves and how it is watched."""


def binding_options(config: Config) -> dict[str, Any]:
    """The options that training depends on, by dotted name, as plain data."""
    return {
        f"{block}.{key}": value
        for block, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if block not in FREE_BLOCKS and f"{block}.{key}" not in FREE_OPTIONS
    }


def config_hash(config: Config) -> str:
    """16 hex digits for everything in a config that training depends on."""
    text = json.dumps(binding_options(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def steps(directory: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, newest first, whole or not; unfinished ``.tmp`` ones are not among them."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted(found, reverse=True)


def problem(path: Path, world: int | None = None) -> str:
    """Why a checkpoint folder cannot be used by ``world`` ranks (None: by any number), or ``""``. Reads every byte."""
    try:
        state = json.loads((path / STATE).read_text())
        files, format_, saved_world = state["files"], state["format"], state["world"]
    except FileNotFoundError:
        return f"{STATE} is missing: the save was cut short"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"{STATE} is not readable ({type(error).__name__}: {error})"
    if not isinstance(state.get("cursor"), int):
        return f"{STATE} has no cursor: it does not say which partition is next"
    if format_ != FORMAT:
        return f"format {format_} is not the format {FORMAT} that this version reads"
    if world is not None and saved_world != world:
        return f"it was saved by {saved_world} actor ranks, this run has {world}"
    missing = [name for name in REQUIRED if name not in files]
    if missing:
        return f"{STATE} lists no {', '.join(missing)}"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}"
        if _hash(file) != entry["sha256"]:
            return f"{name} is corrupt: its checksum differs"
    return ""


def latest_valid(directory: Path, world: int = 1) -> Found:
    """The newest checkpoint under ``directory`` that is whole; those passed over are left as they are."""
    passed: list[tuple[Path, str]] = [
        (path, "the save was cut short before it was renamed into place")
        for path in sorted(directory.glob("step_*.tmp"))
    ]
    for _, path in steps(directory):
        why = problem(path, world)
        if not why:
            return Found(path, json.loads((path / STATE).read_text()), tuple(passed))
        passed.append((path, why))
    return Found(None, {}, tuple(passed))


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of ``masters``, ``optimizer`` or ``rng`` of a checkpoint, on the CPU."""
    return load_file(path / f"{name}.safetensors")


def read_published(path: Path) -> dict[int, list[WeightBucket]]:
    """The published weights that a checkpoint keeps, by version; empty before the second version."""
    result: dict[int, list[WeightBucket]] = {}
    for file in sorted(path.glob("published_*.safetensors")):
        tensors = load_file(file)
        version = int(file.stem.removeprefix("published_"))
        result[version] = list(iter_buckets(tensors, version, next(iter(tensors.values())).dtype))
    return result


class Checkpointer:
    """Writes checkpoints of one run under ``directory``, and removes all but the ``keep`` newest whole ones."""

    def __init__(self, directory: Path, keep: int):
        self.directory, self.keep = directory, keep
        self.previous: Path | None = None
        """Checkpoint of this lineage that published weights may be hard-linked from; set it after a resume."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        published: Mapping[int, Callable[[], Iterable[WeightBucket]]],
        world: int = 1,
    ) -> Path:
        """Write ``step_{step}`` and return its path.

        ``tensors``: ``masters``, ``optimizer``, ``rng`` -> named tensors. ``published``: kept version -> its buckets,
        called only where the file cannot be linked from the previous checkpoint. Folders of this or a later step (of
        updates that a resume has undone, or broken) are renamed to ``….aside``, never overwritten.

        Raises StrettoError when the disk is full or not writable; earlier checkpoints are then untouched.
        """
        final = self.directory / f"step_{step:06d}"
        temporary = final.with_name(final.name + ".tmp")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("step_*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir()
            files: dict[str, dict[str, Any]] = {}
            for name, named in tensors.items():
                files[f"{name}.safetensors"] = _write(temporary / f"{name}.safetensors", named)
            for version, buckets in published.items():
                name = f"published_{version:06d}.safetensors"
                files[name] = self._link(name, temporary) or _write(temporary / name, _tensors(buckets()))
            whole = {**state, "format": FORMAT, "step": step, "world": world, "files": files}
            _write_synced(temporary / STATE, json.dumps(whole, indent=1, sort_keys=True, allow_nan=False).encode())
            _sync_directory(temporary)
            replaced = self._make_room(step, world)
            temporary.rename(final)
            _sync_directory(self.directory)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StrettoError(
                f"checkpoint {final} could not be written ({error}); earlier ones are untouched: free space there, "
                "lower checkpoint.keep, or choose another run.dir"
            ) from error
        self.previous = final
        self._prune(step, replaced)
        return final

    def _link(self, name: str, into: Path) -> dict[str, Any] | None:
        """Hard-link a published file from the previous checkpoint; None where it is not there or links do not work."""
        if self.previous is None:
            return None
        try:
            entry = json.loads((self.previous / STATE).read_text())["files"].get(name)
            if entry is None or (self.previous / name).stat().st_size != entry["bytes"]:
                return None
            os.link(self.previous / name, into / name)
        except (OSError, ValueError, KeyError):
            return None  # the caller writes the file itself
        return entry

    def _make_room(self, step: int, world: int) -> Path | None:
        """Rename folders of this and later steps; returns the one of this step, if it was whole."""
        replaced = None
        for number, path in steps(self.directory):
            if number < step:
                break
            whole = number == step and not problem(path, world)
            aside = path.with_name(path.name + ".aside")
            count = 1
            while aside.exists():
                count += 1
                aside = path.with_name(f"{path.name}.aside-{count}")
            path.rename(aside)
            replaced = aside if whole else replaced
        return replaced

    def _prune(self, step: int, replaced: Path | None) -> None:
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        whole = [path for number, path in steps(self.directory) if number <= step and not _cheap_problem(path)]
        for path in whole[self.keep :]:
            # state.json first: what is left of a removal that is cut short is no checkpoint
            (path / STATE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _cheap_problem(path: Path) -> bool:
    """Whether sizes already show that a folder is not whole; contents are not read."""
    try:
        files = json.loads((path / STATE).read_text())["files"]
        return any((path / name).stat().st_size != entry["bytes"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _tensors(buckets: Iterable[WeightBucket]) -> dict[str, Tensor]:
    return {
        meta.name: from_host(array, meta.dtype)
        for bucket in buckets
        for meta, array in zip(bucket.metas, bucket.data, strict=True)
    }


def _write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write and sync one file; returns its entry in ``state.json``."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _hash(path)}


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        # Processors have instructions for SHA-256. blake2b, at 0.3 GB/s, took most of the time of a save of 30 GB.
        return hashlib.file_digest(file, "sha256").hexdigest()


def rng_tensors() -> dict[str, Tensor]:
    """The state of torch's generators in this process, uint8."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_rng(tensors: Mapping[str, Tensor]) -> None:
    """Undo of ``rng_tensors``; a state of a device that is not there is left out."""
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
