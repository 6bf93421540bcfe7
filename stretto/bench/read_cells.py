"""Reads what one attempt has left. Nothing is written, nothing is judged: what cannot be read is said."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stretto import switches
from stretto.bench.campaign import Attempt
from stretto.bench.phases import busy, measured_times, phases, step_starts
from stretto.bench.plan import Plan, Window
from stretto.bench.results import Gpu, Hardware
from stretto.bench.sampler import GpuName, Sample, read_hardware
from stretto.config import Config
from stretto.observe.manifest import read_manifest
from stretto.observe.metrics import read_fingerprints, read_metrics
from stretto.observe.spans import Interval
from stretto.observe.trace import read_events
from stretto.switches.base import Evidence
from stretto.types import StrettoError

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Read:
    """One attempt, as it was read.

    session       the last one of its manifest; empty where that cannot be read
    sessions      how many it has
    rows          lines of metrics.jsonl
    fingerprints  lines of fingerprints.jsonl; none: they were not written
    phases, busy  seconds an update in the windows
    hardware      in the windows; None: not sampled
    evidence      letter of each switch that is on -> what the events show of it
    problems      what cannot be read, one line each
    """

    attempt: Attempt
    session: Mapping[str, Any]
    sessions: int
    config: Config | None
    rows: tuple[Row, ...]
    fingerprints: tuple[Row, ...]
    phases: Mapping[str, float]
    busy: Mapping[str, float]
    hardware: Hardware | None
    evidence: Mapping[str, Evidence]
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.attempt.name

    def series(self, metric: str) -> tuple[float | None, ...]:
        """One value an update; None where a line has no finite one."""
        return tuple(number(row.get(metric)) for row in self.rows)

    def measured(self, metric: str, windows: Sequence[Window]) -> tuple[float, ...]:
        """The values in the windows that are numbers."""
        found = self.series(metric)
        inside = (found[k] for window in windows for k in range(window.first, min(window.last + 1, len(found))))
        return tuple(value for value in inside if value is not None)

    def mean(self, metric: str, windows: Sequence[Window]) -> float | None:
        """None: no update in the windows has it."""
        values = self.measured(metric, windows)
        return math.fsum(values) / len(values) if values else None


def number(value: Any) -> float | None:
    """None for what is no finite number."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def read_cell(attempt: Attempt, plan: Plan) -> Read:
    """Everything of an attempt that an analysis needs; its events are read once, and not kept."""
    run, windows = attempt.run_dir, plan.measured
    problems: list[str] = []
    session: Mapping[str, Any] = {}
    sessions = 0
    config: Config | None = None
    rows: tuple[Row, ...] = ()
    prints: tuple[Row, ...] = ()
    try:
        read = read_manifest(run)["sessions"]
        session, sessions = dict(read[-1]), len(read)
        config = Config.model_validate_json(json.dumps(session["config"]))
    except ValidationError as error:
        problems.append(f"manifest.json: its config is none that this version knows: {error.error_count()} problems")
    except (LookupError, TypeError, ValueError, StrettoError) as error:
        problems.append(f"manifest.json: {error!r}")
    try:
        rows = _objects(read_metrics(run))
        prints = _objects(read_fingerprints(run)) if (run / "fingerprints.jsonl").exists() else ()
    except (OSError, ValueError) as error:
        problems.append(f"metrics.jsonl or fingerprints.jsonl: {error}")
    parts: dict[str, float] = {}
    worked: dict[str, float] = {}
    evidence: dict[str, Evidence] = {}
    found: Hardware | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # it warns of lines that it leaves out
            events = read_events(run / "events.jsonl")
        if config is not None:
            evidence = {switch.letter: switch.engaged(events) for switch in switches.on(config)}
        times = _times(step_starts(events, len(rows)), rows, windows)
        if times:
            updates = sum(window.updates for window in windows)
            step_s = math.fsum(float(rows[k]["step_s"]) for w in windows for k in range(w.first, w.last + 1)) / updates
            parts = phases(events, times, updates, step_s)
            worked = busy(events, times, updates)
            found = hardware_in(attempt.hardware_path, times)
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, StrettoError, UserWarning) as error:
        problems.append(f"events.jsonl or hardware.jsonl: {error!r}")
    return Read(
        attempt=attempt,
        session=session,
        sessions=sessions,
        config=config,
        rows=rows,
        fingerprints=prints,
        phases=parts,
        busy=worked,
        hardware=found,
        evidence=evidence,
        problems=tuple(problems),
    )


def _objects(lines: Sequence[Any]) -> tuple[Row, ...]:
    if not all(isinstance(line, dict) for line in lines):
        raise ValueError("a line is no JSON object")
    return tuple(lines)


def _times(starts: Sequence[int], rows: Sequence[Row], windows: Sequence[Window]) -> tuple[Interval, ...]:
    """None where the run does not reach a window, or a step of a window has no length."""
    step_s = [number(row.get("step_s")) for row in rows]
    if any(window.last >= len(rows) for window in windows) or None in step_s:
        return ()
    return measured_times(starts, [value or 0.0 for value in step_s], windows)


# Hardware ------------------------------------------------------------------------------------------------------------


def hardware_in(path: Path, times: Sequence[Interval]) -> Hardware | None:
    """Of the samples that, from the one before on, lie within one of ``times``. None: there is no file, or none does.

    Raises:
        StrettoError: a file that cannot be read.
    """
    if not path.exists():
        return None
    start, samples = read_hardware(path)
    spans = [(before.time_ns, sample) for before, sample in pairwise(samples)]
    inside = [sample for since, sample in spans if any(low <= since and sample.time_ns <= high for low, high in times)]
    if not inside:
        return None
    return Hardware(
        own_cores=_mean([s.own_cores for s in inside]),
        other_cores=_mean([s.other_cores for s in inside]),
        steal_cores=_mean([s.steal_cores for s in inside]),
        peak_rss_bytes=float(max(s.rss_bytes for s in inside)),
        samples=len(inside),
        gpus=tuple(gpu for known in start.gpus if (gpu := _gpu(known, inside)) is not None),
        gpu_told=start.gpu_told,
    )


def _gpu(known: GpuName, samples: Sequence[Sample]) -> Gpu | None:
    """None: no sample has it."""
    found = [gpu for sample in samples for gpu in sample.gpus if gpu.uuid == known.uuid]
    if not found:
        return None
    busy_percent = [gpu.utilisation_percent for gpu in found if gpu.utilisation_percent is not None]
    memory = [gpu.memory_bytes for gpu in found if gpu.memory_bytes is not None]
    power = [gpu.power_w for gpu in found if gpu.power_w is not None]
    return Gpu(
        uuid=known.uuid,
        name=known.name,
        utilisation_percent=_mean(busy_percent) if busy_percent else None,
        peak_memory_bytes=float(max(memory)) if memory else None,
        power_w=_mean(power) if power else None,
        samples=len(found),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
