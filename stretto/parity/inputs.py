"""What a run reads beside its options, so that a check knows when runs that it kept are of something else."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from stretto.config import Config

State = tuple[str, int, int]
"""Name, size and time of a file."""


def inputs(config: Config) -> dict[str, Any]:
    """Of model, teacher and image folders names, sizes and times; of data files and the user's modules their content.

    Images that lie elsewhere than in ``data.image_folder`` are not looked at.
    """
    data = config.data
    return {
        "model": files_of(config.model.path),
        "teacher": files_of(config.algorithm.teacher),
        "images": files_of(data.image_folder, deep=True),
        "data": [content((Path(path),)) for path in (*data.train_files, *data.validation_files)],
        "reward": code_of(config.reward.function),
        "hook": code_of(config.actor.before_logprob_hook),
    }


def files_of(folder: str, *, deep: bool = False) -> list[State]:
    """Of each file of a folder, with ``deep`` of those below it; empty for a hub id, or none."""
    if not folder or not Path(folder).is_dir():
        return []
    paths = Path(folder).rglob("*") if deep else Path(folder).iterdir()
    return sorted(_states(Path(folder), (path for path in paths if path.is_file())))


def _states(folder: Path, paths: Iterator[Path]) -> Iterator[State]:
    for path in paths:
        status = path.stat()
        yield str(path.relative_to(folder)), status.st_size, status.st_mtime_ns


def code_of(name: str, where: Sequence[str] | None = None) -> str:
    """Hash of the source of the module of ``module:function``, of all of its package where it lies in one; empty where
    there is none. It is found as a run finds it, and not imported.
    """
    module, colon, _ = name.partition(":")
    if not colon:
        return ""
    spec = PathFinder.find_spec(module.split(".")[0], list(where or (os.getcwd(), *sys.path)))
    if spec is None:
        return ""
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        return content(sorted(path for folder in folders for path in folder.rglob("*.py")))
    return content((Path(spec.origin),)) if spec.origin else ""


def content(paths: Sequence[Path]) -> str:
    """Hash of files: names and bytes. One that cannot be read is a run's own error."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
