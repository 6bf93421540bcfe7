"""The runner of switch P: prompts are processed in ``size`` worker processes, one thread each.

    process(prompt) ─► queue ─► thread i ⇄ worker process i (``pool_worker``)      i = 0 .. size - 1

A thread owns its process: it starts it, hands it one prompt at a time, and replaces it where it dies. Prompts and
results pass through memory that both sides map and that has no name (see ``pool_worker``), so images and pixels never
go through a pipe, and nothing can be left behind. The event loop only queues and awaits.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.data import pool_worker
from stretto.data.pool_worker import FILE_NAME, KEPT_BYTES, Channel, pack, unpack
from stretto.data.processor import Clock, ProcessFn
from stretto.observe.trace import Tracer
from stretto.types import ProcessedPrompt, Prompt, StrettoError

START_LIMIT_S = 600.0
START_ATTEMPTS = 3
TRIES = 2
POLL_S = 0.5
CLOSE_S = 1.0
ENVIRONMENT = {
    # One thread each.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The C library gives memory back after every image and asks for it again for the next: half of the work itself.
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(2 * KEPT_BYTES),
}


class ProcessorPool:
    """Runs ``process`` in ``size`` processes, which are spawned, never forked, and have one thread each.

    Use: ``await start()``, any number of concurrent ``await process(...)``, ``close()``; all from one event loop.
    Requests are begun in the order in which they are made. A worker that dies is replaced and its request tried once
    more. Workers run on the cores of the thread that calls ``start``, and end with ``close`` or with this process,
    whatever ends it. Every request leaves a span ``processor.process`` with its ``row_id``, ``images``, ``wait_s`` (the
    seconds it queued), ``worker`` (the process id) and ``bytes`` (moved there and back).
    """

    def __init__(self, process: ProcessFn, size: int, tracer: Tracer):
        if size < 1:
            raise ValueError(f"a pool of {size} processes: without any, the inline processor does the work")
        self._process = process
        self.clock = Clock()
        self._shared = _Shared(tracer, self.clock)
        self._lanes = [_Lane(i, self._shared) for i in range(size)]
        self._started = False

    async def start(self) -> None:
        """Starts the processes and has each of them load the process function.

        Raises:
            StrettoError: the function cannot be pickled or not be loaded, or a process does not start.
        """
        try:
            function = await asyncio.to_thread(pickle.dumps, self._process, 5)
        except Exception as error:  # objects that refuse to be pickled raise anything
            raise StrettoError(
                f"the processor pool cannot hand {_name(self._process)} to its processes ({_line(error)}); give it a "
                "function of a module, or a method of an object that can be pickled"
            ) from error
        self._shared.setup = {"path": list(sys.path), "function": function}
        self._started = True
        for lane in self._lanes:
            lane.start()
        try:
            await asyncio.gather(*(asyncio.wrap_future(lane.ready) for lane in self._lanes))
        except BaseException:
            self.close()
            raise

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        """The processed prompt.

        Raises:
            StrettoError: names the row. Processing failed; or the prompt or its result cannot be pickled; or the
                worker died of it twice; or no worker can be started any more; or the pool is not running.
        """
        if not self._started or self._shared.closing.is_set():
            state = "closed" if self._started else "not started"
            raise StrettoError(f"row {prompt.row_id}: asked of a processor that is {state}")
        job = _Job(prompt)
        self._shared.jobs.put(job)
        return await asyncio.wrap_future(job.result)

    def facts(self) -> dict[str, Any]:
        """What the pool has done: ``size``; ``workers``, requests answered by the id of every process that there has
        been; ``replaced``, how many of these took the place of one that died; ``bytes_to_workers`` and
        ``bytes_from_workers``, moved by shared memory.
        """
        workers: dict[str, int] = {}
        for lane in self._lanes:
            for pid, jobs in list(lane.workers.items()):
                workers[str(pid)] = workers.get(str(pid), 0) + jobs
        return {
            "size": len(self._lanes),
            "workers": workers,
            "replaced": sum(lane.replaced for lane in self._lanes),
            "bytes_to_workers": sum(lane.bytes_to for lane in self._lanes),
            "bytes_from_workers": sum(lane.bytes_from for lane in self._lanes),
        }

    def close(self) -> None:
        """Ends threads and processes. Requests that have begun get a second to end; all others fail at once. May be
        called twice.
        """
        self._shared.closing.set()
        for _ in self._lanes:
            self._shared.jobs.put(None)
        lanes = [lane for lane in self._lanes if lane.is_alive()]
        deadline = time.monotonic() + CLOSE_S
        for lane in lanes:
            if not lane.ready.done():
                lane.kill()  # it has no request to end
        for lane in lanes:
            lane.join(max(0.0, deadline - time.monotonic()))
        for lane in lanes:
            lane.kill()
        for lane in lanes:
            lane.join()
        while not self._shared.jobs.empty():
            if (job := self._shared.jobs.get()) is not None and job.result.set_running_or_notify_cancel():
                job.result.set_exception(_closed(job.prompt))


class _Closing(Exception):
    """The pool is being closed."""


class _Job:
    """One request on its way."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        self.asked_s = time.monotonic()
        self.result: Future[ProcessedPrompt] = Future()


