"""Arithmetic on the spans of a run: unions, overlaps, the phases of a step, and who waited.

Concurrent spans are never counted twice: seconds of several spans are the length of their union.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
Interval = tuple[int, int]
ROLLOUT_SPANS = ("rollout.load_weights", "rollout.generate", "rollout.evaluate")


def aligned(events: Iterable[Event]) -> Iterator[Event]:
    """The spans and counts, with the times of all boots on one axis (nanoseconds since 1970).

    CLOCK_MONOTONIC starts anew with every boot. The first ``process.start`` of a boot fixes that boot's offset, so
    that times within one boot keep their exact differences.
    """
    offsets: dict[str | None, int] = {}
    current: dict[str, int] = {}
    for event in events:
        if event["type"] == "process":
            offset = offsets.setdefault(event.get("boot"), event["unix_ns"] - event["time_ns"])
            current[event["process"]] = offset
            continue
        offset = current.get(event["process"], 0)
        moved: Event = {key: event[key] + offset for key in ("start_ns", "end_ns", "time_ns") if key in event}
        yield {**event, **moved}


def with_partition(events: Iterable[Event]) -> list[Event]:
    """The spans, with the ``partition`` of the ``loop.step`` during which they started where they name none.

    Actor spans name none: the actor works for one partition at a time, that of the step.
    """
    spans = [e for e in aligned(events) if e["type"] == "span"]
    steps = sorted((e["start_ns"], e["end_ns"], _step_of(e)) for e in spans if e["name"] == "loop.step")
    starts = [start for start, _, _ in steps]
    found = []
    for e in spans:
        if "partition" not in e:
            at = bisect.bisect_right(starts, e["start_ns"]) - 1
            if at >= 0 and e["start_ns"] < steps[at][1]:
                e["partition"] = steps[at][2]
        found.append(e)
    return found


def _step_of(step: Event) -> int | None:
    return step.get("update", step.get("partition"))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, sorted intervals that cover the same instants."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def seconds(intervals: Iterable[Interval], within: Interval | None = None) -> float:
    """Length of the union, clipped to ``within``."""
    low, high = within or (-(1 << 63), 1 << 63)
    return sum(max(0, min(end, high) - max(start, low)) for start, end in union(intervals)) / 1e9


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The instants that lie in both."""
    left, right = union(a), union(b)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def intervals(events: Iterable[Event], name: str, **attrs: Any) -> list[Interval]:
    """Start and end, in ns, of the spans with this name and these attributes."""
    return [
        (e["start_ns"], e["end_ns"])
        for e in events
        if e["type"] == "span" and e["name"] == name and all(e.get(k) == v for k, v in attrs.items())
    ]


def overlap(events: Iterable[Event], a: str, b: str) -> float:
    """Seconds during which a span named ``a`` and a span named ``b`` both ran, e.g. rollout.generate, actor.train."""
    spans = [e for e in aligned(events) if e["type"] == "span" and e["name"] in (a, b)]
    return seconds(intersection(intervals(spans, a), intervals(spans, b)))


def step_window(events: Iterable[Event], update: int) -> Interval | None:
    """Start and end of the newest ``loop.step`` of an update (undone work may have left earlier ones)."""
    steps = [e for e in events if e["type"] == "span" and e["name"] == "loop.step" and _step_of(e) == update]
    if not steps:
        return None
    last = max(steps, key=lambda e: e["end_ns"])
    return last["start_ns"], last["end_ns"]


def step_phases(events: Iterable[Event], update: int) -> dict[str, float]:
    """Seconds that each kind of span ran while ``loop.step`` of ``update`` did, whatever partition it worked for.

    Also ``wait.actor`` (the controller waited for groups, or for the plane) and ``wait.rollout`` (no rollout span ran:
    the rollout side waited for weights, room in the plane, prompts or rewards). Empty where the step is not there.
    """
    spans = [e for e in aligned(events) if e["type"] == "span"]
    window = step_window(spans, update)
    if window is None:
        return {}
    by_name: dict[str, list[Interval]] = {}
    for e in spans:
        if e["end_ns"] > window[0] and e["start_ns"] < window[1]:
            by_name.setdefault(e["name"], []).append((e["start_ns"], e["end_ns"]))
    phases = {name: seconds(found, window) for name, found in sorted(by_name.items())}
    busy = [interval for name in ROLLOUT_SPANS for interval in by_name.get(name, [])]
    phases["wait.actor"] = phases.get("loop.claim", 0.0)
    phases["wait.rollout"] = (window[1] - window[0]) / 1e9 - seconds(busy, window)
    return phases
