"""Ends what a killed run has left of its Ray, and removes its folder. Run as a file, with the standard library alone.

    python guard.py FOLDER FD

Waits until the pipe FD has no writer any more: the driver has ended, without ending this process first. Ray notices
that by itself, but some of its processes take a minute. They are known by FOLDER: in their command line, which some of
them overwrite, or in their environment (MARK).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 2.0
"""For Ray to end by itself."""
LIMIT_S = 30.0


MARK = "_STRETTO_RAY"
"""Variable that the driver sets to the folder, before it starts anything."""


def left_over(folder: str) -> Iterator[int]:
    """Processes of this folder, but for this one."""
    mark = f"{MARK}={folder}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if os.fsencode(folder) in command or mark in environment:
                yield int(entry.name)


def main(folder: str, pipe: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they end the driver, which ends this
    os.read(pipe, 1)
    time.sleep(GRACE_S)
    deadline = time.monotonic() + LIMIT_S
    while (found := list(left_over(folder))) and time.monotonic() < deadline:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