@dataclass
class _Shared:
    """What all lanes of a pool have in common. ``broken``: why no further worker can be started."""

    tracer: Tracer
    clock: Clock
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    closing: threading.Event = field(default_factory=threading.Event)
    setup: dict[str, Any] = field(default_factory=dict)
    broken: str = ""


class _Lane(threading.Thread):
    """The thread that owns one worker. The worker dies with this thread, so it lives as long as the pool."""

    def __init__(self, index: int, shared: _Shared):
        super().__init__(name=f"processor {index}", daemon=True)
        self.ready: Future[None] = Future()
        self.workers: dict[int, int] = {}
        self.replaced = self.bytes_to = self.bytes_from = 0
        self._shared = shared
        self._worker: _Worker | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            self._live_worker()
        except _Closing:
            self.ready.set_exception(StrettoError("the processor was closed while it started"))
        except BaseException as error:  # belongs to whoever awaits the start
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)
            while (job := self._shared.jobs.get()) is not None:
                if job.result.set_running_or_notify_cancel():
                    self._serve(job)
                del job  # or it would keep its prompt and its result until the next one comes
        if self._worker is not None:
            self._worker.end()

    def kill(self) -> None:
        """From another thread, once the pool is closing: ends the worker, and with it whatever it does."""
        with self._lock:
            if self._worker is not None:
                self._worker.kill()

    def _serve(self, job: _Job) -> None:
        prompt = job.prompt
        begun = time.monotonic()
        waited = round(begun - job.asked_s, 6)
        try:
            if self._shared.closing.is_set():
                raise _closed(prompt)
            if self._shared.broken:
                raise StrettoError(f"row {prompt.row_id}: {self._shared.broken}")
            with self._shared.tracer.span(
                "processor.process", row_id=prompt.row_id, images=len(prompt.images), wait_s=waited
            ) as span:
                before = self.bytes_to + self.bytes_from
                try:
                    result = self._result(prompt, span)
                finally:
                    span["bytes"] = self.bytes_to + self.bytes_from - before
                    self._shared.clock.add(time.monotonic() - begun, waited, span["bytes"])
        except BaseException as error:  # belongs to whoever awaits the request, as in concurrent.futures
            job.result.set_exception(error)
        else:
            job.result.set_result(result)

    def _result(self, prompt: Prompt, span: dict[str, Any]) -> ProcessedPrompt:
        ends: list[str] = []
        while len(ends) < TRIES:
            try:
                worker = self._live_worker()
            except _Closing:
                raise _closed(prompt, begun=True) from None
            except StrettoError as error:
                self._shared.broken = str(error)
                raise StrettoError(f"row {prompt.row_id}: {error}") from error
            span["worker"] = worker.pid
            try:
                job = pack(prompt)
            except Exception as error:  # objects that refuse to be pickled raise anything
                raise StrettoError(f"row {prompt.row_id}: cannot be sent to a worker: {_line(error)}") from error
            try:
                answer = self._ask(worker, job)
            except ConnectionError:
                ends.append(worker.end())
                continue
            except (OSError, MemoryError) as error:  # too little memory, or too many open files
                raise StrettoError(f"row {prompt.row_id}: cannot be passed to a worker or back: {error}") from error
            self.workers[worker.pid] += 1
            return _told(prompt, answer)
        if self._shared.closing.is_set():
            raise _closed(prompt, begun=True)
        how = ", then ".join(ends)
        if "SIGKILL" in ends:
            how += "; mostly a lack of memory: use fewer processes or smaller images"
        raise StrettoError(f"row {prompt.row_id}: processing it ended its worker process {TRIES} times ({how})")

    def _ask(self, worker: _Worker, message: list[memoryview], limit_s: float | None = None) -> list[np.ndarray]:
        self.bytes_to += worker.channel.send(message)
        answer = worker.receive(limit_s)
        self.bytes_from += sum(len(part) for part in answer)
        return answer

    def _live_worker(self) -> _Worker:
        """The worker, or a new one that is ready.

        Raises:
            _Closing: the pool is closing.
            StrettoError: none can be started.
        """
        if self._worker is not None and not self._worker.dead():
            return self._worker
        ends: list[str] = []
        while len(ends) < START_ATTEMPTS:
            worker = self._new_worker()
            try:
                kind, *told = unpack(self._ask(worker, pack(self._shared.setup), START_LIMIT_S))
            except ConnectionError:
                ends.append(worker.end())
                continue
            except TimeoutError:
                worker.end()
                raise StrettoError(f"a processor worker was not ready within {START_LIMIT_S:g} s") from None
            except OSError as error:
                raise _no_start(error) from error
            if kind == "refused":
                raise StrettoError(
                    f"a processor worker cannot load its process function ({told[0]}); what it needs must be "
                    "importable, and not of the script that was started"
                )
            return worker
        raise StrettoError(
            f"a processor worker ended {START_ATTEMPTS} times while it started ({', then '.join(ends)}); its error "
            "output is above"
        )

    def _new_worker(self) -> _Worker:
        with self._lock:
            if self._shared.closing.is_set():
                raise _Closing
            if self._worker is not None:
                self._worker.end()
                self.replaced += 1
                self._shared.clock.restarts += 1
            try:
                self._worker = _Worker()
            except OSError as error:
                raise _no_start(error) from error
            self.workers.setdefault(self._worker.pid, 0)
            return self._worker


