"""``stretto bench plan``: what a plan would run, claim and detect, before anything runs."""

from __future__ import annotations

import math
import textwrap

from stretto.bench.arithmetic import percent
from stretto.bench.design import design
from stretto.bench.detectable import by_interval
from stretto.bench.jobs import alone_jobs
from stretto.bench.plan import Plan
from stretto.bench.scope import planned

DEVIATIONS = (0.005, 0.02, 0.05)
"""Between-block deviations of a log-ratio, for which the smallest detectable effect is told."""


def outline(plan: Plan) -> str:
    """For a terminal."""
    found = design(plan.conditions, plan.seeds, plan.repetitions, plan.order)
    scope = planned(found, plan.updates, plan.measured, plan.warmup)
    blocks = len(found.blocks)
    lines = [
        f"plan                {plan.sha256}",
        f"recipe              {plan.recipe}",
        f"runs                {len(found.cells)} in {blocks} blocks, {plan.updates} updates each; "
        f"then {len(alone_jobs(plan))} stages alone",
    ]
    lines += [
        f"{'order' if not block.index else '':20}block {block.index}, seed {block.seed}: {'  '.join(block.order)}"
        for block in found.blocks
    ]
    if not found.complete:
        lines.append(
            f"{'':20}an incomplete square: {found.period} blocks, or a multiple, put every condition in every place"
        )
    lines += [
        f"windows             {', '.join(map(str, plan.measured))}, after a warm-up of {plan.warmup}",
        f"primary contrast    {plan.primary_contrast}; beside it {', '.join(map(str, plan.other_contrasts)) or 'none'}",
        *textwrap.wrap(f"{'scope':20}{scope.name}: {scope.limit}", 100, subsequent_indent=" " * 20),
        f"detects             {_detects(blocks)}",
    ]
    looser = plan.guardrails.looser()
    lines += [f"{'guardrails' if not number else '':20}{text}" for number, text in enumerate(looser)]
    return "\n".join(lines)


def _detects(blocks: int) -> str:
    least = by_interval(blocks)
    if math.isinf(least):
        return "nothing: one block has no interval"
    told = ", ".join(f"{percent(least * sd):.2g} % where blocks differ by {100 * sd:g} %" for sd in DEVIATIONS)
    return f"with 80 % power, of the primary contrast: {told}"
