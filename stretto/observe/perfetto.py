"""``trace.json``: the events of a run in Chrome's trace-event format, which https://ui.perfetto.dev opens.

One process per side, one row per thread; spans are X events, counts are C events (running sums, also of the
tokens, bytes and images that spans name), and arrows (flow
events) lead each partition from its generation to its training and each policy version from publish to load.
Format: "Trace Event Format", Google, sections Complete, Counter, Flow and Metadata Events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stretto.observe.lineage import write_atomically
from stretto.observe.spans import Event, aligned, overlap, step_phases, with_partition
from stretto.observe.trace import read_events

__all__ = ["overlap", "step_phases", "to_trace", "write_trace"]

_SIDES = ("driver", "rollout", "actor", "ledger")
_GENERIC_THREAD = re.compile(r"MainThread|Thread-\d+.*|Dummy-\d+|asyncio_\d+|AsyncIO.*|ThreadPoolExecutor-.*|ray.*")
_ROWS = {"processor": "processor", "rollout": "engine", "reward": "reward", "actor": "actor"}
_PARTITION_FLOW = ("rollout.generate", "actor.forward", "actor.train")
_COUNTED = ("tokens", "bytes", "images")
_FIXED = frozenset({"type", "name", "process", "thread", "start_ns", "end_ns"})
_ROW_ORDER = {"loop": 0, "processor": 1, "engine": 2, "reward": 3}


def write_trace(events_path: Path | str, trace_path: Path | str) -> Path:
    """Converts ``events.jsonl`` (whole, of a run that still goes on, or not there: it ended before its first event) to
    ``trace.json``.
    """
    events = read_events(events_path) if Path(events_path).exists() else []
    trace = to_trace(events)
    write_atomically(Path(trace_path), json.dumps(trace, separators=(",", ":")).encode())
    return Path(trace_path)


def to_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace as a JSON object. Times are microseconds since the first event."""
    recorded = list(events)
    spans = with_partition(recorded)
    counts = [e for e in aligned(recorded) if e["type"] == "count"] + _counts_of(spans)
    origin = min([e["start_ns"] for e in spans] + [e["time_ns"] for e in counts], default=0)
    pids = {name: pid for pid, name in enumerate(sorted({e["process"] for e in spans + counts}, key=_side), 1)}
    placed, metadata = _place(spans, pids)
    out = [*_process_names(pids), *metadata]
    for span, tid in placed:
        out.append(
            {
                "ph": "X",
                "name": span["name"],
                "cat": span["name"].split(".")[0],
                "pid": pids[span["process"]],
                "tid": tid,
                "ts": (span["start_ns"] - origin) / 1e3,
                "dur": (span["end_ns"] - span["start_ns"]) / 1e3,
                "args": {key: value for key, value in span.items() if key not in _FIXED},
            }
        )
    out += _counter_events(counts, pids, origin)
    out += _flows(placed, pids, origin)
    return {"displayTimeUnit": "ms", "traceEvents": out}


def _side(process: str) -> tuple[int, str]:
    for rank, side in enumerate(_SIDES):
        if process.startswith(side):
            return rank, process
    return len(_SIDES), process


def _row(span: Event) -> str:
    """The row of a span: the engine it ran on, its thread's name, or the stage that it belongs to where the thread was
    never given one.
    """
    if "replica" in span:
        return f"engine {span['replica']}"
    thread = span.get("thread", "")
    if thread and not _GENERIC_THREAD.fullmatch(thread):
        return thread.removesuffix("_0")  # as a pool of threads names its first
    return _ROWS.get(span["name"].split(".")[0], "loop")


