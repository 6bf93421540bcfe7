"""Everything that can be wrong with a plan, worded with its remedy. Nothing is read here but the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from stretto import switches
from stretto.bench.plan import BASE, LETTERS, Guardrails, Plan
from stretto.settings import OPTIONS, suggest
from stretto.switches.base import R_WITH_S
from stretto.wording import form, nearest, shown

OWNED = ("run.dir", "run.seed", "run.updates", *(f"switches.{switch.name}" for switch in switches.ALL))
"""Options that differ from cell to cell by design."""
WORK_BLOCKS = ("model", "data", "cluster", "staleness")
WORK = (
    "run.determinism",
    *(f"rollout.{name}" for name in ("prompts_per_partition", "n_samples_per_prompt", "max_response_tokens")),
    *(f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "stop", "refill_rounds")),
)
"""Options, beside all of these blocks, that say what is computed, or on what: no two conditions differ in them."""


def unknown_keys(given: Mapping[str, Any]) -> list[str]:
    known = [*Plan.model_fields, "factorial"]
    return [f"{key}: no such key; did you mean {nearest(key, known)}?" for key in given if key not in known]


def bad_values(error: ValidationError, given: Mapping[str, Any]) -> list[str]:
    """One message for each key, with what it accepts."""
    found: dict[str, str] = {}
    for item in error.errors():
        key, *inner = (str(part) for part in item["loc"])
        field = Plan.model_fields[key]
        if key == "guardrails" and inner:
            known = Guardrails.model_fields
            name = f"{key}.{inner[0]}"
            if inner[0] not in known:
                found[name] = f"{name}: no such key; did you mean {nearest(inner[0], known)}?"
                continue
            key, field, value = name, known[inner[0]], given[key][inner[0]]
        elif item["type"] == "missing" and not inner:
            found[key] = f"{key} is not set: expected {form(field.annotation, field.metadata)}"
            continue
        else:
            value = given[key]
        accepted = "a table" if key == "guardrails" else form(field.annotation, field.metadata)
        found[key] = f"{key} = {shown(value)}: expected {accepted}"
    return list(found.values())


def problems_of(plan: Plan) -> Iterator[str]:
    """What does not fit together, of values that have the right types."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", plan.name):
        yield f"name = {shown(plan.name)}: expected lower-case letters, digits and hyphens; it names folders"
    yield from _condition_problems(plan)
    yield from _contrast_problems(plan)
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        yield f"seeds = {shown(plan.seeds)}: expected at least one, none twice; `repetitions` runs each several times"
    yield from _window_problems(plan)
    yield from _option_problems("settings", plan.settings)
    for name, sets in plan.variants.items():
        yield from _option_problems(f"variants.{shown(name)}", sets)
        for option in sets:
            if option in WORK or option.partition(".")[0] in WORK_BLOCKS:
                yield (
                    f"variants.{shown(name)}: {option}: a variant changes how the same work is done, not the work; "
                    "leave it out, or set it for all cells under settings"
                )
        for option in sorted(sets.keys() & plan.settings.keys()):
            yield f"{option} is set by settings and by variant {shown(name)}: leave it to one of them"


def _condition_problems(plan: Plan) -> Iterator[str]:
    for condition in plan.conditions:
        named, bracket, _ = condition.partition("(")
        letters = switches.letters(named)
        if letters is None:
            yield f"conditions names {shown(condition)}: expected B, or letters of {', '.join(LETTERS)} joined by +"
        elif {"R", "S"} <= set(letters):
            yield f"conditions names {shown(condition)}: {R_WITH_S}"
        elif bracket and condition not in plan.variants:
            yield f"conditions names {shown(condition)}: say in [variants.{shown(condition)}] what it adds to {named}"
    for name in plan.variants:
        if not re.fullmatch(r"[^()]+\((?!\.)[A-Za-z0-9=.,_+-]+\)", name):
            yield (
                f"variants.{shown(name)}: expected a condition and a label in brackets, such as B(c=1): letters, "
                "digits and any of = . , _ + - but no . in front, for it names folders"
            )
        elif name not in plan.conditions:
            yield f"variants.{shown(name)} is in no cell: name it in conditions, which are {shown(plan.conditions)}"
    if len(plan.conditions) < 2:
        yield f"conditions = {shown(plan.conditions)}: nothing is compared with {BASE}; name another condition"
    if plan.order == "pairs" and len(plan.conditions) != 2:
        yield f'order = "pairs" alternates two conditions, not {len(plan.conditions)}; "blocks" takes any number'


def _contrast_problems(plan: Plan) -> Iterator[str]:
    named = [("primary", plan.primary), *(("contrasts", pair) for pair in plan.contrasts)]
    known = f"two different ones of {', '.join(plan.conditions)}"
    for key, pair in named:
        if len(set(pair)) < 2 or not set(pair) <= set(plan.conditions):
            yield f"{key} names {shown(pair)}: expected {known}: [treated, base]"
    unordered = [frozenset(pair) for _, pair in named]
    for twice in dict.fromkeys(pair for pair in unordered if unordered.count(pair) > 1):
        yield f"primary and contrasts name {' and '.join(sorted(twice))} twice: the mirror of a contrast says the same"
    for pair in plan.contrasts:
        if BASE in pair:
            yield f"contrasts names {shown(pair)}: every condition is compared with {BASE} anyway; leave it out"
    if plan.primary[0] == BASE:
        yield f"primary = {shown(plan.primary)}: {BASE} is what others are compared with; name it second"
    for name in plan.targets_percent:
        if name not in plan.conditions or name == BASE:
            others = ", ".join(plan.conditions[1:])
            yield f"targets_percent.{shown(name)}: expected a condition that is compared with {BASE}: {others}"


def _window_problems(plan: Plan) -> Iterator[str]:
    try:
        windows = plan.measured
    except ValueError as error:
        yield f"windows = {shown(plan.windows)}: {error}"
        return
    if not windows:
        yield "windows = []: expected at least one window, such as 10-59"
    if any(b.first <= a.last for a, b in pairwise(windows)):
        yield f"windows = {shown(plan.windows)}: expected ascending ones that share no update"
    if windows and windows[-1].last >= plan.updates:
        yield (
            f"windows = {shown(plan.windows)}: the last of {plan.updates} updates is {plan.updates - 1}; "
            "raise updates or end the window sooner"
        )


def _option_problems(where: str, sets: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sets.items():
        if name in OWNED:
            yield f"{where}: {name} differs from cell to cell by the plan's own keys; leave it out"
        elif name not in OPTIONS:
            yield f"{where}: {name}: no such option; did you mean {' or '.join(suggest(name))}?"
        elif not _plain(value):
            yield f"{where}: {name} = {shown(value)}: expected finite numbers, strings, booleans, lists or tables"


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
