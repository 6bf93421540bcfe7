"""Two campaigns side by side: what differs between them, their throughputs and their effects.

An effect is a ratio within one machine and boot, so that effects of two campaigns can be read beside one another.
Throughputs cannot, unless both ran in the same boots of the same machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.bench.arithmetic import Estimate, estimate, percent
from stretto.bench.phrases import judged
from stretto.bench.plan_file import changes
from stretto.bench.results import NOT_MEASURED, Analysis
from stretto.wording import shown

SAME_BY_DESIGN = ("name",)
"""Fields of a plan that may differ without a word."""
FACTS = ("git", "versions", "platform", "environment", "hardware", "model", "data")
"""Of the provenance."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Of one campaign. ``throughput``: condition -> tokens per second of each accepted cell.

    effects   contrast -> its estimate and finding, by the rules of that campaign alone; where its scope allows no
              claim, the finding says so
    """

    name: str
    scope: str
    limit: str
    throughput: Mapping[str, tuple[float, ...]]
    effects: Mapping[str, tuple[Estimate | None, str]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``differences``: field, with both values; empty: the same plan on the same code and kind of machine.

    across       condition -> log-ratio of the second campaign's throughput over the first's, paired by seed; empty
                 where ``across_told`` says why there is none
    """

    first: Side
    second: Side
    differences: tuple[str, ...]
    across: Mapping[str, Estimate]
    across_told: str


def compare(first: Analysis, second: Analysis) -> Comparison:
    places = [_places(each) for each in (first, second)]
    across: dict[str, Estimate] = {}
    told = ""
    if not all(places) or places[0] != places[1]:
        told = "none: the campaigns ran on different machines or in different boots"
    elif first.plan.windows != second.plan.windows or first.plan.recipe_sha256 != second.plan.recipe_sha256:
        told = "none: the campaigns measured other windows, or another recipe"
    else:
        across = {
            condition: estimate(values)
            for condition in first.plan.conditions
            if condition in second.plan.conditions and (values := _paired(first, second, condition))
        }
    return Comparison(
        first=_side(first),
        second=_side(second),
        differences=tuple(_differences(first, second)),
        across=across,
        across_told=told,
    )


def text(found: Comparison) -> str:
    """For a terminal."""
    first, second = found.first, found.second
    lines = [
        f"{rank:6}  {side.name}: {side.scope}. {side.limit}" for rank, side in (("first", first), ("second", second))
    ]
    lines += ["", "what differs:"] + [f"  {line}" for line in found.differences or ("nothing that is known",)]
    conditions = dict.fromkeys([*first.throughput, *second.throughput])
    rows = [["tokens/s, geometric mean (least to greatest)", "first", "second"]]
    rows += [[name, _range(first.throughput.get(name)), _range(second.throughput.get(name))] for name in conditions]
    lines += ["", *_table(rows)]
    contrasts = dict.fromkeys([*first.effects, *second.effects])
    rows = [["effect, 95 % interval over blocks", "first", "second"]]
    rows += [[name, _effect(first.effects.get(name)), _effect(second.effects.get(name))] for name in contrasts]
    lines += ["", *_table(rows), "", "second over first, paired by seed:"]
    lines += [f"  {name}: {_interval(each)}" for name, each in found.across.items()] or [f"  {found.across_told}"]
    return "\n".join(lines) + "\n"


def _side(found: Analysis) -> Side:
    return Side(
        name=f"{found.plan.name} ({found.plan_sha256[:12]})",
        scope=found.scope.name,
        limit=found.scope.limit,
        throughput={condition: _throughputs(found, condition) for condition in found.plan.conditions},
        effects={
            str(each.judgement.contrast): (
                each.judgement.estimate,
                judged(each.judgement.finding, found.scope.claim),
            )
            for each in found.verdicts
        },
    )


def _throughputs(found: Analysis, condition: str) -> tuple[float, ...]:
    cells = [cell for cell in found.cells if cell.condition == condition]
    return tuple(cell.throughput.per_s for cell in cells if cell.throughput is not None)


def _differences(first: Analysis, second: Analysis) -> list[str]:
    """Of the plans, then of what they ran on."""
    lines = [line for line in changes(first.plan, second.plan) if line.partition(":")[0] not in SAME_BY_DESIGN]
    for name in FACTS:
        mine, theirs = first.provenance.get(name), second.provenance.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
            lines += [f"{name}.{key}: {shown(mine.get(key))}, now {shown(theirs.get(key))}" for key in keys]
        elif mine != theirs:
            lines.append(f"{name}: {shown(mine)}, now {shown(theirs)}")
    return lines


def _places(found: Analysis) -> set[tuple[Any, Any]]:
    return {(block["machine_id"], block["boot_id"]) for block in found.provenance["blocks"]}


def _by_seed(found: Analysis, condition: str) -> dict[int, float]:
    """Seed -> mean log throughput of its cells; of B, those of one block are its baseline."""
    logs: dict[int, list[float]] = {}
    for cell in found.cells:
        if cell.condition == condition and cell.throughput is not None:
            logs.setdefault(cell.seed, []).append(math.log(cell.throughput.per_s))
    return {seed: math.fsum(values) / len(values) for seed, values in logs.items()}


def _paired(first: Analysis, second: Analysis, condition: str) -> list[float]:
    before, after = _by_seed(first, condition), _by_seed(second, condition)
    return [after[seed] - before[seed] for seed in before if seed in after]


def _range(values: Sequence[float] | None) -> str:
    if not values:
        return NOT_MEASURED
    mean = math.exp(math.fsum(map(math.log, values)) / len(values))
    return f"{mean:,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def _effect(found: tuple[Estimate | None, str] | None) -> str:
    if found is None or found[0] is None:
        return NOT_MEASURED
    return f"{_interval(found[0])} {found[1]}"


def _interval(found: Estimate) -> str:
    if found.blocks < 2:
        return f"{percent(found.mean):+.3g} % (one block: no interval)"
    return f"{percent(found.mean):+.3g} % [{percent(found.low):+.3g}, {percent(found.high):+.3g}]"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
