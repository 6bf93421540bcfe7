"""Where and by what the cells of a campaign were run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stretto.bench.design import Design
from stretto.bench.plan import Plan
from stretto.bench.standing import Standing


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