def _told(prompt: Prompt, answer: list[np.ndarray]) -> ProcessedPrompt:
    """The result that a worker's answer holds. Raises StrettoError: it holds none."""
    try:
        kind, *told = unpack(answer)
    except Exception as error:
        raise StrettoError(f"row {prompt.row_id}: its result cannot be read: {_line(error)}") from error
    if kind == "done":
        return told[0]
    if kind == "failed":
        failed = StrettoError(told[0])
        failed.add_note(told[1])  # the traceback of the worker
        raise failed
    what = "a worker cannot read it" if kind == "unreadable" else "its result cannot be sent back from the worker"
    raise StrettoError(f"row {prompt.row_id}: {what}: {told[0]}")


class _Worker:
    """One worker process and the connection to it. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = Channel(ours, os.memfd_create(FILE_NAME), os.memfd_create(FILE_NAME))
        self._poll = select.poll()
        self._poll.register(ours, select.POLLIN)
        self._ended = ""
        passed: list[int] = []
        try:
            for file in (theirs.fileno(), self.channel.inbox.file, self.channel.outbox.file):
                # A number above those of standard streams, which are free where a stream was closed.
                passed.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3))
            # -P: the folder of the file must not become importable, its neighbours have names such as `files`.
            self._process = subprocess.Popen(
                [sys.executable, "-P", pool_worker.__file__, *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
            for file in passed:
                os.close(file)
        self.pid = self._process.pid

    def receive(self, limit_s: float | None) -> list[np.ndarray]:
        """The parts of the next message.

        Raises:
            TimeoutError: none within ``limit_s``.
            ConnectionError: the process is gone, and all that it sent has been read.
            OSError: no memory.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            gone = self.dead()  # asked before the poll: what it sent before its end is still delivered
            if self._poll.poll(0 if gone else 1000 * POLL_S):
                return self.channel.receive()
            if gone:  # and yet the connection is open: a child of it has it
                raise ConnectionError
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError

    def dead(self) -> bool:
        """Whether the process has ended; leaves it unreaped."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Kills the process and closes the channel; returns how it ended, in words. May be called twice."""
        if not self._ended:
            self._process.kill()
            code = self._process.wait()
            self.channel.close()
            self._ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return self._ended


def _no_start(error: OSError) -> StrettoError:
    return StrettoError(f"a processor worker cannot be started: {error}")


def _closed(prompt: Prompt, *, begun: bool = False) -> StrettoError:
    when = "while it was processed" if begun else "before its turn came"
    return StrettoError(f"row {prompt.row_id}: the processor was closed {when}")


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
