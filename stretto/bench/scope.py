"""What a campaign may claim, by the first rule that holds. Nobody chooses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.bench.design import Design
from stretto.bench.plan import Window

ScopeName = Literal["fresh_process_first_step", "steady_state", "transient"]
STEADY_UPDATES = 40
"""Measured updates after warm-up that every process of a steady state needs."""
REPETITIONS = 2
"""Blocks that each condition needs for any claim."""


@dataclass(frozen=True)
class Process:
    """One accepted cell: a fresh process that trained ``updates`` updates."""

    condition: str
    block: int
    seed: int
    updates: int


@dataclass(frozen=True)
class Scope:
    """``reasons``: why it is no stronger one; of a first step, why it says nothing about sustained training."""

    name: ScopeName
    claim: bool
    limit: str
    reasons: tuple[str, ...]


def decide(
    windows: Sequence[Window],
    warmup: int,
    processes: Sequence[Process],
    *,
    conditions: Sequence[str],
    declared: bool,
) -> Scope:
    """The scope of what was measured, in this order:

    1. first step: the window is 0-0, and every process trained one update;
    2. steady state: 40 measured updates after the warm-up in every process, windows that were declared before the runs
       and begin after the warm-up, which is of one update at least, and two blocks for each condition;
    3. transient: anything else, and whatever lacks a planned condition altogether.

    ``processes`` are the accepted cells, ``conditions`` all that the plan has: one whose cells were all rejected counts
    as a repetition of none. ``declared``: every cell ran under the plan as it is now, by its SHA-256.
    """
    repetitions, seeds = _repetitions(processes, conditions)
    counts = f"{repetitions} {_plural('block', repetitions)} with {seeds} {_plural('seed', seeds)}"
    reasons = tuple(_not_steady(windows, warmup, processes, conditions, declared))
    if repetitions and tuple(windows) == (Window(0, 0),) and all(process.updates == 1 for process in processes):
        if repetitions < REPETITIONS:
            limit = "No claim: one repetition of a first step says nothing of its spread, nor of sustained training."
            return Scope("fresh_process_first_step", False, limit, reasons)
        limit = f"First-step latency of this setting alone, over {counts}: nothing about sustained training."
        return Scope("fresh_process_first_step", True, limit, reasons)
    if not reasons:
        measured = ", ".join(map(str, windows))
        limit = (
            f"Sustained throughput of this setting alone, updates {measured}, over {counts}: nothing about another "
            "model, workload, machine or number of devices."
        )
        return Scope("steady_state", True, limit, ())
    return Scope("transient", False, f"No claim, exploratory: {'; '.join(reasons)}.", reasons)


def planned(design: Design, updates: int, windows: Sequence[Window], warmup: int) -> Scope:
    """The scope that a plan will have if every cell runs to its end and is accepted."""
    processes = [Process(cell.condition, cell.block, cell.seed, updates) for cell in design.cells]
    conditions = list(dict.fromkeys(process.condition for process in processes))
    return decide(windows, warmup, processes, conditions=conditions, declared=True)


def _not_steady(
    windows: Sequence[Window], warmup: int, processes: Sequence[Process], conditions: Sequence[str], declared: bool
) -> Iterator[str]:
    if not processes:
        yield "no run was accepted"
        return
    found = {process.condition for process in processes}
    if absent := [condition for condition in conditions if condition not in found]:
        yield f"no run of {', '.join(absent)} was accepted"
    if warmup < 1:
        yield "there is no warm-up, and a process's first update is no steady state"
    for window in windows:
        if window.first < warmup:
            yield f"window {window} touches the warm-up of {warmup} {_plural('update', warmup)}"
    least = min(_measured(windows, warmup, process.updates) for process in processes)
    if least < STEADY_UPDATES:
        yield f"{least} measured {_plural('update', least)} after warm-up of at least {STEADY_UPDATES} in every process"
    if not declared:
        yield "the plan, and with it the windows, is not the one that the runs began with"
    repetitions, _ = _repetitions(processes, conditions)
    if not absent and repetitions < REPETITIONS:
        yield f"{repetitions} {_plural('repetition', repetitions)} of at least {REPETITIONS} for each condition"


def _measured(windows: Sequence[Window], warmup: int, updates: int) -> int:
    return sum(max(0, min(window.last + 1, updates) - max(window.first, warmup)) for window in windows)


def _repetitions(processes: Sequence[Process], conditions: Sequence[str]) -> tuple[int, int]:
    """Blocks of the condition that has fewest, and the seeds of these blocks; of two that have as few, the one with
    fewer seeds. The two B of one block are one repetition.
    """
    blocks = {condition: {p.block: p.seed for p in processes if p.condition == condition} for condition in conditions}
    return min(((len(seeds), len(set(seeds.values()))) for seeds in blocks.values()), default=(0, 0))


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
