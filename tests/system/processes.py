"""The processes of a run, told by their environment, whoever started them and whoever is their parent now."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def processes_of(run: Path) -> list[psutil.Process]:
    """Processes alive whose environment has ``TEST_RUN``, which the fixture ``marked`` sets to ``run``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_RUN") == str(run) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until_gone(run: Path, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [p.cmdline() for p in left]
