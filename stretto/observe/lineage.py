"""Files with one line, or one file, per update, which hold the surviving lineage of a run exactly once.

A run that resumes at update u trains the updates from u on again. What an earlier session had recorded about them
is undone work: it moves aside before the first new record is written, and is never deleted.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from stretto.types import StrettoError


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, whole. Processes and threads may write the same file at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class UpdateLines:
    """Appends strict-JSON lines with an ``update`` key to ``<stem>.jsonl``.

    Opening at ``first_update`` moves lines of that update and later ones to ``<stem>.undone.jsonl`` and drops a last
    line that a crash cut short. Raises StrettoError when a line in the middle is unreadable.
    """

    def __init__(self, path: Path, first_update: int = 0):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._move_undone(first_update)
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        """Raises ValueError for NaN or infinity: strict JSON has no word for them."""
        self._file.write((json.dumps(row, sort_keys=True, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()

    def _move_undone(self, first_update: int) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        kept: list[bytes] = []
        undone: list[bytes] = []
        for number, line in enumerate(whole.splitlines(keepends=True), 1):
            try:
                update = json.loads(line)["update"]
            except (ValueError, KeyError, TypeError):
                raise StrettoError(
                    f"{self.path}: line {number} is not a JSON object with an update; mend or remove the line"
                ) from None
            (kept if update < first_update else undone).append(line)
        if undone:
            aside = self.path.with_name(f"{self.path.stem}.undone.jsonl")
            with aside.open("ab") as file:
                file.writelines(undone)
                file.flush()
                os.fsync(file.fileno())
        if undone or whole != data:
            write_atomically(self.path, b"".join(kept))


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a file of ``UpdateLines``; a last line that is not finished is left out."""
    lines = Path(path).read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
