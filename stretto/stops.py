"""What SIGINT and SIGTERM do to ``stretto train``, from its first heavy import to the end of its last process.

=========  =========================================  ===================================================
phase      SIGINT (Ctrl-C)                            SIGTERM
=========  =========================================  ===================================================
starting   raises KeyboardInterrupt                   raises KeyboardInterrupt
training   raises KeyboardInterrupt                   is noted; the loop ends after the update in progress
ending     nothing: cleaning up takes seconds         nothing
=========  =========================================  ===================================================

Ray passes on no other exception than KeyboardInterrupt, and none with its arguments, so that the reason is kept here:
handlers belong to the process, and so does ``STOPS``. Importing this module loads the standard library alone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""As shells have them."""
SAME_PRESS_S = 1.0
"""A signal this soon after one that raises is the same one: sent to a process and to its group, or pressed twice."""


class Stops:
    """The handlers of this process and what they have seen."""

    def __init__(self) -> None:
        self.phase: Literal["starting", "training", "ending"] = "starting"
        self.signal: signal.Signals | None = None
        """The signal that ended the run, or that asks it to end."""
        self.cause = ""
        """Why ``interrupt`` ended the run."""
        self._raised_at = -SAME_PRESS_S
        self._put_off = False
        self._before: dict[int, Any] = {}

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM came while the run trained: it ends after the update in progress."""
        return self.signal is signal.SIGTERM

    @property
    def name(self) -> str:
        """The signal that ended the run, as users call it."""
        return "SIGTERM" if self.signal is signal.SIGTERM else "Ctrl-C"

    @property
    def says(self) -> str:
        """For a display: what the run does since it was told to end; empty while it was not."""
        if self.terminated and self.phase == "training":
            return "stopping after this update and a checkpoint ..."
        return "stopping ..." if self.signal or self.cause else ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.signal or signal.SIGINT]

    def install(self) -> None:
        """Handle both signals from here on; where SIGINT was ignored (``nohup … &``), it stays so."""
        if not self._before:
            self._before = {number: signal.signal(number, self._handle) for number in EXIT_CODES}

    def ignore(self) -> None:
        """For the end of the process: the interpreter takes handlers away a little before it ends."""
        self.phase = "ending"
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Both signals are handled inside. Where ``install`` came first, they stay handled afterwards."""
        if self._before:
            yield
            return
        self.__init__()  # type: ignore[misc]  # another run of this process may have ended before
        self.install()
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """For what must not be interrupted: nothing is raised inside; ``check`` raises it afterwards."""
        self._put_off = True
        try:
            yield
        finally:
            self._put_off = False

    def check(self) -> None:
        """Raise what was put off, or what other code has swallowed."""
        if self.phase == "starting" and (self.signal or self.cause):
            raise KeyboardInterrupt

    def interrupt(self, cause: str) -> None:
        """End the run for ``cause``; for other threads."""
        self.cause = self.cause or cause
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.cause:
            if number == signal.SIGINT and self._before[number] is signal.SIG_IGN:
                return
            if self.phase == "training" or (self.phase == "starting" and self.signal is None):
                self.signal = signal.Signals(number)
            if number == signal.SIGTERM and self.phase == "training":
                return
        now = time.monotonic()
        if self._put_off or self.phase == "ending" or now - self._raised_at < SAME_PRESS_S:
            return
        self._raised_at = now
        raise KeyboardInterrupt


STOPS = Stops()
