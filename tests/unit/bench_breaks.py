"""Ways to break one thing of a campaign folder that ``bench_folder`` has made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_folder import ANALYSED, write_lines

from stretto.bench.campaign import file_hash


def edit_note(attempt: Path, **values: Any) -> None:
    path = attempt / "cell.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rehash(attempt: Path) -> None:
    """The note names the files as they are now, so that only what they say is broken."""
    edit_note(attempt, files={name: file_hash(attempt / name) for name in ANALYSED if (attempt / name).is_file()})


def edit_manifest(attempt: Path, dotted: str, value: Any) -> None:
    """Sets a key of the session, such as ``config.actor.lr``."""
    path = attempt / "run" / "manifest.json"
    data = json.loads(path.read_text())
    table = data["sessions"][-1]
    *parents, key = dotted.split(".")
    for parent in parents:
        table = table[parent]
    table[key] = value
    path.write_text(json.dumps(data))
    rehash(attempt)


def edit_metrics(attempt: Path, at: int, /, **values: Any) -> None:
    """Sets metrics of the update ``at``."""
    path = attempt / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[at] |= values
    write_lines(path, rows)
    rehash(attempt)


def edit_lines(attempt: Path, name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrites a file of JSON lines, named below the attempt."""
    path = attempt / name
    write_lines(path, change([json.loads(line) for line in path.read_text().splitlines()]))
    rehash(attempt)


def tree_hash(folder: Path) -> str:
    """Of names, bytes and times of everything in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mtime_ns} {path.stat().st_mode}\0".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
