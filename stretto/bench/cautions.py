"""What a reader should know of a campaign beside its verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from stretto import conditions, switches
from stretto.bench.campaign import BUSY_CORES, Attempt
from stretto.bench.design import Design
from stretto.bench.guardrails import Guardrail
from stretto.bench.measures import Accepted
from stretto.bench.plan import Plan
from stretto.bench.provenance import places
from stretto.bench.results import CellResult
from stretto.bench.standing import Standing


def of_cells(
    plan: Plan,
    planned: Design,
    accepted: Accepted,
    standing: Mapping[str, Standing],
    cells: Sequence[CellResult],
) -> Iterator[str]:
    """On cells that are not there or do not count, on their order, and on where they ran."""
    missing = [cell.name for cell in planned.cells if cell.name not in standing]
    if missing:
        yield f"{len(missing)} of {len(planned.cells)} planned cells were not run: {', '.join(missing)}"
    if not planned.complete:
        yield (
            f"the square of orders is incomplete: {len(planned.blocks)} blocks of a period of {planned.period}, so "
            "that a drift, or what follows a slow neighbour, may favour a condition"
        )
    for name, overtaken in late(planned, standing).items():
        yield (
            f"{name} ran after {', '.join(overtaken)}, before which it stands in its block: a drift may favour a "
            "condition, and the square of orders is not the planned one"
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
        yield from _of_cell(name, each)
    if any(each.accepted and each.read.session.get("git") is None for each in standing.values()):
        yield "no commit is known: Stretto is installed, not a checkout"


def late(planned: Design, standing: Mapping[str, Standing]) -> dict[str, list[str]]:
    """Cell -> the cells behind it in its block that started before it. A retry runs late, and may; so does whatever
    was taken out of its order.
    """
    started = {name: note.started for name, each in standing.items() if (note := each.read.attempt.note) is not None}
    found = {}
    for block in planned.blocks:
        names = [cell.name for cell in block.cells if cell.name in started]
        for at, name in enumerate(names):
            if overtaken := [other for other in names[at + 1 :] if started[other] < started[name]]:
                found[name] = overtaken
    return found


def of_attempts(plan: Plan, found: Sequence[Attempt], removed: tuple[str, ...] | None) -> Iterator[str]:
    """On attempts that failed, and on those that are not as the journal has them (``removed``; None: there is none)."""
    for condition in plan.conditions:
        statuses = [attempt.note.status for attempt in found if attempt.note and attempt.note.condition == condition]
        if failed := statuses.count("failed"):
            yield f"{condition} failed in {failed} of {len(statuses)} attempts"
    if removed is None:
        yield "the campaign has no journal: nothing says whether an attempt was removed from it"
    elif removed:
        yield f"the folders are not as the campaign's journal has them: {'; '.join(removed)}"


def of_plan(plan: Plan, accepted: Accepted) -> Iterator[str]:
    """On what a plan measures, and by which bounds."""
    windows = sorted(plan.measured, key=lambda window: window.first)
    if any(before.last + 1 < after.first for before, after in pairwise(windows)):
        yield f"the windows {', '.join(map(str, windows))} leave out updates between them"
    ends = [(len(read.rows), read.config.staleness.max) for read in accepted.reads.values() if read.config is not None]
    updates, ahead = min((end for end, _ in ends), default=0), max((bound for _, bound in ends), default=0)
    for window in windows:
        if ends and window.last >= updates - ahead:
            yield (
                f"window {window} holds some of the last {ahead} of {updates} updates, beside which nothing is left to "
                f"generate (staleness.max = {ahead}): they are not like the ones before"
            )
    yield from (f"guardrail {text}" for text in plan.guardrails.looser())
    yield from _of_pools(accepted)


def _of_pools(accepted: Accepted) -> Iterator[str]:
    """On conditions whose processor pool had too few cores: P is then judged at the expense of actor and rollout."""
    told: dict[str, list[str]] = {}
    for read in accepted.reads.values():
        cores = read.session.get("hardware", {}).get("cores_usable")
        if read.config is not None and cores is not None and (text := conditions.crowded(read.config, cores)):
            told.setdefault(text, []).append(switches.condition(read.config))
    for text, found in told.items():
        yield f"{', '.join(dict.fromkeys(found))}: {text}"


def of_guardrails(guardrails: Mapping[str, Sequence[Guardrail]]) -> Iterator[str]:
    """On those of each condition that nobody could check: they are no pass."""
    for condition, rows in guardrails.items():
        if not rows:
            yield f"{condition}: no guardrail is measured, since no block has it beside its B"
        for row in rows:
            if row.status == "not measured":
                yield f"{condition}: guardrail {row.name} is not measured: {row.told}"


def _of_cell(name: str, each: Standing) -> Iterator[str]:
    note, hardware = each.read.attempt.note, each.read.hardware
    if note is not None and note.others_before > BUSY_CORES:
        yield f"{name}: others used {note.others_before:.2g} cores just before it"
    if not each.accepted:
        return
    if hardware is None:
        yield f"{name}: hardware is not measured"
    elif hardware.other_cores > BUSY_CORES:
        yield f"{name}: others used {hardware.other_cores:.2g} cores on average in its windows"
    for letter, found in each.read.evidence.items():
        if not found.opportunity:
            yield f"{name}: switch {letter} had nothing to do: {'; '.join(found.facts)}"
