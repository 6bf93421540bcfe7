"""Where the time of steps went, from the spans of a run: parts of a step, busy seconds of each resource, a timeline.

Times are nanoseconds of CLOCK_MONOTONIC, of one run in one boot. Update k lasts from its ``loop.step`` to that of
update k + 1, so that nothing between two steps is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from stretto.bench.plan import Window
from stretto.bench.results import Span, Timeline
from stretto.observe.spans import ROLLOUT_SPANS, Event, Interval, intervals, union, with_partition
from stretto.types import StrettoError

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "wait": "the actor waits for groups, and does nothing else",
        "fetch": "payloads are fetched",
        "hook": "the function of actor.before_logprob_hook",
        "forward": "forwards without gradient: old-policy log-probs",
        "advantages": "advantages over the full batch",
        "train": "forward and backward",
        "optimizer": "reduction, clipping, optimizer step",
        "publish": "the new weights leave the actor",
        "evidence": "fingerprints and raw values",
        "checkpoint": "a checkpoint is written",
        "rest": "everything else: calls between processes, schedule, the driver and its files",
    }
)
"""The parts of a step in the order in which a report stacks them, with what each is."""
_SPANS = (
    ("forward", "actor.forward"),
    ("train", "actor.train"),
    ("optimizer", "actor.optimizer"),
    ("advantages", "actor.advantages"),
    ("publish", "actor.publish"),
    ("evidence", "actor.evidence"),
    ("hook", "actor.hook"),
    ("fetch", "actor.fetch"),
    ("checkpoint", "loop.checkpoint"),
    ("wait", "loop.claim"),
)
"""An instant at which several run, of one rank or another, counts for the first of them; waiting comes last."""
RESOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "processor": ("processor.process",),
        "rollout": ROLLOUT_SPANS,
        "actor": tuple(span for phase, span in _SPANS if phase not in ("checkpoint", "wait")),
    }
)
"""Resource -> the spans in which it works."""
_LANES = {"loop": "driver"}
_MERGED = ("processor", "reward", "plane")
"""Lanes of hundreds of short spans a step, which are drawn as the time in which any of them ran."""
_CLOSE = 0.002
"""Share of a step: a shorter gap between two of them is too narrow to be seen."""


def step_starts(events: Iterable[Event], updates: int) -> tuple[int, ...]:
    """The start of ``loop.step`` of every update. Raises StrettoError where one is missing."""
    found = {e["update"]: e["start_ns"] for e in events if e["type"] == "span" and e["name"] == "loop.step"}
    for update in range(updates):
        if update not in found:
            raise StrettoError(f"loop.step of update {update} is not among the events")
    return tuple(found[update] for update in range(updates))


def measured_times(starts: Sequence[int], step_s: Sequence[float], windows: Sequence[Window]) -> tuple[Interval, ...]:
    """From when to when each window lasted. The run's last update ends ``step_s`` after it began."""
    ends = [*starts[1:], starts[-1] + round(step_s[-1] * 1e9)]
    return tuple((starts[window.first], ends[window.last]) for window in windows)


def phases(events: Sequence[Event], times: Sequence[Interval], updates: int, step_s: float) -> dict[str, float]:
    """Mean seconds an update of every part of ``PHASES``, and their sum, ``step``.

    times    of the windows, which hold ``updates`` updates in all
    step_s   mean seconds of these updates; what no span covers is ``rest``
    """
    covered: list[Interval] = []
    before, parts = 0, {}
    for phase, span in _SPANS:
        covered = union([*covered, *intervals(events, span)])
        now = _within(covered, times)
        parts[phase] = (now - before) / 1e9 / updates
        before = now
    parts["rest"] = step_s - before / 1e9 / updates
    return {phase: parts[phase] for phase in PHASES} | {"step": step_s}


def busy(events: Sequence[Event], times: Sequence[Interval], updates: int) -> dict[str, float]:
    """Mean seconds an update in which each resource worked, in any of its processes."""
    return {
        resource: _within([found for name in names for found in intervals(events, name)], times) / 1e9 / updates
        for resource, names in RESOURCES.items()
    }


def timeline(
    events: Sequence[Event], step_s: Sequence[float], windows: Sequence[Window], condition: str, cell: str
) -> Timeline:
    """The step whose length is the median of the measured ones (of an even number: the shorter of the middle two)."""
    measured = sorted((step_s[k], k) for window in windows for k in range(window.first, window.last + 1))
    length, update = measured[(len(measured) - 1) // 2]
    starts = step_starts(events, len(step_s))
    ((low, high),) = measured_times(starts, step_s, [Window(update, update)])
    inside = [e for e in events if e["type"] == "span" and e["end_ns"] > low and e["start_ns"] < high]
    spans = [_span(e, low, high) for e in with_partition(inside)]
    merged = _merged(spans, round((high - low) * _CLOSE))
    return Timeline(condition=condition, cell=cell, update=update, seconds=length, spans=merged)


def _span(event: Event, low: int, high: int) -> Span:
    lane = event["name"].partition(".")[0]
    return Span(
        lane=_LANES.get(lane, lane),
        name=event["name"],
        start_s=(max(event["start_ns"], low) - low) / 1e9,
        end_s=(min(event["end_ns"], high) - low) / 1e9,
        partition=event.get("partition", event.get("update")) if lane != "processor" else None,
    )


def _merged(spans: Iterable[Span], close_ns: int) -> tuple[Span, ...]:
    kept: list[Span] = []
    groups: dict[tuple[str, str, int | None], list[Interval]] = {}
    for span in spans:
        if span.lane in _MERGED:
            time = (round(span.start_s * 1e9), round(span.end_s * 1e9))
            groups.setdefault((span.lane, span.name, span.partition), []).append(time)
        else:
            kept.append(span)
    for (lane, name, partition), times in groups.items():
        kept += [
            Span(lane=lane, name=name, start_s=start / 1e9, end_s=(end - close_ns) / 1e9, partition=partition)
            for start, end in union((start, end + close_ns) for start, end in times)
        ]
    return tuple(sorted(kept, key=lambda span: (span.start_s, span.end_s, span.lane)))


def _within(found: Iterable[Interval], times: Iterable[Interval]) -> int:
    """Nanoseconds of ``times`` in which any of the intervals ran."""
    covered = union(found)
    return sum(max(0, min(end, high) - max(start, low)) for low, high in times for start, end in covered)
