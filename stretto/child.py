"""Commands that start others: a child process with its log, how it is ended, and what its end says."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.stops import STOPS

PROGRAM = (sys.executable, "-m", "stretto.cli")
"""``stretto``, by the interpreter and the package of this process."""
ENDS_WITHIN_S = {signal.SIGINT: 10.0, signal.SIGTERM: 50.0}
"""What a child is sent, and how long it may take before the next."""
POLL_S = 0.1
LOG_LINES = 20


def run_logged(
    command: Sequence[str],
    log: Path,
    *,
    each: Callable[[], None] = lambda: None,
    started: Callable[[int], None] = lambda pid: None,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """The exit code of ``command``, whose output goes to ``log``; ``each`` is called now and then while it runs.

    Whatever is raised meanwhile, an interrupt of this process too, ends the child first. After an interrupt further
    signals do nothing: this process is about to end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    asked = STOPS.signal
    try:
        with log.open("w") as file, STOPS.put_off():  # no child is ever without this process knowing of it
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=None if environment is None else dict(environment),
            )
        if STOPS.signal is not asked:
            STOPS.check()
        started(process.pid)
        while process.poll() is None:
            time.sleep(POLL_S)
            each()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            STOPS.phase = "ending"  # who presses Ctrl-C again would leave the child without anyone who ends it
        if process is not None:
            with STOPS.put_off():
                end(process)
        if STOPS.signal is not asked:
            STOPS.check()
        raise
    return process.returncode


def end(process: subprocess.Popen[bytes]) -> None:
    """It is killed where it does not end. A terminal's Ctrl-C has reached it already; anything else has not, and under
    ``nohup … &`` a child ignores SIGINT, as its parent does.
    """
    for number, limit_s in ENDS_WITHIN_S.items():
        process.send_signal(number)
        try:
            process.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def last_lines(log: Path) -> str:
    """The end of a log, indented."""
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def count_lines(path: Path) -> int:
    """0: there is no such file."""
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def left_s(done: Sequence[tuple[str, float]], todo: Sequence[str]) -> float:
    """Seconds that work of these kinds takes: as long as the median of its kind in ``done`` (kind, seconds), or of all
    where there is none of its kind yet.
    """
    walls: dict[str, list[float]] = {}
    for kind, wall_s in done:
        walls.setdefault(kind, []).append(wall_s)
    everything = [wall_s for _, wall_s in done]
    return sum(statistics.median(walls.get(kind, everything)) for kind in todo)
