"""Rewards: a user's function, run in processes of its own with a time limit, one result for every response.

    score(group) ─► queue ─► thread reward-i ⇄ process i (``reward_worker``)      i = 0 .. reward.workers - 1

A thread owns its process: it starts it, hands it one prompt group at a time, reads the results as they come, and
replaces it where a sample overran its limit or ended the process. Every sample is scored at most once; what goes wrong
with one never costs its siblings theirs. The function runs in the main thread of its process, so timers and signal
handlers work there. The event loop only awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any, cast

from stretto.config import RewardConfig
from stretto.rollout import reward_worker
from stretto.rollout.reward_worker import Outcome, exact_match
from stretto.types import ConfigError, FailureKind, Prompt, Response, Score, StrettoError

__all__ = ["ABSTAINED", "Rewarder", "exact_match"]

ABSTAINED = "abstained"
"""``Score.error`` of a sample whose reward function returned None: no failure, but no reward either."""

START_LIMIT_S = 300.0
START_ATTEMPTS = 3
POLL_S = 0.1
REAP_S = 1.0
KEPT_TRACEBACKS = 20


class Rewarder:
    """Scores prompt groups with ``reward.function`` in ``reward.workers`` processes.

    Use: ``await start()``, any number of concurrent ``await score(...)``, ``close()``; all from one event loop.
    ``errors`` maps the first 20 distinct error lines to the details seen with the first: a traceback, or nothing.
    Processes end with ``close``, and also when the process that made them is killed.
    """

    def __init__(self, cfg: RewardConfig):
        self._cfg = cfg
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._lanes = [_Lane(i, cfg, self._queue, self._closing) for i in range(cfg.workers)]
        self._started = False
        self.errors: dict[str, str] = {}

    async def start(self) -> None:
        """Starts the processes and has each of them import and check the function.

        Raises:
            ConfigError: ``reward.function`` cannot be imported, or cannot be called as (response, answer).
            StrettoError: a process does not start.
        """
        self._started = True
        for lane in self._lanes:
            lane.start()
        ready = [asyncio.wrap_future(lane.ready) for lane in self._lanes]
        results = await asyncio.gather(*ready, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                self.close()
                raise result

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """One score per response, in order, once all of the group have settled.

        A number (bool, int, float, numpy scalar) is the reward. None, NaN, an infinity, an exception, an overrun of
        ``reward.timeout_s`` and a process that ends make ``Score(valid=False)``. So do responses that carry an error or
        were aborted; those are never shown to the function.

        Raises:
            StrettoError: the function returned something that is no reward; or this rewarder is not running.
        """
        if not self._started or self._closing.is_set():
            raise StrettoError(f"row {prompt.row_id}: rewards asked of a rewarder that is not running")
        wanted = [i for i, r in enumerate(responses) if r.error is None and r.finish_reason not in ("abort", "error")]
        outcomes: list[Outcome] = [("unscored", r.error or f"finish reason {r.finish_reason}", "") for r in responses]
        if wanted:
            job = _Job(prompt, [(responses[i].text, responses[i].finish_reason) for i in wanted])
            self._queue.put(job)
            settled = await asyncio.wrap_future(job.result)
            for i, outcome in zip(wanted, settled, strict=False):
                if outcome[0] == "type":
                    raise StrettoError(
                        f"reward.function = {self._cfg.function!r} returned a {outcome[1]} for sample {i} of row "
                        f"{prompt.row_id}; a reward is a float, int or bool, or None to abstain"
                    )
                outcomes[i] = outcome
        return [self._settle(outcome) for outcome in outcomes]

    def check_partition(self, partition: int, scores: Sequence[Score]) -> None:
        """Call with all scores of a partition.

        Raises:
            StrettoError: all of them failed, or a larger share than ``reward.max_failed_fraction``; with the first
                error and its traceback. Abstentions are no failures.
        """
        errors = [s.error or "" for s in scores if not s.valid and s.error != ABSTAINED]
        limit = self._cfg.max_failed_fraction
        if errors and (len(errors) == len(scores) or len(errors) > limit * len(scores)):
            raise StrettoError(
                f"partition {partition}: {len(errors)} of {len(scores)} samples failed (reward.max_failed_fraction = "
                f"{limit}, reward.function = {self._cfg.function!r}); the first: {errors[0]}\n"
                f"{self.errors.get(errors[0], '')}".rstrip()
            )

    def close(self) -> None:
        """Ends threads and processes at once; groups that are not settled fail. May be called twice."""
        self._closing.set()
        for _ in self._lanes:
            self._queue.put(None)
        for lane in self._lanes:
            if lane.is_alive():
                lane.join()
        while not self._queue.empty():
            if (job := self._queue.get()) is not None and job.result.set_running_or_notify_cancel():
                job.result.set_exception(_closed(job.prompt.row_id))

    def _settle(self, outcome: Outcome) -> Score:
        kind, value, detail = outcome
        if kind == "score":
            return Score(value=value)
        if kind == "abstain":
            return Score(value=0.0, valid=False, error=ABSTAINED, failure="abstained")
        error = f"{_PREFIX[kind]}{value}"
        if len(self.errors) < KEPT_TRACEBACKS:
            self.errors.setdefault(error, detail)
        return Score(value=0.0, valid=False, error=error, failure=cast(FailureKind, kind))


_PREFIX = {
    "raised": "reward raised ",
    "timed_out": "reward took longer than reward.timeout_s = ",
    "died": "reward process ended: ",
    "nonfinite": "reward was ",
    "unscored": "not scored: ",
}


class _Job:
    """One prompt group on its way: (text, finish reason) of the responses to score, and where the outcomes go."""

    def __init__(self, prompt: Prompt, responses: list[tuple[str, str]]):
        self.prompt = prompt
        self.responses = responses
        self.result: Future[list[Outcome]] = Future()

    def message(self, first: int) -> dict[str, Any]:
        prompt = self.prompt
        info = {"row_id": prompt.row_id, "source": prompt.source, "messages": list(prompt.messages)}
        return {"responses": self.responses[first:], "answer": prompt.answer, "info": info}


class _Lane(threading.Thread):
    """The thread that owns one reward process. The process dies with this thread, so it lives as long as the lane."""

    def __init__(
        self,
        index: int,
        cfg: RewardConfig,
        jobs: queue.SimpleQueue[_Job | None],
        closing: threading.Event,
    ):
        super().__init__(name=f"reward-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self._cfg = cfg
        self._jobs = jobs
        self._closing = closing
        self._process: _Process | None = None

    def run(self) -> None:
        if not self.ready.set_running_or_notify_cancel():
            return
        try:
            self._live_process()
        except InterruptedError:
            self.ready.set_exception(StrettoError("the rewarder was closed while it started"))
        except (StrettoError, OSError) as error:
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)
            while (job := self._jobs.get()) is not None:
                if job.result.set_running_or_notify_cancel():
                    self._serve(job)
        if self._process is not None:
            self._process.kill()

    def _serve(self, job: _Job) -> None:
        try:
            if self._closing.is_set():
                raise InterruptedError
            outcomes = self._outcomes(job)
        except InterruptedError:
            job.result.set_exception(_closed(job.prompt.row_id))
        except BaseException as error:  # belongs to whoever awaits the group, as in concurrent.futures
            job.result.set_exception(error)
        else:
            job.result.set_result(outcomes)

    def _outcomes(self, job: _Job) -> list[Outcome]:
        """One outcome per response, or fewer where the last says that the function returned no reward."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(job.responses):
            process = self._begin(job.message(first=len(outcomes)))
            try:
                while len(outcomes) < len(job.responses):
                    outcomes.append(process.receive(self._cfg.timeout_s))
                    if outcomes[-1][0] == "type":
                        return outcomes
            except TimeoutError:
                process.kill()
                outcomes.append(("timed_out", f"{self._cfg.timeout_s:g}", ""))
            except ConnectionError:
                outcomes.append(("died", process.kill(), ""))
        return outcomes

    def _begin(self, message: dict[str, Any]) -> _Process:
        """A process that has begun on ``message``. One that dies before that has shown the function no sample, so it is
        no sample's fault, and another takes its place.
        """
        for _ in range(START_ATTEMPTS):
            process = self._live_process()
            try:
                process.send(message)
                process.receive(START_LIMIT_S)
            except ConnectionError:
                process.kill()  # its connection ends a little before it counts as dead
            else:
                return process
        raise StrettoError(f"reward.function = {self._cfg.function!r}: its process ends before it is given a sample")

    def _live_process(self) -> _Process:
        """The process, or a new one that is ready. A process that died idle is replaced without a word."""
        if self._process is not None and not self._process.dead():
            return self._process
        for _ in range(START_ATTEMPTS):
            if self._process is not None:
                self._process.kill()
            self._process = _Process(self._closing)
            try:
                self._process.send({"path": _import_path(), "function": self._cfg.function})
                answer = self._process.receive(START_LIMIT_S)
            except ConnectionError:
                continue
            except TimeoutError:
                reason = f"its module was not imported within {START_LIMIT_S:g} s"
                raise ConfigError(
                    [f"reward.function = {self._cfg.function!r}: {reason}; make its import cheaper"]
                ) from None
            if answer[0] == "refused":
                raise ConfigError([f"reward.function = {self._cfg.function!r}: {answer[1]}"])
            return self._process
        assert self._process is not None
        raise StrettoError(
            f"reward.function = {self._cfg.function!r}: its process ended {START_ATTEMPTS} times while it started "
            f"({self._process.kill()}); its error output is above"
        )


