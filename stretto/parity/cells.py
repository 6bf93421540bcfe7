"""Runs the cells of a check one after another, each in a process of its own, and keeps those that are finished."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stretto
from stretto import child
from stretto.child import PROGRAM, count_lines, last_lines, run_logged
from stretto.observe.hardware import hardware
from stretto.observe.lineage import write_atomically
from stretto.observe.manifest import ENVIRONMENT, read_manifest, versions
from stretto.observe.progress import duration
from stretto.parity.plan import REPORT_FILES, Cell
from stretto.resume import refuse_if_locked
from stretto.types import StrettoError

Note = Callable[[str], None]
NEWS_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished cell: its seconds, and whether it was there already."""

    cell: Cell
    wall_s: float
    kept: bool


class Cells:
    """The runs of one check, in one folder.

    A cell that is finished is kept as long as its ``identity`` is the same: its command, options, what it reads
    (``inputs.py``), code, libraries and machine, and (of a replay) the recording; and as long as what others read of
    it, a recording or a dump, is there. Any other run of it is removed and made again.
    """

    def __init__(
        self, out: Path, recording: Path, asked: Mapping[str, Any], note: Note, program: Sequence[str] = PROGRAM
    ):
        self.out, self.recording, self.note, self.program = out, recording, note, program
        self._told_s = time.monotonic()
        self._asked = {**asked, "code": code_hash(), "versions": versions(), "machine": arithmetic()}

    def run(self, cells: Sequence[Cell]) -> list[Done]:
        """Run what is not there yet, in order.

        Raises:
            StrettoError: one of them fails; says what it said last, and where all of it is.
        """
        done: list[Done] = []
        for number, cell in enumerate(cells, start=1):
            wall_s = self._finished(cell)
            kept = wall_s is not None
            if wall_s is None:
                self.note(f"{number}/{len(cells)} {cell.name} ...")
                wall_s = self._run(cell)
            done.append(Done(cell=cell, wall_s=wall_s, kept=kept))
            left = left_s(done, cells[number:])
            self.note(
                f"{number}/{len(cells)} {cell.name}: {'kept, it took' if kept else 'took'} {duration(wall_s)}"
                + (f"; about {duration(left)} left" if number < len(cells) and not kept else "")
            )
        return done

    def _finished(self, cell: Cell) -> float | None:
        """Seconds that it took; None: it is to run."""
        note = self._read_note(cell.file_name)
        try:
            whole = read_manifest(cell.run_dir)["sessions"][-1]["status"] == "finished"
        except (LookupError, StrettoError):
            return None
        same = note.get("identity") == self._identity(cell) and note.get("left") == self._left(cell)
        return float(note["wall_s"]) if whole and same else None

    def forget_report(self) -> None:
        """Remove what an earlier check says: it is of other runs, and stays where this one does not come to its end."""
        for name in REPORT_FILES:
            (self.out / name).unlink(missing_ok=True)

    def _run(self, cell: Cell) -> float:
        self._clear(cell)
        self.forget_report()
        begun = time.monotonic()
        again = f"alone it runs by: {cell.command}"
        self._process(cell.name, cell.file_name, [*self.program, *cell.words], again, lambda: self._news(cell))
        wall_s = round(time.monotonic() - begun, 3)
        note = {"identity": self._identity(cell), "wall_s": wall_s, "command": cell.command, "left": self._left(cell)}
        self._write_note(cell.file_name, note)
        return wall_s

    def made(self, path: Path, module: str) -> None:
        """``path``, as ``python -m module RECORDING PATH`` makes it of the recording, unless it is there already.

        Raises:
            StrettoError: that fails.
        """
        identity = {"identity": self._hash({"module": module, "recording": self._recorded()})}
        if path.is_file() and self._read_note(path.stem) == identity:
            return
        command = [sys.executable, "-m", module, str(self.recording), str(path)]
        self._process(module, path.stem, command, f"alone it runs by: {shlex.join(command)}", lambda: None)
        self._write_note(path.stem, identity)

    def _process(self, name: str, log_name: str, command: Sequence[str], again: str, news: Callable[[], None]) -> None:
        log = self.out / "logs" / f"{log_name}.log"
        if exit_code := run_logged(command, log, each=news):
            raise StrettoError(
                f"{name} ended with exit code {exit_code}; the end of {log}:\n{last_lines(log)}\n{again}\n"
                "the runs before it are kept: the same command goes on from here"
            )

    def _news(self, cell: Cell) -> None:
        """A line now and then of how far a run is."""
        if time.monotonic() - self._told_s < NEWS_EVERY_S:
            return
        self._told_s = time.monotonic()
        if lines := count_lines(cell.run_dir / "metrics.jsonl"):
            self.note(f"    {lines} of {cell.partitions} partitions trained")

    def _clear(self, cell: Cell) -> None:
        """Remove what an earlier run of the cell has left.

        Raises:
            StrettoError: that run is still going, as one does whose check was killed.
        """
        refuse_if_locked(cell.run_dir)
        self._note_path(cell.file_name).unlink(missing_ok=True)
        for folder in (cell.run_dir, *([self.recording] if "record" in cell.words else [])):
            if folder.exists():
                shutil.rmtree(folder)

    def _note_path(self, name: str) -> Path:
        return self.out / "cells" / f"{name}.json"

    def _read_note(self, name: str) -> dict[str, Any]:
        """Empty where there is none that can be read."""
        try:
            note = json.loads(self._note_path(name).read_text())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _write_note(self, name: str, note: Mapping[str, Any]) -> None:
        path = self._note_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(note, indent=1) + "\n").encode())

    def _identity(self, cell: Cell) -> str:
        return self._hash({"command": cell.words, "recording": self._recorded() if cell.replay else ""})

    def _left(self, cell: Cell) -> str:
        """Hash of the recording and the names and sizes of all files that others need of a cell; empty: they need
        none.
        """
        recording, dump = "record" in cell.words, "--dump" in cell.words
        folders = [self.recording] * recording + [cell.run_dir / "dump"] * dump
        if not folders:
            return ""
        files = sorted((str(p), p.stat().st_size) for folder in folders for p in folder.rglob("*") if p.is_file())
        facts = {"recording": self._recorded() if recording else "", "files": files}
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _hash(self, facts: Mapping[str, Any]) -> str:
        text = json.dumps({"asked": self._asked, **facts}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _recorded(self) -> str:
        """Hash of what the recording says of itself; empty where there is none."""
        path = self.recording / "record.json"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def left_s(done: Sequence[Done], todo: Sequence[Cell]) -> float:
    """Seconds that ``todo`` will take: as long as the median cell of its group, or of all where its group has none."""
    return child.left_s([(each.cell.group, each.wall_s) for each in done], [cell.group for cell in todo])


def code_hash() -> str:
    """Of every source file of the package: runs of other code are none of this check."""
    package = Path(stretto.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def arithmetic() -> dict[str, Any]:
    """What of this machine and its environment changes last bits: processors, and how many threads use them."""
    found = hardware()
    return {
        "cpu": found["cpu"],
        "cores": found["cores_usable"],
        "gpus": [(gpu["name"], gpu["driver"]) for gpu in found["gpus"]],
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }
