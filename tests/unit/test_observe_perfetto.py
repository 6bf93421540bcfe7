import json
import time
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.observe.perfetto import to_trace, write_trace
from stretto.observe.spans import aligned, intersection, overlap, seconds, step_phases, union, with_partition

MS = 1_000_000


def span(name, process, start_ms, end_ms, thread="MainThread", **attrs):
    times = {"start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS)}
    return {"type": "span", "name": name, "process": process, "thread": thread, **times, **attrs}


def count(name, process, at_ms, value):
    return {"type": "count", "name": name, "process": process, "thread": "x", "time_ns": at_ms * MS, "value": value}


def start(process, at_ms, unix_ms, boot="b"):
    names = {"type": "process", "name": "process.start", "process": process, "pid": 1, "boot": boot}
    return {**names, "time_ns": at_ms * MS, "unix_ns": unix_ms * MS}


RUN = [
    span("loop.step", "driver", 0, 100, update=0),
    span("loop.claim", "driver", 0, 30, partition=0),
    span("loop.step", "driver", 100, 200, update=1),
    span("loop.claim", "driver", 100, 110, partition=1),
    span("rollout.generate", "rollout", 0, 30, thread="engine", partition=0, version=0, tokens=10),
    span("rollout.generate", "rollout", 40, 80, thread="engine", partition=1, version=0),
    span("rollout.generate", "rollout", 90, 105, thread="engine", partition=1, version=0),
    span("actor.forward", "actor0", 32, 40, role="old"),
    span("actor.train", "actor0", 40, 60),
    span("actor.train", "actor0", 60, 95),
    span("actor.publish", "actor0", 95, 99, version=1),
    span("rollout.load_weights", "rollout", 110, 115, thread="engine", version=1),
    span("actor.train", "actor0", 120, 180),
    count("bytes", "ledger", 10, 5),
    count("bytes", "ledger", 50, 7),
]


def test_overlap_counts_each_instant_once():
    # generate [40, 80], [90, 105] against train [40, 60], [60, 95]: [40, 80] and [90, 95]
    assert overlap(RUN, "rollout.generate", "actor.train") == pytest.approx(0.045)
    assert overlap(RUN, "rollout.generate", "actor.publish") == pytest.approx(0.004)
    assert overlap(RUN, "rollout.generate", "no.such") == 0


interval_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda t: (min(t), max(t))), max_size=8)


@settings(deadline=None)
@given(interval_lists, interval_lists)
def test_unions_and_intersections_are_those_of_the_instants(a, b):
    def instants(spans):
        return {t for lo, hi in spans for t in range(lo, hi)}

    assert instants(union(a)) == instants(a)
    assert seconds(a) * 1e9 == pytest.approx(len(instants(a)))
    assert seconds(a, (5, 20)) * 1e9 == pytest.approx(len(instants(a) & set(range(5, 20))))
    assert instants(intersection(a, b)) == instants(a) & instants(b)


def test_phases_of_a_step_are_clipped_to_it_and_say_who_waited():
    phases = step_phases(RUN, 0)
    expected = {"loop.step": 0.1, "loop.claim": 0.03, "rollout.generate": 0.08, "actor.forward": 0.008}
    expected |= {"actor.train": 0.055, "actor.publish": 0.004, "wait.actor": 0.03, "wait.rollout": 0.02}
    assert phases == pytest.approx(expected)
    assert step_phases(RUN, 1)["rollout.generate"] == pytest.approx(0.005)
    assert step_phases(RUN, 9) == {}


def test_the_newest_of_two_attempts_at_an_update_counts():
    again = [*RUN, span("loop.step", "driver", 300, 310, update=0)]
    assert step_phases(again, 0)["loop.step"] == pytest.approx(0.01)


def test_actor_spans_take_the_partition_of_the_step_they_ran_in():
    trained = [e.get("partition") for e in with_partition(RUN) if e["name"] == "actor.train"]
    assert trained == [0, 0, 1]
    before = [span("actor.train", "actor0", 500, 501)]
    assert "partition" not in with_partition(RUN + before)[-1]


