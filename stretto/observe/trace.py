"""Spans and counts of every stage, as lines of ``events.jsonl``.

Several processes append to one file. Each line is one JSON object, written whole; times are nanoseconds of
CLOCK_MONOTONIC, which all processes of one machine and one boot share. The first line of every process,
``{"type": "process", "name": "process.start", ...}``, holds its boot and the same instant on both clocks, so that
readers can place sessions of different boots on one axis.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from stretto.observe.hardware import boot_id
from stretto.types import StrettoError

FLUSH_INTERVAL_S = 0.5
FLUSH_BYTES = 64 * 1024
RESERVED = frozenset({"type", "name", "process", "thread", "start_ns", "end_ns", "time_ns", "value"})


class Counters:
    """Named running sums that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + value

    def snapshot(self) -> dict[str, float]:
        """The sums so far."""
        with self._lock:
            return dict(self._sums)

    def take(self) -> dict[str, float]:
        """The sums since the last ``take``; they start again from zero."""
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums


class _Span:
    __slots__ = ("_attrs", "_name", "_start_ns", "_tracer")

    def __init__(self, tracer: Tracer, name: str, attrs: dict[str, Any]):
        self._tracer, self._name, self._attrs = tracer, name, attrs

    def __enter__(self) -> dict[str, Any]:
        self._start_ns = time.monotonic_ns()
        return self._attrs

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if self._tracer.path is None:
            return
        if kind is not None:
            self._attrs["error"] = kind.__name__
        self._tracer.record(self._name, self._start_ns, time.monotonic_ns(), **self._attrs)


class Tracer:
    """Writes the events of one process (``driver``, ``rollout``, ``actor0``, ``ledger``, …) to ``path``.

    Thread-safe. Lines are buffered, and written within half a second by a daemon thread, at 64 KiB, at ``flush`` and
    at exit. ``Tracer(None, ...)`` keeps nothing. ``seconds`` sums the duration of this process's spans by name.
    A pickled tracer arrives as a new one for the same file.
    """

    def __init__(self, path: Path | str | None, process: str):
        self.path = None if path is None else Path(path)
        self.process = process
        self.seconds = Counters()
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._bytes = 0
        self._file: int | None = None
        self._wake: threading.Event | None = None
        self._failure: OSError | None = None
        self._reported = False

    def __reduce__(self) -> tuple[type[Tracer], tuple[Path | None, str]]:
        return Tracer, (self.path, self.process)

    def span(self, name: str, /, **attrs: Any) -> _Span:
        """Context manager that times its body; yields the dict of attributes, which the body may add to.

        A body that raises is recorded with ``error``, the name of the exception's class.
        """
        return _Span(self, name, attrs)

    def record(self, name: str, start_ns: int, end_ns: int, /, **attrs: Any) -> None:
        """A span timed by the caller, in ``time.monotonic_ns()``. For work whose ends meet in different functions."""
        if self.path is None:
            return
        self.seconds.add(name, (end_ns - start_ns) / 1e9)
        thread = threading.current_thread().name
        self._write({"type": "span", "name": name, "thread": thread, "start_ns": start_ns, "end_ns": end_ns}, attrs)

    def count(self, name: str, value: float, /, **attrs: Any) -> None:
        """A quantity at this instant: samples, tokens, images, bytes. Counts of one name add up."""
        if self.path is None:
            return
        now = time.monotonic_ns()
        self._write(
            {"type": "count", "name": name, "thread": threading.current_thread().name, "time_ns": now, "value": value},
            attrs,
        )

    def flush(self) -> None:
        """Everything recorded so far is in the file when this returns.

        Raises StrettoError when it cannot be written.
        """
        if self.path is None:
            return
        with self._lock:
            self._raise_failure()
            try:
                self._drain()
            except OSError as error:
                self._failure = error
                self._raise_failure()

    def _write(self, event: dict[str, Any], attrs: dict[str, Any]) -> None:
        if not RESERVED.isdisjoint(attrs):
            raise ValueError(f"{event['name']}: attributes may not be named {sorted(RESERVED & attrs.keys())}")
        line = _dumps({**event, "process": self.process, **attrs})
        with self._lock:
            self._raise_failure()
            if self._wake is None:
                self._wake = self._start_flusher()
            if not self._lines:
                self._wake.set()
            self._lines.append(line)
            self._bytes += len(line)
            full = self._bytes >= FLUSH_BYTES
        if full:
            self.flush()

    def _start_flusher(self) -> threading.Event:
        wake = threading.Event()
        threading.Thread(target=self._flush_loop, args=(wake,), name="trace-flush", daemon=True).start()
        atexit.register(self._flush_at_exit)
        return wake

    def _flush_loop(self, wake: threading.Event) -> None:
        while True:
            wake.wait()
            wake.clear()
            time.sleep(FLUSH_INTERVAL_S)
            with self._lock:
                try:
                    self._drain()
                except OSError as error:  # raised again in the thread that records the next event
                    self._failure = error
                    return

    def _flush_at_exit(self) -> None:
        if not self._reported:
            self.flush()

    def _drain(self) -> None:
        """Appends the buffered lines in one write. The caller holds the lock."""
        if not self._lines:
            return
        if self._file is None:
            self._file = self._open()
        data = "".join(self._lines).encode()
        self._lines, self._bytes = [], 0
        while data:
            data = data[os.write(self._file, data) :]

    def _open(self) -> int:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(file).st_size
        start = {
            "type": "process",
            "name": "process.start",
            "process": self.process,
            "pid": os.getpid(),
            "boot": boot_id(),
            "time_ns": time.monotonic_ns(),
            "unix_ns": time.time_ns(),
        }
        # A line that a crash cut short must not swallow the first line of the session that resumes the run.
        cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        self._lines.insert(0, ("\n" if cut else "") + _dumps(start))
        return file

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._reported = True
            raise StrettoError(
                f"cannot write events to {self.path}: {self._failure}; free space there or choose another run.dir"
            )


def _dumps(event: dict[str, Any]) -> str:
    try:
        return json.dumps(event, allow_nan=False, separators=(",", ":"), default=_plain) + "\n"
    except ValueError:  # a NaN or an infinity, which strict JSON has no word for
        return json.dumps(_finite(event), allow_nan=False, separators=(",", ":"), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """JSON for numpy and torch scalars and arrays, paths and sets."""
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset | range):
        return sorted(value)
    raise TypeError(f"an event attribute of type {type(value).__name__} has no JSON form")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """All events of a file, in the order written.

    A last line without an end, as a running or killed process leaves it, is left out. Unreadable lines elsewhere
    (a process killed in the middle of a write) are left out with one warning.
    """
    lines = Path(path).read_bytes().split(b"\n")
    lines.pop()  # empty, or a line that is not finished
    events: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            events.append(json.loads(line))
        except ValueError:
            broken.append(number)
    if broken:
        warnings.warn(f"{path}: {len(broken)} unreadable lines left out, the first is line {broken[0]}", stacklevel=2)
    return events
