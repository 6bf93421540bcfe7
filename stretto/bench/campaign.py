"""The folder of a campaign: its plan, and one folder for every attempt at a cell, written once.

    <sha256>.plan.toml
    journal.jsonl                                      every attempt that was begun (``stretto.bench.journal``)
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
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from stretto.bench.journal import Journal, Key, read_journal
from stretto.observe.lineage import write_atomically
from stretto.types import StrettoError

FORMAT = 1
BUSY_CORES = 0.3
"""Cores in use by others from which figures are doubted."""
Kind = Literal["cells", "alone"]
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
    environment      variables that change how its libraries compute, as its process saw them; empty: not recorded
    niceness         of its process
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
    environment: Mapping[str, str] = field(default_factory=dict)
    niceness: int = 0
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


def attempts(campaign: Path, kind: Kind = "cells") -> tuple[Attempt, ...]:
    """All that there are, by name and number.

    Raises:
        StrettoError: a folder or a note that cannot be read.
    """
    try:
        found = [(path.parent.name, number_of(path), path) for path in (campaign / kind).glob("*/attempt-*")]
        numbered = sorted((name, number, path) for name, number, path in found if number and path.is_dir())
    except OSError as error:
        raise StrettoError(f"{campaign / kind} cannot be read: {error}") from None
    return tuple(Attempt(path=path, name=name, number=number, note=read_note(path)) for name, number, path in numbered)


def number_of(attempt: Path) -> int:
    """By its folder's name; 0: it is the folder of none."""
    found = re.fullmatch("attempt-([1-9][0-9]*)", attempt.name)
    return int(found[1]) if found else 0


def removed(campaign: Path, found: Sequence[Attempt]) -> tuple[str, ...] | None:
    """A line on every attempt that was made and is not there as it was left; None: the campaign has no journal.

    found  attempts at cells, or all

    Raises:
        StrettoError: the journal or a note cannot be read.
    """
    journal = read_journal(campaign)
    if journal is None:
        return None
    there = {(each.path.parent.parent.name, each.name, each.number): each for each in found}
    last = {(kind, name): 0 for kind, name, _ in sorted({*there, *journal.attempts}, key=_cells_first)}
    for kind, name, number in (*there, *journal.attempts):
        last[kind, name] = max(last[kind, name], number)
    keys = [(kind, name, number) for (kind, name), most in last.items() for number in range(1, most + 1)]
    told = [f"{key[0]}/{key[1]}, attempt {key[2]}: {why}" for key in keys if (why := _missing(campaign, key, journal))]
    unknown = [key for key in there if there[key].note is not None and key not in journal.attempts]
    told += [f"{kind}/{name}, attempt {number}: the journal does not know it" for kind, name, number in unknown]
    return (*told, *(f"line {line} of the journal is no entry" for line in journal.unreadable))


def _cells_first(key: Key) -> tuple[bool, Key]:
    return key[0] != "cells", key


def _missing(campaign: Path, key: Key, journal: Journal) -> str:
    """Why an attempt is not there as it was left; empty: it is."""
    kind, name, number = key
    path, expected = campaign / kind / name / f"attempt-{number}", journal.attempts.get(key)
    if not path.is_dir():
        return "its folder is gone"
    if expected is None:
        return ""
    try:
        found = file_hash(path / "cell.json")
    except FileNotFoundError:
        return "its cell.json is gone"
    except OSError as error:
        raise StrettoError(f"{path / 'cell.json'} cannot be read: {error.strerror}") from None
    return "" if found == expected else f"its cell.json has SHA-256 {found}, and had {expected} when it was closed"


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
