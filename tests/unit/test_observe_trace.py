import collections
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from stretto.observe.trace import Counters, Tracer, read_events
from stretto.types import StrettoError


def of_type(events, kind):
    return [e for e in events if e["type"] == kind]


def test_a_span_holds_its_times_thread_attributes_and_what_its_body_added(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "rollout")
    before = time.monotonic_ns()
    with tracer.span("rollout.generate", partition=3) as attrs:
        time.sleep(0.01)
        attrs["tokens"] = np.int64(512)
    after = time.monotonic_ns()
    tracer.flush()
    (span,) = of_type(read_events(tracer.path), "span")
    assert span["name"] == "rollout.generate"
    assert (span["process"], span["thread"]) == ("rollout", threading.current_thread().name)
    assert (span["partition"], span["tokens"]) == (3, 512)
    assert before <= span["start_ns"]
    assert span["end_ns"] <= after
    assert span["end_ns"] - span["start_ns"] >= 10_000_000
    assert tracer.seconds.snapshot()["rollout.generate"] == pytest.approx((span["end_ns"] - span["start_ns"]) / 1e9)


def test_a_span_whose_body_raises_is_recorded_with_the_error_and_the_error_goes_on(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    with pytest.raises(KeyError), tracer.span("loop.step", update=0):
        raise KeyError("x")
    tracer.flush()
    assert of_type(read_events(tracer.path), "span")[0]["error"] == "KeyError"


def test_the_first_line_of_a_process_ties_the_monotonic_clock_to_the_wall_clock(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "actor0")
    tracer.count("tokens", 5)
    tracer.flush()
    first = read_events(tracer.path)[0]
    assert first["type"] == "process"
    assert first["pid"] == os.getpid()
    assert abs((time.time_ns() - time.monotonic_ns()) - (first["unix_ns"] - first["time_ns"])) < 1e9


def test_lines_reach_the_file_within_a_second_without_a_flush(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    tracer.count("bytes", 1)
    deadline = time.monotonic() + 5
    while not tracer.path.exists() or len(read_events(tracer.path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_threads_and_processes_append_whole_lines_and_lose_none(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys, threading\n"
        "from stretto.observe.trace import Tracer\n"
        "tracer = Tracer(sys.argv[1], sys.argv[2])\n"
        "def work():\n"
        "    for i in range(500):\n"
        "        with tracer.span('x.y', i=i, filling='z' * (i % 300)):\n"
        "            pass\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), f"p{i}"]) for i in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    spans = of_type(read_events(path), "span")
    written = collections.Counter((s["process"], s["i"]) for s in spans)
    assert written == {(f"p{p}", i): 3 for p in (0, 1) for i in range(500)}


def test_what_was_recorded_half_a_second_before_a_kill_is_in_the_file(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys, time\nfrom stretto.observe.trace import Tracer\n"
        "Tracer(sys.argv[1], 'p').count('tokens', 7)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(1.0)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    assert [e["value"] for e in of_type(read_events(path), "count")] == [7]


def test_non_finite_attributes_stay_strict_json(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    tracer.count("loss", float("nan"), parts=np.array([1.0, np.inf]))
    tracer.flush()
    line = tracer.path.read_text().splitlines()[1]
    event = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert event["value"] is None
    assert event["parts"] == [1.0, None]


def test_a_cut_last_line_is_left_out_and_does_not_swallow_the_next_session(tmp_path):
    path = tmp_path / "events.jsonl"
    first = Tracer(path, "driver")
    first.count("a", 1)
    first.flush()
    with path.open("a") as file:
        file.write('{"type":"span","na')
    assert [e["name"] for e in read_events(path)] == ["process.start", "a"]
    second = Tracer(path, "driver")
    second.count("b", 2)
    second.flush()
    with pytest.warns(UserWarning, match="1 unreadable"):
        events = read_events(path)
    assert [e["name"] for e in events] == ["process.start", "a", "process.start", "b"]


def test_a_tracer_without_a_path_keeps_nothing_and_still_yields_attributes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracer = Tracer(None, "driver")
    with tracer.span("loop.step", update=1) as attrs:
        assert attrs == {"update": 1}
    tracer.count("x", 1)
    tracer.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_pickled_tracer_writes_to_the_same_file(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    tracer.count("a", 1)
    copy = pickle.loads(pickle.dumps(tracer))
    copy.count("b", 2)
    tracer.flush()
    copy.flush()
    assert {e["name"] for e in of_type(read_events(tracer.path), "count")} == {"a", "b"}


def test_attributes_may_not_hide_the_fields_of_an_event(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    with pytest.raises(ValueError, match="process"):
        tracer.count("a", 1, process="other")


def test_events_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    tracer = Tracer(tmp_path / "runs" / "events.jsonl", "driver")
    tracer.count("a", 1)
    with pytest.raises(StrettoError, match=r"events\.jsonl"):
        tracer.flush()


def test_a_span_costs_less_than_fifty_microseconds(tmp_path):
    tracer = Tracer(tmp_path / "events.jsonl", "driver")
    best = float("inf")
    for _ in range(5):  # the best of a few: the machine is shared
        start = time.perf_counter()
        for i in range(1000):
            with tracer.span("x.y", i=i):
                pass
        best = min(best, time.perf_counter() - start)
    assert best / 1000 < 50e-6


def test_counters_lose_nothing_between_threads_and_take_starts_again():
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("n") for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.add("bytes", 10)
    assert counters.take() == {"n": 20000, "bytes": 10}
    assert counters.snapshot() == {}
