"""The processes of a run, told by their environment, whoever started them and whoever is their parent now.

A process may end between being listed and being asked anything, so the questions are asked here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
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


def that_run(word: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of ``processes``, by pid, whose command line has ``word`` somewhere in it."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if any(word in part for part in process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda p: p.pid)


def still_there(pids: Iterable[int], limit_s: float = 10) -> list[psutil.Process]:
    """Those of ``pids`` that have not ended within ``limit_s``; one that waits for its parent to ask has."""
    deadline = time.monotonic() + limit_s
    while True:
        left = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def wait_until_gone(run: Path, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def ports_of(processes: list[psutil.Process]) -> set[int]:
    """Ports that these processes accept connections on."""
    pids = {p.pid for p in processes}
    return {c.laddr.port for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in pids}


def assert_closed(ports: set[int], since: float) -> None:
    """No process that is older than ``since`` (seconds of the epoch) listens on any of the ports, of which there are
    some; younger ones of other runs may have been given the same.
    """
    assert ports
    found = []
    for connection in psutil.net_connections("inet"):
        if connection.status == "LISTEN" and connection.laddr.port in ports and connection.pid:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(connection.pid)
                if process.create_time() < since:
                    found.append((connection.laddr.port, process.cmdline()))
    assert not found
