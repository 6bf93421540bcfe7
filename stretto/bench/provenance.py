"""Where and by what the cells of a campaign were run, and what a reader should know about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stretto.bench.design import Design
from stretto.bench.measures import Accepted
from stretto.bench.plan import Plan
from stretto.bench.results import CellResult
from stretto.bench.standing import Standing

BUSY_CORES = 0.3
"""Cores in use by others from which a reader is warned."""


def provenance(plan: Plan, planned: Design, standing: Mapping[str, Standing]) -> dict[str, Any]:
    """Of the first cell that was accepted, or read; machines and boots of every block."""
    reads = [each.read for each in standing.values() if each.accepted] or [each.read for each in standing.values()]
    session = next((read.session for read in reads if read.session), {})
    names = ("git", "versions", "platform", "environment", "hardware", "model", "data", "determinism", "config")
    notes = {name: note for name, each in standing.items() if (note := each.read.attempt.note) is not None}
    return {
        "plan_sha256": plan.sha256,
        "recipe": plan.recipe,
        "recipe_sha256": plan.recipe_sha256,
        "began": min((note.started for note in notes.values()), default=None),
        "ended": max((note.ended for note in notes.values()), default=None),
        "order": [list(block.order) for block in planned.blocks],
        "blocks": [
            {"block": block.index, "seed": block.seed, "machine_id": machine, "boot_id": boot}
            for block in planned.blocks
            for machine, boot in places(each for each in standing.values() if each.cell.block == block.index)
        ],
        "commands": {
            name: list(each.read.attempt.note.command) for name, each in standing.items() if each.read.attempt.note
        },
        **{name: session.get(name) for name in names},
    }


def places(cells: Iterable[Standing]) -> list[tuple[Any, Any]]:
    """Machines and boots of the accepted ones."""
    sessions = [each.read.session for each in cells if each.accepted]
    return list(dict.fromkeys((session.get("machine_id"), session.get("boot_id")) for session in sessions))


def warnings(
    plan: Plan,
    planned: Design,
    accepted: Accepted,
    standing: Mapping[str, Standing],
    cells: Sequence[CellResult],
) -> Iterator[str]:
    """What a reader should know."""
    missing = [cell.name for cell in planned.cells if cell.name not in standing]
    if missing:
        yield f"{len(missing)} of {len(planned.cells)} planned cells were not run: {', '.join(missing)}"
    if not planned.complete:
        yield (
            f"the square of orders is incomplete: {len(planned.blocks)} blocks of a period of {planned.period}, so "
            "that a drift, or what follows a slow neighbour, may favour a condition"
        )
    for status in ("rejected", "excluded"):
        found = [cell.name for cell in cells if cell.status == status]
        if found:
            yield f"{len(found)} {'attempt' if len(found) == 1 else 'attempts'} {status}: {', '.join(found)}"
    for block in planned.blocks:
        if not accepted.base(block) and any(cell.name in standing for cell in block.cells):
            yield f"block {block.index} has no baseline, since not all its B were accepted: nothing over B counts it"
    ran = places(standing.values())
    if len(ran) > 1:
        yield f"the blocks ran in {len(ran)} boots, on {len({machine for machine, _ in ran})} machines"
    if plan.order == "pairs":
        yield "a design of pairs has no A/A: nothing says how far two runs of one condition are apart"
    for name, each in standing.items():
        note, hardware = each.read.attempt.note, each.read.hardware
        if note is not None and note.others_before > BUSY_CORES:
            yield f"{name}: others used {note.others_before:.2g} cores just before it"
        if each.accepted and hardware is not None and hardware.other_cores > BUSY_CORES:
            yield f"{name}: others used {hardware.other_cores:.2g} cores on average in its windows"
        if each.accepted and hardware is None:
            yield f"{name}: hardware is not measured"
        for letter, found_evidence in each.read.evidence.items():
            if each.accepted and not found_evidence.opportunity:
                yield f"{name}: switch {letter} had nothing to do: {'; '.join(found_evidence.facts)}"
    if any(each.accepted and each.read.session.get("git") is None for each in standing.values()):
        yield "no commit is known: Stretto is installed, not a checkout"