class _Process:
    """One reward process and the connection to it; leader of a session, so that what it starts is killed with it. Its
    guardian, which waits for the end of the pipe ``alive``, does that where this process is killed.
    """

    def __init__(self, closing: threading.Event):
        self._closing = closing
        self._connection, theirs = Pipe()
        file = theirs.fileno()
        ends, self._alive = os.pipe()
        # -P: the folder of the file must not become importable, its neighbours have names such as `reward`.
        self._process = subprocess.Popen(
            [sys.executable, "-P", reward_worker.__file__, str(file), str(ends), str(os.getpid())],
            pass_fds=(file, ends),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        os.close(ends)

    def send(self, message: dict[str, Any]) -> None:
        """Raises ConnectionError where the process is gone."""
        self._connection.send(message)

    def receive(self, timeout_s: float) -> Any:
        """The next message.

        Raises:
            TimeoutError: none within ``timeout_s``.
            ConnectionError: the process is gone, and all that it sent has been read.
            InterruptedError: the rewarder is closing.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            gone = self.dead()  # asked before the poll: what it sent before its end is still delivered
            if self._connection.poll(0 if gone else max(0.0, min(POLL_S, left))):
                try:
                    return self._connection.recv()
                except EOFError:
                    raise ConnectionError from None
            if gone:
                raise ConnectionError
            if self._closing.is_set():
                raise InterruptedError
            if left <= 0:
                raise TimeoutError

    def dead(self) -> bool:
        """Whether the process has ended; leaves it unreaped, so that its id still names its session in ``kill``."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def kill(self) -> str:
        """Ends the process and everything in its session; returns how it ended, in words."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # already reaped, as where SIGCHLD is ignored
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._alive)
            self._reap_orphans()
        self._connection.close()
        code = self._process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _reap_orphans(self) -> None:
        """Forget the killed members of its group, which are children of this process where it adopts orphans."""
        deadline = time.monotonic() + REAP_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-self._process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)


def _import_path() -> list[str]:
    """Where a reward module may be: the current directory, then wherever this process imports from."""
    here = os.getcwd()
    return [here, *(entry for entry in sys.path if entry not in ("", here))]


def _closed(row_id: str) -> StrettoError:
    return StrettoError(f"row {row_id}: the rewarder was closed before its group was scored")
