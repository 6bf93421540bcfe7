"""Prints verdicts: plain text for a terminal, Markdown, JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.observe.lineage import write_atomically
from stretto.parity.verdict import Distance, Row, RunName, Value, Verdict

WIDTH = 120
HEADINGS = ("quantity", "required", "status", "differ", "largest", "control pair")


def summary(verdict: Verdict) -> str:
    """One line: the verdict, and the first divergence where there is one."""
    counts = {status: [row for row in verdict.rows if row.status == status] for status in ("differs", "absent")}
    if verdict.failed:
        said = ", ".join(f"{len(rows)} {status}" for status, rows in counts.items() if rows)
        said = f"failed: of {len(verdict.rows)} rows {said}"
        if verdict.undecidable:
            said += f", {len(verdict.undecidable)} undecidable"
    elif verdict.undecidable:
        said = f"undecidable: {len(verdict.undecidable)} of {len(verdict.rows)} rows, where the control pair "
        said += "differs, or numbers may differ and do so by more than in it"
    else:
        exact = sum(row.status == "exact" for row in verdict.rows)
        said = f"passed: {exact} of {len(verdict.rows)} rows exact"
        said += ", the others as required" if exact < len(verdict.rows) else ""
    first = verdict.first
    if first is None:
        return said
    word = "absent" if first.status == "absent" else "difference" if verdict.exit_code == 0 else "divergence"
    return f"{said}; first {word}: {explain(first)}"


def explain(row: Row) -> str:
    """One line: what differs first, where, both values and by how much."""
    if row.first is None:
        return f"{row.quantity}: {row.note or 'no difference'}"
    first = row.first
    where = [f"update {first.update}", first.phase]
    if first.parameter is not None:
        where.append(f"tensor {first.parameter}")
    if first.sample is not None:
        where.append(f"sample {first.sample} (group {first.group})")
    if first.token is not None:
        where.append(f"token {first.token}")
    if first.place is not None and first.place != first.a:
        where.append(first.place)
    said = f"{row.quantity}: {', '.join(where)}: {_value(first.a)} against {_value(first.b)}"
    if first.magnitude is not None and math.isfinite(first.magnitude):
        said += f", {row.distance.unit} {first.magnitude:.6g}"
    if first.note:
        said += f" ({first.note})"
    free = row.later is not None and (row.status == "distance" or not row.distance.differing)
    decided = row.later if free and row.later is not None else row.distance
    if row.note:
        said += f" ({row.note})"
    return f"{said}; {decided.differing:,} of {decided.compared:,} differ"


def _value(value: Value) -> str:
    return "none" if value is None else value if isinstance(value, str) else repr(value)


def text(verdict: Verdict) -> str:
    """First divergence, table and explanations of rows that are not exact; no line is over ``WIDTH`` columns, unless a
    path or a tensor's name is.
    """
    lines = [*wrapped(summary(verdict), ""), ""]
    lines += [line for name, value in _facts(verdict) for line in wrapped(f"{name:<10}{value}", " " * 10)]
    lines += ["", *_aligned([HEADINGS, *(_cells(row) for row in verdict.rows)])]
    told = [row for row in verdict.rows if row.status != "exact" or row.note]
    if told:
        lines += ["", *(line for row in told for line in wrapped(explain(row), "  "))]
    return "\n".join(lines)


def wrapped(line: str, indent: str) -> list[str]:
    """Lines of at most ``WIDTH`` columns, unless a word is longer; those after the first are indented."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _facts(verdict: Verdict) -> list[tuple[str, str]]:
    topology = ", ".join(f"{name} {a} against {b}" for name, (a, b) in verdict.topology.items())
    facts = [("a", _run(verdict.a)), ("b", _run(verdict.b))]
    facts += [("control", _run(verdict.control) if verdict.control else "none: nothing says what two runs of a share")]
    facts += [("updates", f"{verdict.updates}"), ("topology", topology or "the same")]
    return facts + [("note", note) for note in verdict.notes]


def _run(run: RunName) -> str:
    return f"{run.condition}, {'replay' if run.replay else 'live'}: {run.path}"


def _cells(row: Row) -> tuple[str, ...]:
    control = "-" if row.control is None else _far(row.control, f"{row.control.differing:,}")
    distance = row.distance
    differ = f"{distance.differing:,} of {distance.compared:,}"
    largest = _largest(distance)
    if row.later is not None:
        differ += f"; {row.later.differing:,} of {row.later.compared:,}"
        largest = f"{largest}; {_largest(row.later)}" if distance.unit else largest
    if row.status == "absent":
        differ, largest, control = "-", "-", "-"
    return (row.quantity, row.required, row.status, differ, largest, control)


def _far(distance: Distance, count: str) -> str:
    return f"{count}, {distance.largest:.3g}" if distance.largest else count


def _largest(distance: Distance) -> str:
    if distance.largest is None:
        return "-"
    return f"{distance.largest:.4g} {distance.unit}" if distance.largest else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown(verdict: Verdict, level: int = 1) -> str:
    """The same for a report; ``level`` of its heading."""
    title = f"{'#' * level} Parity: {verdict.a.condition} against {verdict.b.condition}"
    facts = [f"- {name}: {_escaped(value)}" for name, value in _facts(verdict)]
    rows = [HEADINGS, *(_cells(row) for row in verdict.rows)]
    table = ["| " + " | ".join(map(_escaped, row)) + " |" for row in rows]
    table.insert(1, "|" + "---|" * len(HEADINGS))
    told = [f"- {_escaped(explain(row))}" for row in verdict.rows if row.status != "exact" or row.note]
    parts = [[title], [_escaped(summary(verdict))], facts, table, told]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;")


def json_text(verdict: Verdict) -> str:
    """``Verdict.plain`` as strict JSON; what is not finite is text."""
    return json.dumps(strict(verdict.plain()), indent=1, allow_nan=False) + "\n"


def strict(value: Any) -> Any:
    """Plain data for strict JSON: what is not finite is text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def write(verdict: Verdict, out: Path) -> None:
    """``parity.json`` and ``parity.md`` in folder ``out``, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "parity.json", json_text(verdict).encode())
    write_atomically(out / "parity.md", markdown(verdict).encode())
