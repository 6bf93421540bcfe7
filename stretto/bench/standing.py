"""Which attempts of a campaign count, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stretto.bench.campaign import Attempt, attempts
from stretto.bench.design import Cell, Design, design
from stretto.bench.measures import throughput, workload
from stretto.bench.plan import Plan
from stretto.bench.read_cells import Read, read_cell
from stretto.bench.rejections import block_reasons, own_reasons, unlike_reasons
from stretto.bench.results import CellResult

Status = Literal["accepted", "rejected", "excluded"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The last attempt at a planned cell, read.

    reasons   why it is not accepted
    excluded  it did not come to its end, well or not
    """

    cell: Cell
    read: Read
    reasons: tuple[str, ...]
    excluded: bool

    @property
    def accepted(self) -> bool:
        return not self.reasons


def stand(plan: Plan, planned: Design, found: Sequence[Attempt]) -> dict[str, Standing]:
    """Planned cell -> its last attempt, whatever became of it: nobody chooses among attempts.

    The reference of all cells is the first one, in the order of the plan, that breaks no rule of its own; that of a
    block is the block's first of these. Where there is none, cells are compared with the first that can be read.
    """
    last = {attempt.name: attempt for attempt in sorted(found, key=lambda each: each.number)}
    cells = {cell.name: cell for cell in planned.cells if cell.name in last}
    reads = {name: read_cell(last[name], plan) for name in cells}
    ended = {name: _unended(reads[name].attempt) for name in cells}
    own: dict[str, list[str]] = {}
    for name, cell in cells.items():
        note = reads[name].attempt.note
        own[name] = [ended[name]] if ended[name] or note is None else own_reasons(reads[name], note, cell, plan)
    whole = [name for name in cells if not ended[name] and reads[name].config is not None]
    standing = {}
    for name, cell in cells.items():
        reasons = list(own[name])
        if name in whole:
            in_block = [other for other in whole if cells[other].block == cell.block]
            reference, first = _reference(whole, own), _reference(in_block, own)
            conditions = (cell.condition, cells[reference].condition)
            reasons += unlike_reasons(reads[name], reads[reference], plan, conditions)
            reasons += block_reasons(reads[name], reads[first])
        standing[name] = Standing(cell=cell, read=reads[name], reasons=tuple(reasons), excluded=bool(ended[name]))
    return standing


def quick(folder: Path, plan: Plan, attempt: Attempt) -> tuple[str, ...]:
    """What an analysis would reject an attempt for that has just ended, as far as that is known then: its own reasons,
    and in what it differs from the first cell of the plan that has finished. Each begins with its kind and a colon.
    """
    cells = design(plan.conditions, plan.seeds, plan.repetitions, plan.order).cells
    cell = next((cell for cell in cells if cell.name == attempt.name), None)
    if cell is None or attempt.note is None:
        return (f"cell: {attempt.name} is none of the plan" if cell is None else _unended(attempt),)
    read = read_cell(attempt, plan)
    reasons = own_reasons(read, attempt.note, cell, plan)
    last = {other.name: other for other in attempts(folder)}
    ended = {name for name, other in last.items() if other.note is not None and other.note.status == "finished"}
    first = next((cell for cell in cells if cell.name in ended), cell)
    if first != cell and read.config is not None:
        reasons += unlike_reasons(read, read_cell(last[first.name], plan), plan, (cell.condition, first.condition))
    return tuple(reasons)


def _reference(names: Sequence[str], own: Mapping[str, Sequence[str]]) -> str:
    return next((name for name in names if not own[name]), names[0])


def _unended(attempt: Attempt) -> str:
    """Why an attempt did not come to its end; empty: it did, well or not."""
    if attempt.note is None:
        return "interrupted together with its runner: it has no cell.json"
    if attempt.note.status == "interrupted":
        return f"interrupted: {attempt.note.reason or 'no reason is noted'}"
    return ""


def cell_results(
    folder: Path, plan: Plan, found: Sequence[Attempt], standing: Mapping[str, Standing]
) -> Iterator[CellResult]:
    """Of every attempt, those that do not count too."""
    for attempt in found:
        stands = standing.get(attempt.name)
        if stands is not None and stands.read.attempt == attempt:
            status: Status = "accepted" if stands.accepted else "excluded" if stands.excluded else "rejected"
            yield _result(folder, plan, stands.read, stands.cell, status, stands.reasons)
            continue
        read = read_cell(attempt, plan)
        reasons = [_unended(attempt) or _failed_note(attempt)]
        if stands is None:
            cell = _cell_of(attempt)
            reasons.append(f"cell: {attempt.name} is none of the plan")
            yield _result(folder, plan, read, cell, "rejected", tuple(filter(None, reasons)))
        else:
            reasons.append(f"attempt {stands.read.attempt.number} stands in its place")
            failed = attempt.note is not None and attempt.note.status == "failed"
            superseded: Status = "rejected" if failed else "excluded"
            yield _result(folder, plan, read, stands.cell, superseded, tuple(filter(None, reasons)))


def _failed_note(attempt: Attempt) -> str:
    note = attempt.note
    if note is None or note.status == "finished":
        return ""
    return f"{note.status} with exit code {note.exit_code}: {note.reason or 'no reason is noted'}"


def _cell_of(attempt: Attempt) -> Cell:
    """By its note, or as far as its name says it."""
    if attempt.note is None:
        return Cell(block=-1, position=-1, condition=attempt.name, seed=-1)
    note = attempt.note
    return Cell(block=note.block, position=note.position, condition=note.condition, seed=note.seed)


def _result(folder: Path, plan: Plan, read: Read, cell: Cell, status: Status, reasons: tuple[str, ...]) -> CellResult:
    accepted = status == "accepted"
    names = dict.fromkeys(name for row in read.rows for name in row)
    return CellResult(
        name=read.name,
        condition=cell.condition,
        seed=cell.seed,
        block=cell.block,
        position=cell.position,
        attempt=read.attempt.number,
        folder=str(read.attempt.path.relative_to(folder)),
        status=status,
        reasons=reasons,
        steps={name: read.series(name) for name in names if any(value is not None for value in read.series(name))},
        throughput=throughput(read, plan.measured) if accepted else None,
        phases=read.phases if accepted else {},
        busy=read.busy if accepted else {},
        workload=workload(read, plan.measured) if accepted else {},
        hardware=read.hardware if accepted else None,
        engaged=tuple(f"{letter}: {'; '.join(found.facts)}" for letter, found in read.evidence.items()),
    )
