"""Checkpoints: whole or not at all. Tensors in safetensors files, everything else in ``state.json``; no pickle.

``step_000012/`` holds ``masters`` (float32 parameters), ``optimizer``, ``rng``, ``old_actor`` where there is such a
snapshot, and one ``published_000011`` a kept version, all ``.safetensors``; of several actor ranks each writes what it
owns, as ``masters-0-of-2`` and so on.
``state.json`` is written last, with the size and SHA-256 of each of them. The folder is written as
``step_000012.tmp``, synced and renamed, so that a reader sees a whole one or none.

A save is ``begin`` (rank 0), ``write`` (every rank), ``commit`` (rank 0, once all have written). It holds no
collective: a rank whose disk is full keeps nobody waiting.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.models.weights_io import from_host
from stretto.types import StrettoError, WeightBucket

FORMAT = 3
STATE = "state.json"
KINDS = ("masters", "optimizer", "rng")
Entries = dict[str, dict[str, Any]]
"""``bytes`` and ``sha256`` of files, by their names in the folder."""
_STEP = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole (``path`` None: there is none), and the newer ones that are not, with why."""

    path: Path | None
    state: dict[str, Any]
    passed_over: tuple[tuple[Path, str], ...]


FREE_BLOCKS = frozenset({"cluster", "checkpoint", "eval", "plane", "sft", "switches"})
DERIVED_BLOCKS = frozenset({"seams"})
"""Set by switches, not by options."""
FREE_OPTIONS = frozenset(
    {
        "run.dir",
        "data.train_files",  # a run's data is known by its fingerprint, see run_data.same_as_before
        "data.validation_files",
        "data.test_files",
        "data.image_folder",
        "reward.timeout_s",
        "reward.workers",
        "rollout.replicas",
        "rollout.max_engine_restarts",
        "rollout.engine_timeout_s",
        "rollout.servers",
        "rollout.weight_transfer",
        "rollout.logprob_gap_alarm",
    }
)
"""Blocks and options that may change when a run goes on: where it runs, what it saves and how it is watched."""


def binding_options(config: Config) -> dict[str, Any]:
    """The options that training depends on, by dotted name, as plain data."""
    binding = {
        f"{block}.{key}": value
        for block, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
        if block not in FREE_BLOCKS | DERIVED_BLOCKS and f"{block}.{key}" not in FREE_OPTIONS
    }
    # How many rounds a partition may take only decides whether the run ends for want of groups.
    binding["rollout.refill_rounds > 0"] = binding.pop("rollout.refill_rounds") > 0
    return binding


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
    if not isinstance(saved_world, int) or saved_world < 1:
        return f"{STATE} is not readable (world is {saved_world!r})"
    if world is not None and saved_world != world:
        return (
            f"it was saved by {saved_world} actor rank{'s' if saved_world > 1 else ''}, this run has {world} "
            "(actor.data_parallel)"
        )
    required = [shard_name(kind, rank, saved_world) for kind in KINDS for rank in range(saved_world)]
    missing = [name for name in required if name not in files]
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


def latest_valid(directory: Path, world: int | None = None) -> Found:
    """The newest checkpoint under ``directory`` that is whole and, given ``world``, was saved by that many ranks; those
    passed over are left as they are.
    """
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


def shard_name(kind: str, rank: int, world: int) -> str:
    """The file of what rank ``rank`` owns of ``masters``, ``optimizer`` or ``rng``."""
    return f"{kind}.safetensors" if world == 1 else f"{kind}-{rank}-of-{world}.safetensors"


def _shards(path: Path, kind: str) -> list[Path]:
    world = int(json.loads((path / STATE).read_text())["world"])
    return [path / shard_name(kind, rank, world) for rank in range(world)]


def read_shard(path: Path, kind: str, rank: int) -> dict[str, Tensor]:
    """What one rank wrote of ``masters``, ``optimizer`` or ``rng``, on the CPU."""
    return load_file(_shards(path, kind)[rank])


def iter_shards(path: Path, kind: str) -> Iterator[dict[str, Tensor]]:
    """What each rank wrote of ``masters`` or ``optimizer``, one in memory at a time."""
    return (load_file(file) for file in _shards(path, kind))


def read_tensors(path: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of ``masters`` or ``optimizer`` of a checkpoint, whatever the number of ranks that saved it."""
    return {name: tensor for shard in iter_shards(path, kind) for name, tensor in shard.items()}


def read_shapes(path: Path, kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of ``masters`` or ``optimizer``, without reading the values."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _shards(path, kind):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


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

    def begin(self, step: int) -> None:
        """Rank 0, first: an empty temporary folder for ``step``. Raises StrettoError as ``commit``."""
        with self._saving(step) as temporary:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("step_*.tmp"):
                shutil.rmtree(leftover)
            temporary.mkdir()

    def write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], rank: int = 0, world: int = 1) -> Entries:
        """Every rank, after ``begin``: its shard of each kind of ``tensors``, of ``KINDS`` at least.

        Returns what ``commit`` wants to know of it. Raises StrettoError as ``commit``, but leaves the folder to the
        siblings that write to it.
        """
        with self._saving(step, remove=False) as temporary:
            names = {kind: shard_name(kind, rank, world) for kind in tensors}
            return {name: _write(temporary / name, tensors[kind]) for kind, name in names.items()}

    def commit(
        self,
        step: int,
        shards: Sequence[Entries],
        state: Mapping[str, Any],
        published: Mapping[int, Callable[[], Iterable[WeightBucket]]],
    ) -> Path:
        """Rank 0, last: make what all ranks wrote (``shards``, in rank order) a checkpoint, and return its path.

        ``published``: kept version -> its buckets, called only where the file cannot be linked from the previous
        checkpoint. Folders of this or a later step (of updates that a resume has undone, or broken) are renamed to
        ``….aside``, never overwritten.

        Raises StrettoError when the disk is full or not writable, or a shard is not there; earlier checkpoints are then
        untouched, and the temporary folder is gone.
        """
        final, world = self._final(step), len(shards)
        with self._saving(step) as temporary:
            files: Entries = {name: entry for shard in shards for name, entry in shard.items()}
            for name, entry in files.items():
                if not (temporary / name).is_file() or (temporary / name).stat().st_size != entry["bytes"]:
                    raise OSError(f"{name} of another rank is not there: run.dir must be one folder for all ranks")
            for version, buckets in published.items():
                name = f"published_{version:06d}.safetensors"
                files[name] = self._link(name, temporary) or _write(temporary / name, _tensors(buckets()))
            whole = {**state, "format": FORMAT, "step": step, "world": world, "files": files}
            _write_synced(temporary / STATE, json.dumps(whole, indent=1, sort_keys=True, allow_nan=False).encode())
            _sync_directory(temporary)
            replaced = self._make_room(step, world)
            temporary.rename(final)
            _sync_directory(self.directory)
        self.previous = final
        self._prune(step, replaced)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of ``step``, once no rank writes to it any more."""
        shutil.rmtree(self._temporary(step), ignore_errors=True)

    def _final(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _temporary(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}.tmp"

    @contextmanager
    def _saving(self, step: int, *, remove: bool = True) -> Iterator[Path]:
        try:
            yield self._temporary(step)
        except (OSError, SafetensorError) as error:
            if remove:
                self.abandon(step)
            raise StrettoError(
                f"checkpoint {self._final(step)} could not be written ({error}); earlier ones are untouched: free "
                "space there, lower checkpoint.keep, or choose another run.dir"
            ) from error

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
