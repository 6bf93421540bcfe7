"""The folder of a campaign: its plan, and one folder for every attempt at a cell, written once.

    <sha256>.plan.toml
    cells/<block>-<position>-<condition>/attempt-<n>/
    alone/<stage>-<condition>/attempt-<n>/             one stage with the others idle: the pipeline's limits
        cell.json       the runner's note, written once, last: ``Note``
        run/            what a run leaves (docs/observability.md)
        hardware.jsonl  samples (``stretto.bench.sampler``)
        log.txt         what the process printed

An attempt without ``cell.json`` was interrupted together with its runner.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stretto.observe.lineage import write_atomically
from stretto.types import StrettoError

FORMAT = 1
Stage = Literal["processor", "rollout", "training"]
Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Note:
    """``cell.json``: what was run, when, where and how it ended.

    plan             SHA-256 of the plan it ran under
    stage            empty for a cell; of a run ``alone``: which stage
    block, position  of a run ``alone``: -1
    command          the words of the command line
    started, ended   UTC, ISO 8601
    reason           why it is not ``finished``; the end of its log for a failure
    others_before    CPU cores that other processes used just before it started
    files            path below the attempt's folder -> SHA-256, of every file that is analysed
    """

    plan: str
    stage: Stage | Literal[""]
    condition: str
    seed: int
    block: int
    position: int
    attempt: int
    command: tuple[str, ...]
    started: str
    ended: str
    wall_s: float
    exit_code: int | None
    status: Status
    reason: str
    machine_id: str | None
    boot_id: str | None
    others_before: float
    files: Mapping[str, str]
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One folder. ``note`` is None where its runner ended before it."""

    path: Path
    name: str
    number: int
    note: Note | None

    @property
    def run_dir(self) -> Path:
        return self.path / "run"

    @property
    def hardware_path(self) -> Path:
        return self.path / "hardware.jsonl"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"


def attempts(campaign: Path, kind: Literal["cells", "alone"] = "cells") -> tuple[Attempt, ...]:
    """All that there are, by name and number.

    Raises:
        StrettoError: a note that cannot be read.
    """
    paths = (campaign / kind).glob("*/attempt-*")
    found = [(path.parent.name, int(path.name.removeprefix("attempt-")), path) for path in paths if path.is_dir()]
    return tuple(
        Attempt(path=path, name=name, number=number, note=read_note(path)) for name, number, path in sorted(found)
    )


def read_note(attempt: Path) -> Note | None:
    """None: there is none. Raises StrettoError where it cannot be read, or is of another format."""
    path = attempt / "cell.json"
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise StrettoError(f"{path} has format {data['format']}, and this version reads {FORMAT}")
        return Note(**{**data, "command": tuple(data["command"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StrettoError(f"{path} cannot be read: {error}") from None


def write_note(attempt: Path, note: Note) -> None:
    write_atomically(attempt / "cell.json", (json.dumps(asdict(note), indent=1) + "\n").encode())


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain(value: Any) -> Any:
    """JSON of a record of this package: what is not finite is written as a word, for JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value
