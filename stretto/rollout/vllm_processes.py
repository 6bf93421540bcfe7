"""vLLM's processes below an engine: calls that fail when one of them ends, and their end, also with their engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from stretto.rollout.engine import EngineLost
from stretto.types import StrettoError

WATCH_S = 0.3
"""Between two looks at the processes. vLLM tells of a core that died, but a call waits forever for a worker that ended
while it was idle."""

ENGINE_VARIABLE = "ENGINE_OF_STRETTO"
"""Environment variable of vLLM's processes: the pid of the engine that they belong to."""

CORE = "EngineCore"
"""In the title of vLLM's core."""

T = TypeVar("T")


class Processes:
    """To be made on the event loop that its calls are awaited on."""

    def __init__(self, processes: Sequence[psutil.Process]):
        self._processes = processes
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._gone.done():
            for process in self._processes:
                if not _lives(process):
                    self._end(f"vLLM's process {process.pid} has ended; what it wrote last says why")
            await asyncio.sleep(WATCH_S)

    def _end(self, why: str) -> None:
        if not self._gone.done():
            self._gone.set_result(why)

    async def alive(self, call: Awaitable[T]) -> T:
        """What ``call`` returns or raises; cancelling this cancels it.

        Raises:
            EngineLost: a process has ended before the call did.
        """
        task = asyncio.ensure_future(call)
        try:
            both: set[asyncio.Future[Any]] = {task, self._gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
        if task.cancelled():
            raise EngineLost(self._gone.result())
        error = task.exception()
        if error is not None and not isinstance(error, StrettoError):
            # What a call says of a process that died is less than which one did.
            await asyncio.wait({self._gone}, timeout=2 * WATCH_S)
            if self._gone.done():
                raise EngineLost(self._gone.result()) from error
        return task.result()

    def kill(self) -> None:
        """Calls that run fail."""
        self._end("it was ended")
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def wait(self, limit_s: float) -> None:
        """Until they are gone."""
        await asyncio.to_thread(psutil.wait_procs, self._processes, limit_s)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_with_the_engine() -> None:
    """To be called in a worker: when the engine's process has ended, however it did, end this one and the core. vLLM's
    core would wait for requests forever.
    """
    engine = int(os.environ[ENGINE_VARIABLE])
    core = None  # a worker may live in the core's process; and whoever adopted an orphan is not ours to end
    with suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        # The title that vLLM gives it takes the place of its environment, too.
        if parent.pid != engine and any(CORE in part for part in parent.cmdline()):
            core = parent
    threading.Thread(target=_end_after, args=(engine, core), name="engine-watch", daemon=True).start()


def _end_after(engine: int, core: psutil.Process | None) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(engine)
        while _lives(process):
            time.sleep(WATCH_S)
    if core is not None:
        with suppress(psutil.NoSuchProcess):
            core.kill()
    os.kill(os.getpid(), signal.SIGKILL)
