"""``journal.jsonl`` of a campaign: every attempt as it begins and as it is closed, so that none goes unseen.

    {"kind": "cells", "name": "03-5-B", "attempt": 1, "started": "2026-…"}
    {"kind": "cells", "name": "03-5-B", "attempt": 1, "sha256": "…"}           of its cell.json

Lines are only ever added, each of them on the disk before its attempt goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.types import StrettoError

FILE = "journal.jsonl"
Key = tuple[str, str, int]
"""Kind, name and number of an attempt."""


@dataclass(frozen=True, kw_only=True)
class Journal:
    """attempts    -> SHA-256 of its cell.json as it was closed first; None: it was begun alone
    unreadable  lines that are no entries, from 1, such as one that a power failure cut short
    """

    attempts: Mapping[Key, str | None]
    unreadable: tuple[int, ...]

    def last(self, kind: str, name: str) -> int:
        """The highest number that was given out; 0: none was."""
        return max((number for *whose, number in self.attempts if whose == [kind, name]), default=0)


def read_journal(campaign: Path) -> Journal | None:
    """None: there is none, as in a campaign of an earlier version.

    Raises:
        StrettoError: it cannot be read at all.
    """
    path = campaign / FILE
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StrettoError(f"{path} cannot be read: {error.strerror}") from None
    attempts: dict[Key, str | None] = {}
    unreadable = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            key = (str(entry["kind"]), str(entry["name"]), int(entry["attempt"]))
            if "sha256" not in entry and "started" not in entry:
                raise KeyError
        except (ValueError, KeyError, TypeError):
            unreadable.append(number)
            continue
        if attempts.get(key) is None:
            attempts[key] = entry.get("sha256")
    return Journal(attempts=attempts, unreadable=tuple(unreadable))


def note_begun(campaign: Path, key: Key, started: str) -> None:
    _add(campaign, key, {"started": started})


def note_closed(campaign: Path, key: Key, sha256: str) -> None:
    """``sha256``: of its cell.json."""
    _add(campaign, key, {"sha256": sha256})


def _add(campaign: Path, key: Key, facts: Mapping[str, str]) -> None:
    kind, name, attempt = key
    line = json.dumps({"kind": kind, "name": name, "attempt": attempt, **facts}) + "\n"
    with (campaign / FILE).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a line that was cut short stays one of its own
                line = f"\n{line}"
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
