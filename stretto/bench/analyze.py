"""Finds what the cells of a campaign show. Reads the folder, and writes nothing: it may lie on another machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from stretto.bench import campaign, cautions
from stretto.bench.arithmetic import (
    LEVEL,
    BlockValues,
    Estimate,
    Judgement,
    aa_values,
    against_target,
    judge,
)
from stretto.bench.attribution import factorials, increments
from stretto.bench.campaign import attempts
from stretto.bench.design import Design, design
from stretto.bench.detectable import by_interval, by_rules
from stretto.bench.equality import equality
from stretto.bench.guardrails import Guardrail, PairedFacts, check_guardrails
from stretto.bench.measures import (
    Accepted,
    efficiency,
    facts,
    mean_steps,
    packing,
    phase_effects,
    throughput,
)
from stretto.bench.phases import timeline
from stretto.bench.plan import BASE, Plan
from stretto.bench.plan_file import read_kept_plan
from stretto.bench.provenance import provenance
from stretto.bench.read_alone import read_alone
from stretto.bench.read_cells import Read
from stretto.bench.resample import within_runs
from stretto.bench.results import Alone, Analysis, Efficiency, Timeline, Verdict
from stretto.bench.scope import Process, decide
from stretto.bench.standing import Standing, cell_results, stand
from stretto.observe.trace import read_events
from stretto.types import StrettoError


def analyze(folder: Path) -> Analysis:
    """Rejects cells, then measures and judges those that are left.

    Raises:
        ConfigError: the folder has no plan, or one that was changed.
        StrettoError: a note that cannot be read, or another file; says which.
    """
    try:
        return _analyze(folder)
    except OSError as error:
        raise StrettoError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from None


def _analyze(folder: Path) -> Analysis:
    plan = read_kept_plan(folder)
    planned = design(plan.conditions, plan.seeds, plan.repetitions, plan.order)
    found = attempts(folder)
    standing = stand(plan, planned, found)
    accepted = Accepted(planned.blocks, {name: each.read for name, each in standing.items() if each.accepted})
    values = throughputs(accepted, plan)
    guardrails = guarded(accepted, plan)
    failed = {condition: tuple(_failed(rows)) for condition, rows in guardrails.items()}
    idle = {condition: idle_switches(accepted.of(condition)) for condition in plan.conditions}
    judgements = judge(values, plan.primary_contrast, plan.other_contrasts, failed, idle)
    beside = next((each.read for each in standing.values() if each.accepted and each.cell.block == 0), None)
    alone, alone_told = read_alone(folder, plan, beside)
    removed = campaign.removed(folder, (*found, *attempts(folder, "alone")))
    step_s = mean_steps(accepted, plan.conditions, plan.measured)
    contrasts = (plan.primary_contrast, *plan.other_contrasts)
    cells = tuple(sorted(cell_results(folder, plan, found, standing), key=lambda cell: (cell.name, cell.attempt)))
    return Analysis(
        plan=plan,
        plan_sha256=plan.sha256,
        scope=decide(
            plan.measured,
            plan.warmup,
            processes(accepted, plan),
            conditions=plan.conditions,
            declared=declared(plan, standing),
        ),
        square_complete=square_complete(planned, accepted, standing),
        blocks_planned=len(planned.blocks),
        cells=cells,
        alone=alone,
        verdicts=tuple(verdict(judgement, values, accepted, plan) for judgement in judgements),
        aa=aa_values(values),
        step_s=step_s,
        phase_effects={str(each): phase_effects(accepted, each, plan.measured, plan.conditions) for each in contrasts},
        guardrails=guardrails,
        factorials=factorials(values),
        increments=increments(values),
        efficiency=tuple(efficiencies(plan, accepted, alone, step_s)),
        packing=packing(accepted, plan.conditions, plan.measured),
        timelines=tuple(timelines(accepted, plan)),
        equality=equality(accepted.by_block()),
        provenance=provenance(plan, planned, standing),
        warnings=(
            *cautions.of_cells(plan, planned, accepted, standing, cells),
            *cautions.of_attempts(plan, found, removed),
            *cautions.of_plan(plan, accepted),
            *cautions.of_guardrails(guardrails),
            *alone_told,
        ),
        removed=removed or (),
    )


def square_complete(planned: Design, accepted: Accepted, standing: Mapping[str, Standing]) -> bool:
    """Whether every condition stood in every place, as the cells ran."""
    ran = all(cell.name in accepted.reads for cell in planned.cells)
    return planned.complete and ran and not cautions.late(planned, standing)


def declared(plan: Plan, standing: Mapping[str, Standing]) -> bool:
    """Whether every cell ran under the plan as it is now."""
    notes = [each.read.attempt.note for each in standing.values()]
    return all(note is None or note.plan == plan.sha256 for note in notes)


def processes(accepted: Accepted, plan: Plan) -> list[Process]:
    """What counts for the scope: a B of a block without a baseline is in no comparison, and does not."""
    return [
        Process(condition, block.index, block.seed, len(read.rows))
        for block in accepted.blocks
        for condition in plan.conditions
        for read in accepted.runs(block, condition)
    ]


# What they show ------------------------------------------------------------------------------------------------------


def throughputs(accepted: Accepted, plan: Plan) -> tuple[BlockValues, ...]:
    """Tokens per second of every block."""
    by_cell = {name: throughput(read, plan.measured).per_s for name, read in accepted.reads.items()}
    return accepted.values(by_cell, plan.conditions)


def verdict(judgement: Judgement, values: Sequence[BlockValues], accepted: Accepted, plan: Plan) -> Verdict:
    found, contrast = judgement.estimate, judgement.contrast
    pairs = accepted.paired_steps(contrast, plan.measured)
    aimed = plan.targets_percent.get(contrast.treated) if contrast.base == BASE else None
    return Verdict(
        judgement=judgement,
        within_runs=within_runs(pairs, plan.measured) if pairs else None,
        detectable=detectable(judgement, values, 1 if judgement.primary else len(plan.other_contrasts)),
        target=None if aimed is None or found is None else (aimed, against(judgement, found, aimed)),
    )


def against(judgement: Judgement, found: Estimate, aimed: float) -> Literal["reached", "missed", "open"]:
    """A gain that is not supported reaches nothing."""
    told = against_target(found, aimed)
    return "open" if told == "reached" and judgement.finding != "supported" else told


def idle_switches(reads: Sequence[Read]) -> tuple[str, ...]:
    """Those of a condition that had nothing to do in any of its cells."""
    evidence = [read.evidence for read in reads]
    letters = dict.fromkeys(letter for each in evidence for letter in each)
    return tuple(
        letter for letter in letters if not any(each[letter].opportunity for each in evidence if letter in each)
    )


def detectable(judgement: Judgement, values: Sequence[BlockValues], contrasts: int) -> float | None:
    """The smallest effect, in logs, that is found with 80 % power where blocks scatter as they did; of the others, at
    the level of the first of them by Holm.
    """
    found = judgement.estimate
    if found is None or found.blocks < 2 or not found.deviation > 0:
        return None
    level, differences = LEVEL / contrasts, aa_values(values)
    if not differences:
        return by_interval(found.blocks, level) * found.deviation
    apart = math.sqrt(math.fsum(value**2 for value in differences) / len(differences))
    return by_rules(found.blocks, apart / found.deviation, level) * found.deviation


def guarded(accepted: Accepted, plan: Plan) -> dict[str, tuple[Guardrail, ...]]:
    """Every condition against B, over the blocks that have both; none: no block has."""
    found: dict[str, tuple[Guardrail, ...]] = {}
    for condition in plan.conditions:
        if condition == BASE:
            continue
        pairs = [
            PairedFacts(treated=facts(treated, plan.measured), base=tuple(facts(each, plan.measured) for each in base))
            for block in accepted.blocks
            if (treated := accepted.one(block, condition)) and (base := accepted.base(block))
        ]
        found[condition] = check_guardrails(pairs, plan.measured, plan.guardrails) if pairs else ()
    return found


def _failed(rows: Sequence[Guardrail]) -> Iterator[str]:
    return (f"{row.name}: {row.told}" for row in rows if row.status == "failed")


def efficiencies(
    plan: Plan, accepted: Accepted, alone: Sequence[Alone], step_s: Mapping[str, float]
) -> Iterator[Efficiency]:
    for condition, seconds in step_s.items():
        bounds = [read.config.staleness.max for read in accepted.of(condition) if read.config is not None]
        yield efficiency(condition, plan, alone, seconds, bounds[0])


def timelines(accepted: Accepted, plan: Plan) -> Iterator[Timeline]:
    """One step of B, and one of the condition with S, or else of the last one, of the same block where there is one."""
    others = [condition for condition in plan.conditions if condition != BASE]
    chosen = [condition for condition in others if "S" in condition.partition("(")[0].split("+")] or others
    for condition in (BASE, chosen[-1]):
        blocks = [block for block in accepted.blocks if accepted.base(block) and accepted.one(block, chosen[-1])]
        runs = [read for block in (*blocks, *accepted.blocks) for read in accepted.runs(block, condition)]
        if runs:
            events = read_events(runs[0].attempt.run_dir / "events.jsonl")
            step_s = [value or 0.0 for value in runs[0].series("step_s")]
            yield timeline(events, step_s, plan.measured, condition, runs[0].name)