def _place(spans: list[Event], pids: dict[str, int]) -> tuple[list[tuple[Event, int]], list[dict[str, Any]]]:
    """Gives every span a row (tid). Spans of one row must nest; those that merely overlap, as coroutines of one event
    loop do, go to further rows of the same name.
    """
    rows: dict[tuple[str, str], list[Event]] = {}
    for span in spans:
        rows.setdefault((span["process"], _row(span)), []).append(span)
    placed: list[tuple[Event, int]] = []
    metadata: list[dict[str, Any]] = []
    further: list[bool] = []
    order = sorted(rows, key=lambda key: (pids[key[0]], _ROW_ORDER.get(key[1].split()[0], 9), key[1]))
    for process, row in order:
        lanes: list[list[int]] = []  # per lane, the ends of the spans that are open
        tids: list[int] = []
        for span in sorted(rows[process, row], key=lambda e: (e["start_ns"], -e["end_ns"])):
            lane = _free_lane(lanes, span)
            if lane == len(tids):
                tids.append(1000 + len(metadata))
                name = row if lane == 0 else f"{row} {lane + 1}"
                metadata.append(_named("thread_name", pids[process], tids[lane], name))
                further.append(lane > 0)
            placed.append((span, tids[lane]))
    # The first row of every thread on top: dozens of coroutines must not push the engine out of sight.
    shown = [m for _, m in sorted(zip(further, metadata, strict=True), key=lambda pair: pair[0])]
    indexes = [{**m, "name": "thread_sort_index", "args": {"sort_index": i}} for i, m in enumerate(shown)]
    return placed, metadata + indexes


def _free_lane(lanes: list[list[int]], span: Event) -> int:
    for lane, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= span["start_ns"]:
            open_ends.pop()
        if not open_ends or span["end_ns"] <= open_ends[-1]:
            open_ends.append(span["end_ns"])
            return lane
    lanes.append([span["end_ns"]])
    return len(lanes) - 1


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _process_names(pids: dict[str, int]) -> list[dict[str, Any]]:
    names = [_named("process_name", pid, 0, name) for name, pid in pids.items()]
    order = [
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for pid in pids.values()
    ]
    return names + order


def _counts_of(spans: list[Event]) -> list[Event]:
    """What spans say they moved or made, as counts at their end: ``rollout.generate tokens``."""
    return [
        {"process": e["process"], "name": f"{e['name']} {what}", "time_ns": e["end_ns"], "value": e[what]}
        for e in spans
        for what in _COUNTED
        if what in e
    ]


def _counter_events(counts: list[Event], pids: dict[str, int], origin: int) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], float] = {}
    out = []
    for count in sorted(counts, key=lambda e: e["time_ns"]):
        key = count["process"], count["name"]
        sums[key] = sums.get(key, 0) + (count["value"] or 0)
        out.append(
            {
                "ph": "C",
                "name": count["name"],
                "pid": pids[count["process"]],
                "ts": (count["time_ns"] - origin) / 1e3,
                "args": {"total": sums[key]},
            }
        )
    return out


def _flows(placed: list[tuple[Event, int]], pids: dict[str, int], origin: int) -> list[dict[str, Any]]:
    partitions: dict[tuple[int, str], tuple[Event, int]] = {}
    published: dict[int, tuple[Event, int]] = {}
    loaded: dict[int, tuple[Event, int]] = {}
    for span, tid in placed:
        name, partition, version = span["name"], span.get("partition"), span.get("version")
        if name in _PARTITION_FLOW and partition is not None:
            partitions.setdefault((partition, name), (span, tid))
        elif name == "actor.publish" and version is not None:
            published[version] = span, tid
        elif name == "rollout.load_weights" and version is not None:
            loaded.setdefault(version, (span, tid))
    chains = [
        (f"partition {k}", [partitions[k, name] for name in _PARTITION_FLOW if (k, name) in partitions])
        for k in sorted({k for k, _ in partitions})
    ]
    chains += [(f"version {v}", [published[v], loaded[v]]) for v in sorted(published.keys() & loaded.keys())]
    out = []
    for name, chain in chains:
        for i, (span, tid) in enumerate(chain if len(chain) > 1 else []):
            out.append(
                {
                    "ph": "s" if i == 0 else "f" if i == len(chain) - 1 else "t",
                    "bp": "e",
                    "cat": "flow",
                    "name": name,
                    "id": name,
                    "pid": pids[span["process"]],
                    "tid": tid,
                    "ts": (span["start_ns"] - origin) / 1e3,
                }
            )
    return out
