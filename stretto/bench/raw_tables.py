"""The numbers behind a report, as CSV: every step of every attempt, every attempt, every stage alone. Empty: not
measured.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.bench.campaign import Attempt
from stretto.bench.results import Analysis, CellResult

FIRST_METRICS = ("tokens", "step_s")
"""What throughput is made of stands first."""
HASHED = {"manifest": "manifest.json", "metrics": "metrics.jsonl", "events": "events.jsonl"}
"""What names the files of a run that figures come from, so that a table beside them can be held against them."""
STEP_KEYS = ("cell", "attempt", "condition", "seed", "block", "position", "status", "update", "warmup", "measured")


def steps_csv(analysis: Analysis) -> str:
    """One row an attempt and update. ``warmup`` and ``measured`` are 1 or 0: the update is in the warm-up, in a window.

    Numbers have all their digits. The throughput of a cell is sum(tokens) / sum(step_s) over its measured rows.
    """
    measured = {update for window in analysis.plan.measured for update in range(window.first, window.last + 1)}
    found = sorted({metric for cell in analysis.cells for metric in cell.steps} - set(FIRST_METRICS))
    metrics = [*FIRST_METRICS, *found]
    rows: list[Sequence[Any]] = [(*STEP_KEYS, *metrics)]
    for cell in analysis.cells:
        for update in range(max(map(len, cell.steps.values()), default=0)):
            values = [_at(cell.steps.get(metric, ()), update) for metric in metrics]
            which = (update, int(update < analysis.plan.warmup), int(update in measured))
            rows.append((*_identity(cell), *which, *values))
    return _text(rows)


def alone_csv(analysis: Analysis) -> str:
    """One row a stage with the others idle, and measured update of it. The mean of its seconds is the limit of the
    stage; a stage whose single updates are not recorded has one row with that mean, and no ``update``.
    """
    rows: list[Sequence[Any]] = [("stage", "condition", "update", "seconds")]
    for each in analysis.alone:
        rows += [(each.stage, each.condition, update, seconds) for update, seconds in enumerate(each.per_update)]
        if not each.per_update:
            rows.append((each.stage, each.condition, None, each.seconds))
    return _text(rows)


def runs_csv(analysis: Analysis, attempts: Iterable[Attempt]) -> str:
    """One row an attempt: what became of it, its throughput, means over its windows, and how it was run."""
    notes = {(attempt.name, attempt.number): attempt.note for attempt in attempts}
    rows = []
    for cell in analysis.cells:
        note = notes.get((cell.name, cell.attempt))
        row: dict[str, Any] = dict(zip(STEP_KEYS, _identity(cell), strict=False))
        row["reasons"] = "; ".join(cell.reasons)
        if cell.throughput is not None:
            told = cell.throughput
            row |= {"window_tokens": told.tokens, "window_s": told.seconds, "window_updates": told.steps}
            row["tokens_per_s"] = told.per_s
        row |= {f"phase_s.{name}": value for name, value in cell.phases.items()}
        row |= {f"busy_s.{name}": value for name, value in cell.busy.items()}
        row |= {f"workload.{name}": value for name, value in cell.workload.items()}
        row |= _hardware(cell)
        row["engaged"] = "; ".join(cell.engaged)
        if note is not None:
            row |= {"started": note.started, "ended": note.ended, "wall_s": note.wall_s, "exit_code": note.exit_code}
            row |= {"machine_id": note.machine_id, "boot_id": note.boot_id, "others_before": note.others_before}
            row |= {f"{name}_sha256": note.files.get(f"run/{file}") for name, file in HASHED.items()}
            row["command"] = shlex.join(note.command)
        row["folder"] = cell.folder
        rows.append(row)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return _text([columns, *([row.get(column) for column in columns] for row in rows)])


def _hardware(cell: CellResult) -> dict[str, Any]:
    found = cell.hardware
    if found is None:
        return {}
    row: dict[str, Any] = {
        "own_cores": found.own_cores,
        "other_cores": found.other_cores,
        "steal_cores": found.steal_cores,
        "peak_rss_bytes": found.peak_rss_bytes,
        "hardware_samples": found.samples,
        "gpu_told": found.gpu_told,
    }
    for index, gpu in enumerate(found.gpus):
        told: Mapping[str, Any] = {
            "uuid": gpu.uuid,
            "utilisation_percent": gpu.utilisation_percent,
            "peak_memory_bytes": gpu.peak_memory_bytes,
            "power_w": gpu.power_w,
        }
        row |= {f"gpu{index}.{key}": value for key, value in told.items()}
    return row


def _identity(cell: CellResult) -> tuple[Any, ...]:
    return (cell.name, cell.attempt, cell.condition, cell.seed, cell.block, cell.position, cell.status)


def _at(values: Sequence[float | None], update: int) -> float | None:
    return values[update] if update < len(values) else None


def _text(rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([_plain(value) for value in row] for row in rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Of a float all digits (numpy's own ``repr`` names its type); one that is not finite is as good as none."""
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else ""
    return "" if value is None else value
