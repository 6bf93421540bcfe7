"""``metrics.jsonl`` and TensorBoard, and the small pure functions that metrics are made with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.observe.lineage import UpdateLines, read_lines
from stretto.types import StrettoError


@dataclass(frozen=True)
class Mean:
    """A weighted mean that can be added to others: over microbatches, ranks, or updates.

    ``count`` values entered with ``weight`` in all; ``nonfinite`` others were NaN or infinite and did not.
    """

    total: float = 0.0
    weight: float = 0.0
    count: int = 0
    nonfinite: int = 0

    @property
    def value(self) -> float:
        """NaN where nothing has weight."""
        return self.total / self.weight if self.weight else math.nan

    def __add__(self, other: Mean) -> Mean:
        return Mean(
            self.total + other.total,
            self.weight + other.weight,
            self.count + other.count,
            self.nonfinite + other.nonfinite,
        )


def weighted_mean(values: Iterable[float], weights: Iterable[float] | None = None) -> Mean:
    """The mean of the finite values; a value of weight 0 (an empty microbatch) counts for nothing, whatever it is.

    Raises ValueError when the weights are not as many as the values, or negative.
    """
    listed = [float(v) for v in values]
    scales = [1.0] * len(listed) if weights is None else [float(w) for w in weights]
    if len(listed) != len(scales) or any(not w >= 0 for w in scales):
        raise ValueError(f"{len(listed)} values need as many weights >= 0, not {scales}")
    weighed = [(v, w) for v, w in zip(listed, scales, strict=True) if w > 0]
    finite = [(v, w) for v, w in weighed if math.isfinite(v)]
    return Mean(
        total=math.fsum(v * w for v, w in finite),
        weight=math.fsum(w for _, w in finite),
        count=len(finite),
        nonfinite=len(weighed) - len(finite),
    )


def add_means(parts: Iterable[Mapping[str, Mean]]) -> dict[str, Mean]:
    """Adds the ranks' metrics by name; a name that only some ranks have is the mean of those."""
    total: dict[str, Mean] = {}
    for part in parts:
        for name, mean in part.items():
            total[name] = total.get(name, Mean()) + mean
    return total


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over a window of ``steps`` steps, the first of which is step ``first``."""

    tokens: float
    seconds: float
    first: int
    steps: int

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds


def throughput(tokens: Sequence[float], seconds: Sequence[float], *, warmup: int = 0, min_steps: int = 1) -> Throughput:
    """sum(tokens) / sum(seconds) of the steps after ``warmup``: never a mean of rates. Real tokens, no padding.

    ``seconds`` are those of consecutive steps; for work that overlaps, pass the seconds of its union
    (``stretto.observe.spans.seconds``). Raises StrettoError for a window of fewer than ``min_steps`` steps.
    """
    if len(tokens) != len(seconds):
        raise ValueError(f"{len(tokens)} token counts, {len(seconds)} durations")
    measured_tokens, measured_s = tokens[warmup:], seconds[warmup:]
    if len(measured_s) < max(1, min_steps) or sum(measured_s) <= 0:
        raise StrettoError(
            f"a throughput needs at least {max(1, min_steps)} measured steps; {len(seconds)} steps less a warm-up of "
            f"{warmup} leave {len(measured_s)}: run more updates or declare a shorter warm-up"
        )
    return Throughput(math.fsum(measured_tokens), math.fsum(measured_s), warmup, len(measured_s))


def plain_line(update: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A line of ``metrics.jsonl``: ``metrics``, ``update``, and ``nonfinite``, the number of values that were NaN or
    infinite and are null in the line. Values are numbers, numpy or torch scalars, strings, bools, None, or lists and
    dicts of these. The line of a line is the same, for what is null by then.
    """
    row, nonfinite = _plain(metrics)
    return row | {"update": update, "nonfinite": nonfinite + int(metrics.get("nonfinite", 0))}


class MetricsWriter:
    """One line per update in ``metrics.jsonl``, and the same numbers as TensorBoard scalars under ``tensorboard/``.

    Opening at ``first_update`` (0, or where a resumed run goes on) moves lines of that update and later ones to
    ``metrics.undone.jsonl``; TensorBoard drops those steps too.
    """

    def __init__(self, run_dir: Path | str, first_update: int = 0):
        self._lines = UpdateLines(Path(run_dir) / "metrics.jsonl", first_update)
        self._board = _Board(Path(run_dir) / "tensorboard", first_update)

    def write(self, update: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Appends and returns ``plain_line``."""
        row = plain_line(update, metrics)
        self._lines.append(row)
        self._board.scalars(update, row)
        return row

    def close(self) -> None:
        self._lines.close()
        self._board.close()


class FingerprintWriter:
    """One line per update in ``fingerprints.jsonl``: ``update``, and 16 hex digits per collection."""

    def __init__(self, run_dir: Path | str, first_update: int = 0):
        self._lines = UpdateLines(Path(run_dir) / "fingerprints.jsonl", first_update)

    def write(self, update: int, fingerprints: Mapping[str, Any]) -> None:
        self._lines.append({**fingerprints, "update": update})

    def close(self) -> None:
        self._lines.close()


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    return read_lines(Path(run_dir) / "metrics.jsonl")


def read_fingerprints(run_dir: Path | str) -> list[dict[str, Any]]:
    return read_lines(Path(run_dir) / "fingerprints.jsonl")


def _plain(value: Any) -> tuple[Any, int]:
    """Strict-JSON form of a value, and how many non-finite numbers became null in it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None, 1
    if isinstance(value, Mapping):
        found = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, (item, _) in found.items()}, sum(n for _, n in found.values())
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return [item for item, _ in items], sum(n for _, n in items)
    return value, 0


class _Board:
    """TensorBoard's own event-file writer, without TensorFlow."""

    def __init__(self, directory: Path, first_update: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if first_update:  # readers discard earlier events of this step and later ones
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_update, session_log=start))

    def scalars(self, step: int, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "update"
        ]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
