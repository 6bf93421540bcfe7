"""Where prompts are processed (image resizing, patches, chat template, tokens): the seam of the processor pool.

A runner is used from the event loop of the rollout process and never does its work there. Requests are begun in the
order in which they are made; who asks once per prompt group and awaits its own request gets results in any order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from stretto.observe.trace import Tracer
from stretto.types import ProcessedPrompt, Prompt, StrettoError

ProcessFn = Callable[[Prompt], ProcessedPrompt]
"""Processes one prompt. For a pool of processes it must survive pickling, with everything that it is bound to: a
family's bound ``process`` method (a tokenizer, an image processor and a config) does, a closure does not."""


class Clock:
    """How long requests took and queued, and what they moved, from any thread; ``take`` gives it and begins anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[tuple[float, float, int]] = []
        self.restarts = 0

    def add(self, seconds: float, wait_s: float, moved_bytes: int = 0) -> None:
        with self._lock:
            self._all.append((seconds, wait_s, moved_bytes))

    def take(self) -> dict[str, float]:
        """Of the requests since the last call: ``processor_s`` and ``processor_max_s``, the seconds of work, summed and
        of the longest; ``processor_wait_s``, the mean seconds in the queue; ``processor_bytes``, moved to and from
        other processes. ``processor_restarts``: processes that were replaced so far.
        """
        with self._lock:
            taken, self._all = self._all, []
        count = max(len(taken), 1)
        return {
            "processor_s": sum(seconds for seconds, _, _ in taken),
            "processor_max_s": max((seconds for seconds, _, _ in taken), default=0.0),
            "processor_wait_s": sum(wait_s for _, wait_s, _ in taken) / count,
            "processor_bytes": sum(moved for _, _, moved in taken),
            "processor_restarts": self.restarts,
        }


class ProcessorRunner(Protocol):
    """Runs a ``ProcessFn`` off the event loop. Same results, in the same order, for every implementation."""

    clock: Clock

    async def start(self) -> None:
        """Makes it ready for requests. Raises StrettoError where it cannot be."""
        ...

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        """The processed prompt; call it once per prompt group.

        Raises:
            StrettoError: processing failed, with the row id and the reason; other requests are unaffected.
        """
        ...

    def close(self) -> None:
        """Ends threads and processes; requests that have not begun fail. May be called twice."""
        ...


def failure(prompt: Prompt, error: BaseException) -> StrettoError:
    """``error`` if it names the row, else one that does: whatever a library raises says nothing of it."""
    if isinstance(error, StrettoError) and prompt.row_id in str(error):
        return error
    return StrettoError(f"row {prompt.row_id}: processing failed: {type(error).__name__}: {error}")


class InlineProcessor:
    """The runner of the baseline: one thread of the rollout process, which takes requests first come, first served.

    Every request leaves a span ``processor.process`` with its ``row_id``, ``images`` and ``wait_s``, the seconds it
    queued.
    """

    def __init__(self, process: ProcessFn, tracer: Tracer):
        self._process = process
        self._tracer = tracer
        self.clock = Clock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="processor")

    async def start(self) -> None:
        pass

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        try:
            future = self._thread.submit(self._run, prompt, time.monotonic())
        except RuntimeError as error:
            raise StrettoError(f"row {prompt.row_id}: asked of a processor that is closed") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise StrettoError(f"row {prompt.row_id}: the processor was closed before its turn came") from None

    def _run(self, prompt: Prompt, asked_s: float) -> ProcessedPrompt:
        begun = time.monotonic()
        wait_s = begun - asked_s
        with self._tracer.span(
            "processor.process", row_id=prompt.row_id, images=len(prompt.images), wait_s=round(wait_s, 6)
        ):
            try:
                return self._process(prompt)
            except Exception as error:
                told = failure(prompt, error)
                if told is error:
                    raise
                raise told from error
            finally:
                self.clock.add(time.monotonic() - begun, wait_s)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