def test_sessions_of_two_boots_are_placed_by_the_wall_clock():
    events = [
        start("driver", 1000, 50_000),
        span("loop.step", "driver", 1000, 1010, update=0),
        start("rollout", 1003, 50_004),  # a millisecond of drift: the boot's first offset counts
        span("rollout.generate", "rollout", 1003, 1005),
        start("driver", 10, 90_000, boot="c"),
        span("loop.step", "driver", 10, 20, update=1),
    ]
    assert [e["start_ns"] // MS for e in aligned(events)] == [50_000, 50_003, 90_000]


def rows_of(trace):
    names = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "M" and e["name"] == "thread_name":
            names[e["pid"], e["tid"]] = e["args"]["name"]
    return names


def processes_of(trace):
    return {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}


def test_each_engine_replica_is_a_row_of_its_own():
    work = [
        span(name, "rollout", at, at + 50, replica=replica, version=0)
        for replica, at, name in (
            (1, 0, "rollout.generate"),
            (0, 10, "rollout.load_weights"),
            (1, 60, "rollout.evaluate"),
            (0, 70, "rollout.generate"),
        )
    ]
    trace = to_trace(work)
    rows = rows_of(trace)
    shown = {(e["name"], rows[e["pid"], e["tid"]]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert shown == {
        ("rollout.generate", "engine 1"),
        ("rollout.load_weights", "engine 0"),
        ("rollout.evaluate", "engine 1"),
        ("rollout.generate", "engine 0"),
    }


def test_each_side_is_a_process_in_reading_order_and_each_thread_a_named_row():
    trace = to_trace(
        [*RUN, span("reward.score", "rollout", 30, 31), span("processor.process", "rollout", 0, 2, "processor_0")]
    )
    processes = processes_of(trace)
    assert [processes[pid] for pid in sorted(processes)] == ["driver", "rollout", "actor0", "ledger"]
    rows = defaultdict(set)
    for (pid, _), name in rows_of(trace).items():
        rows[processes[pid]].add(name)
    assert rows["rollout"] == {"engine", "reward", "processor"}
    assert rows["actor0"] == {"actor"}
    assert rows["driver"] == {"loop"}
    assert len({tid for _, tid in rows_of(trace)}) == len(rows_of(trace))


def rows_in_order(trace, process):
    indexes = {}
    for e in trace["traceEvents"]:
        if e["name"] == "thread_sort_index" and processes_of(trace)[e["pid"]] == process:
            indexes[e["pid"], e["tid"]] = e["args"]["sort_index"]
    return [rows_of(trace)[row] for row in sorted(indexes, key=indexes.__getitem__)]


def test_rows_of_further_coroutines_come_after_the_first_row_of_every_thread():
    nested = [span("plane.put", "rollout", 0, 10 - i) for i in range(3)]
    assert rows_in_order(to_trace(RUN + nested), "rollout") == ["loop", "engine"]
    crossing = [span("plane.put", "rollout", i, 10 + i) for i in range(3)]
    assert rows_in_order(to_trace(RUN + crossing), "rollout") == ["loop", "engine", "loop 2", "loop 3"]


def test_spans_are_complete_events_in_microseconds_since_the_first():
    trace = to_trace(
        [{**e, "start_ns": e["start_ns"] + MS, "end_ns": e["end_ns"] + MS} for e in RUN if "start_ns" in e]
    )
    (publish,) = [e for e in trace["traceEvents"] if e["name"] == "actor.publish"]
    assert (publish["ph"], publish["ts"], publish["dur"]) == ("X", 95_000, 4_000)
    assert publish["args"] == {"version": 1, "partition": 0}


def test_counts_are_running_sums():
    counters = [e for e in to_trace(RUN)["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["total"]) for e in counters if e["name"] == "bytes"] == [(10_000, 5), (50_000, 12)]


def test_tokens_that_a_span_names_are_counted_at_its_end():
    counters = [e for e in to_trace(RUN)["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["total"]) for e in counters if e["name"] == "rollout.generate tokens"] == [(30_000, 10)]


def test_arrows_lead_from_generation_to_training_and_from_publish_to_load():
    trace = to_trace(RUN)
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}
    flows = defaultdict(list)
    for e in trace["traceEvents"]:
        if e["ph"] in "stf":
            flows[e["id"]].append((e["ph"], slices[e["pid"], e["tid"], e["ts"]]))
    assert flows == {
        "partition 0": [("s", "rollout.generate"), ("t", "actor.forward"), ("f", "actor.train")],
        "partition 1": [("s", "rollout.generate"), ("f", "actor.train")],
        "version 1": [("s", "actor.publish"), ("f", "rollout.load_weights")],
    }


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=20))
def test_spans_of_one_row_nest_however_they_overlapped(spans):
    trace = to_trace(
        [span("reward.score", "rollout", at, at + length, group=i) for i, (at, length) in enumerate(spans)]
    )
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sorted(e["args"]["group"] for e in slices) == list(range(len(spans)))
    for a in slices:
        for b in slices:
            if a is not b and a["tid"] == b["tid"]:
                a0, a1, b0, b1 = a["ts"], a["ts"] + a["dur"], b["ts"], b["ts"] + b["dur"]
                assert a1 <= b0 or b1 <= a0 or (a0 <= b0 and b1 <= a1) or (b0 <= a0 and a1 <= b1)


def test_a_file_of_20_000_events_with_40_coroutines_at_once_is_converted_fast(tmp_path):
    with (tmp_path / "events.jsonl").open("w") as file:
        for i in range(10_000):
            file.write(json.dumps(span("reward.score", "rollout", i, i + 40, group=i)) + "\n")
            file.write(json.dumps(span("rollout.generate", "rollout", i, i + 1, thread="engine", partition=i)) + "\n")
    began = time.process_time()
    write_trace(tmp_path / "events.jsonl", tmp_path / "trace.json")
    assert time.process_time() - began < 5  # 0.5 s where measured, 2.5 s for 100,000
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 20_000


def test_a_run_that_ended_before_its_first_event_has_an_empty_trace_and_no_error_of_its_own(tmp_path):
    write_trace(tmp_path / "events.jsonl", tmp_path / "trace.json")
    assert not [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
