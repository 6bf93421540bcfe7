"""The processes of a run, told by their environment, whoever started them and whoever is their parent now."""

from __future__ import annotations

import time
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


def wait_until_gone(run: Path, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [p.cmdline() for p in left]


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
