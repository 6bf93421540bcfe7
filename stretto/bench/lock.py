"""One runner at a time in the folder of a campaign."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.types import StrettoError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made; the lock ends with this process, however it ends.

    Raises:
        StrettoError: another runner holds it; says which process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise StrettoError(
                f"{folder} is in use by another runner, process {holder}; wait for it, stop it, or name another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
