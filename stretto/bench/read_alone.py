"""Reads the runs of one stage with the others idle."""

from __future__ import annotations

import json
import math
from pathlib import Path

from stretto.bench.campaign import Attempt, attempts, file_hash
from stretto.bench.plan import Plan
from stretto.bench.read_cells import Read, read_cell
from stretto.bench.rejections import elsewhere_reasons
from stretto.bench.results import Alone

FILE = "run/alone.json"


def read_alone(folder: Path, plan: Plan, beside: Read | None) -> tuple[tuple[Alone, ...], tuple[str, ...]]:
    """The last attempt at each stage, and a line on each that does not count.

    beside  the first accepted cell of block 0, in whose machine, boot and checkout they run; None: there is none
    """
    last = {attempt.name: attempt for attempt in sorted(attempts(folder, "alone"), key=lambda each: each.number)}
    found, told = [], []
    for name, attempt in sorted(last.items()):
        try:
            found.append(_read(attempt, plan, beside))
        except (OSError, ValueError, LookupError, TypeError) as error:
            told.append(f"{name} alone does not count: {error}")
    return tuple(found), tuple(told)


def _read(attempt: Attempt, plan: Plan, beside: Read | None) -> Alone:
    """Raises ValueError, LookupError, TypeError or OSError where it does not count, or cannot be read."""
    note = attempt.note
    if note is None:
        raise ValueError("it was interrupted together with its runner")
    if note.status != "finished" or note.exit_code != 0:
        raise ValueError(f"{note.status} with exit code {note.exit_code}: {note.reason or 'no reason is noted'}")
    if note.plan != plan.sha256:
        raise ValueError(f"it ran under plan {note.plan}, and that of the folder is {plan.sha256}")
    if note.stage == "":
        raise ValueError("its note names no stage")
    if FILE not in note.files:
        raise ValueError(f"cell.json has no hash of {FILE}")
    for name, expected in note.files.items():
        if (now := file_hash(attempt.path / name)) != expected:
            raise ValueError(f"{name} has SHA-256 {now}, and had {expected} when it ended")
    if beside is None:
        raise ValueError("no cell of block 0 was accepted, beside which it ran")
    if reasons := elsewhere_reasons(read_cell(attempt, plan), beside):
        raise ValueError("; ".join(reasons))
    seconds = tuple(float(value) for value in json.loads((attempt.path / FILE).read_text())["seconds"])
    if not seconds or not all(math.isfinite(value) and value > 0 for value in seconds):
        raise ValueError(f"{FILE} has no seconds, or some that are not above 0")
    mean = math.fsum(seconds) / len(seconds)
    return Alone(stage=note.stage, condition=note.condition, seconds=mean, updates=len(seconds), per_update=seconds)
