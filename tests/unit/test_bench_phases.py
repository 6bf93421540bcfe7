"""Parts of a step, busy seconds and timelines of spans that were placed by hand. Times are in seconds."""

from __future__ import annotations

import random

import pytest

from stretto.bench.phases import PHASES, busy, measured_times, phases, step_starts, timeline
from stretto.bench.plan import Window
from stretto.types import StrettoError

SECOND = 10**9


def span(name, start, end, process="actor0", **attrs):
    times = {"start_ns": round(start * SECOND), "end_ns": round(end * SECOND)}
    return {"type": "span", "name": name, "thread": "MainThread", **times, "process": process, **attrs}


def step(update, start, end):
    return span("loop.step", start, end, "driver", update=update)


def test_what_two_ranks_do_at_once_counts_once_and_for_the_work_that_is_named_first():
    events = [
        step(0, 0, 9),
        span("loop.claim", 0, 4, "driver", partition=0),
        span("actor.forward", 3, 5),
        span("actor.forward", 4, 6, "actor1"),
        span("actor.train", 5, 8),  # rank 0 trains while rank 1 still forwards
        span("actor.train", 6, 9, "actor1"),
    ]
    found = phases(events, [(0, 10 * SECOND)], updates=1, step_s=10.0)
    assert {name: value for name, value in found.items() if value} == {
        "wait": 3.0,
        "forward": 3.0,
        "train": 3.0,
        "rest": 1.0,
        "step": 10.0,
    }
    assert busy(events, [(0, 10 * SECOND)], updates=1)["actor"] == 6.0


def test_parts_add_up_to_the_step_whatever_the_spans_are():
    rng = random.Random(0)
    names = ["actor.forward", "actor.train", "actor.optimizer", "actor.fetch", "loop.claim", "actor.publish"]
    for _ in range(50):
        begins = [(rng.choice(names), rng.uniform(-2, 20)) for _ in range(30)]
        events = [span(name, begin, begin + rng.uniform(0, 3)) for name, begin in begins]
        found = phases(events, [(0, 5 * SECOND), (7 * SECOND, 12 * SECOND)], updates=10, step_s=1.0)
        assert sum(found[name] for name in PHASES) == pytest.approx(1.0, abs=1e-9)
        assert all(found[name] >= 0 for name in PHASES)


def test_windows_last_from_step_to_step_and_the_last_update_as_long_as_it_says():
    events = [step(0, 1, 2), step(1, 3, 4), step(2, 6, 7)]
    starts = step_starts(events, 3)
    assert starts == (1 * SECOND, 3 * SECOND, 6 * SECOND)
    windows = [Window(0, 1), Window(2, 2)]
    assert measured_times(starts, [2.0, 3.0, 1.5], windows) == ((1 * SECOND, 6 * SECOND), (6 * SECOND, 7.5 * SECOND))


def test_a_step_that_is_missing_is_said():
    with pytest.raises(StrettoError, match="update 1 is not among the events"):
        step_starts([step(0, 1, 2), step(2, 3, 4)], 3)


def test_a_timeline_cuts_what_reaches_into_it_and_draws_what_lies_close_as_one():
    events = [
        step(0, 0, 1),
        step(1, 10, 19),
        span("actor.train", 11, 12),  # names no partition: it is that of the step
        span("rollout.generate", 5, 14, "rollout", partition=2, batch=0),
        span("rollout.generate", 18, 30, "rollout", partition=2, batch=1),
        span("processor.process", 12, 12.5, "rollout", row_id="a"),
        span("processor.process", 12.4, 13, "rollout", row_id="b"),
        span("processor.process", 13.001, 13.5, "rollout", row_id="c"),  # a gap of 1 ms in 10 s
        span("processor.process", 15, 16, "rollout", row_id="d"),
        span("plane.put", 8, 9, "rollout", partition=1, group=0),  # outside
    ]
    found = timeline(events, [10.0, 10.0], [Window(1, 1)], "B", "00-0-B")
    drawn = [(each.lane, each.start_s, each.end_s, each.partition) for each in found.spans]
    assert drawn == [
        ("rollout", 0.0, 4.0, 2),
        ("driver", 0.0, 9.0, 1),
        ("actor", 1.0, 2.0, 1),
        ("processor", 2.0, 3.5, None),
        ("processor", 5.0, 6.0, None),
        ("rollout", 8.0, 10.0, 2),
    ]
