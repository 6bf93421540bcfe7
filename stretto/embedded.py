"""A Ray of our own: on loopback, in a folder of its own, watched, and ended with everything that it has started.

A run owns ``<temporary folder>/stretto-ray-…`` (Ray's sessions, sockets and logs) and a lock in it. The lock ends with
the process, however it ends; what a killed run has left is removed by its guard (``guard.py``), or by the next run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import ray

from stretto import compat, guard, machine
from stretto.stops import STOPS
from stretto.types import StrettoError

PREFIX = "stretto-ray-"
SOCKET_SUFFIX = len("/" + PREFIX + "12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SOCKET_LIMIT = 107
"""Bytes of a Unix socket's path."""
VITAL = ("gcs_server", "raylet")
"""Ray's processes without which nothing goes on; without the others a run is complete."""
WATCH_S = 0.5
WATCH_START_S = 0.1
"""Short, since what is not seen alive cannot be missed."""
KILL_S = 3.0
PARTS = {
    "RolloutProcess": "rollout",
    "EngineProcess": "engine",
    "ActorProcess": "actor",
    "SendingProcess": "actor",
    "LedgerActor": "ledger",
}


class EmbeddedRay:
    """``start`` and, whatever came of it, ``stop``. Prints of the run's processes are kept in ``logs``."""

    def __init__(self, logs: Path):
        self.logs = logs
        self._others = {p.pid for p in psutil.Process().children(recursive=True)}
        self._folder: Path | None = None
        self._lock: IO[str] | None = None
        self._vital: dict[str, Any] = {}
        self._guard_pipe = -1
        self._stopping = threading.Event()
        self._failed_start = True

    def start(self, *, cpus: int, object_store_bytes: int) -> None:
        """Raises StrettoError where Ray does not come up."""
        machine.adopt_orphans()
        self._folder, self._lock = _own_folder()
        os.environ[guard.MARK] = str(self._folder)
        self._guard_pipe = _guarded(self._folder)
        threading.Thread(target=self._watch_start, name="ray-start", daemon=True).start()
        try:
            with compat.ray_on_loopback(), compat.ray_without_onlookers(), compat.ray_as_a_guest(STOPS.put_off):
                ray.init(
                    address="local",  # never RAY_ADDRESS, nor a Ray that runs on this machine
                    num_cpus=cpus,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    object_store_memory=object_store_bytes,
                    _temp_dir=str(self._folder),
                    log_to_driver=False,
                    configure_logging=False,
                )
            self._failed_start = False
            STOPS.check()
        except Exception as error:  # whatever Ray raises; its own logs say more
            raise StrettoError(
                f"Ray did not start ({type(error).__name__}: {error}); its logs are in {self.logs / 'ray'}"
            ) from error
        self._vital = compat.ray_processes(VITAL)
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def died(self) -> str:
        """What happened to a process without which nothing goes on; empty where all are alive."""
        for name, process in self._vital.items():
            if (code := process.poll()) is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                return f"Ray's {name} process ended ({how})"
        return ""

    def _watch_start(self) -> None:
        """End this process where a vital one of Ray's dies while Ray starts: ``ray.init`` would wait for it for up to a
        minute, in code that no signal reaches.
        """
        seen: dict[psutil.Process, str] = {}
        while self._failed_start and not self._stopping.wait(WATCH_START_S):
            for process in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if (name := process.name()) in VITAL and process.pid not in self._others:
                        seen[process] = name
            for process, name in seen.items():
                if _gone(process) and self._failed_start and not self._stopping.wait(WATCH_S):
                    say = f"error: Ray's {name} process died while Ray started; run the same command again"
                    print(say, file=sys.stderr, flush=True)
                    end_processes(self._others)
                    assert self._folder is not None
                    shutil.rmtree(self._folder, ignore_errors=True)
                    os._exit(1)

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_S):
            if cause := self.died():
                STOPS.interrupt(cause)
                return

    def stop(self) -> None:
        """End all processes that were started since this object was made, and remove the folder. Takes seconds."""
        self._stopping.set()
        broken = self._failed_start or bool(self.died())
        if broken:  # Ray would wait for what is gone
            end_processes(self._others)
        try:
            if ray.is_initialized():
                ray.shutdown()
            else:
                compat.forget_ray()
        finally:
            end_processes(self._others)
            if self._folder is not None:
                _keep_logs(self._folder, self.logs, everything=broken)
                shutil.rmtree(self._folder, ignore_errors=True)
            if self._lock is not None:
                self._lock.close()
            if self._guard_pipe >= 0:
                os.close(self._guard_pipe)


def _gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_processes(others: Iterable[int]) -> None:
    """Kill all descendants of this process but ``others``, orphans that it has adopted included."""
    kept, deadline = set(others), time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in kept]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            with suppress(ChildProcessError):  # not (yet) a child of this process itself
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.02)


def _own_folder() -> tuple[Path, IO[str]]:
    """A new folder, locked; those of runs that are gone are removed."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    if len(os.fsencode(base)) + SOCKET_SUFFIX > SOCKET_LIMIT:
        base = Path("/tmp")
    for folder in base.glob(PREFIX + "*"):
        _remove_if_left_over(folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = (folder / "lock.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "lock.new").rename(folder / "lock")  # a lock that is there is held
    return folder, lock


def _guarded(folder: Path) -> int:
    """Starts the process that clears ``folder`` and its processes up once this process is gone, killed or not; it holds
    on to the returned end of a pipe. ``stop`` ends it with all others.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-I", str(Path(guard.__file__)), str(folder), str(reader)]
    nothing = subprocess.DEVNULL
    subprocess.Popen(command, pass_fds=[reader], start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
    os.close(reader)
    return writer


def _remove_if_left_over(folder: Path) -> None:
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # held by a run that goes on, or another user's


def _keep_logs(folder: Path, into: Path, *, everything: bool) -> None:
    """Append what the processes of the run have printed to ``rollout.out``, ``actor.err``, …; Ray's own logs are kept
    in ``ray/`` where ``everything`` is wanted. A disk that is full costs the logs, not the end of the run.
    """
    session = folder / "session_latest" / "logs"
    with suppress(OSError):
        for path in sorted(session.glob("worker-*.*")):
            _keep_log(path, into)
        if everything and session.is_dir():
            shutil.copytree(session, into / "ray", dirs_exist_ok=True, ignore=shutil.ignore_patterns("worker-*"))


def _keep_log(path: Path, into: Path) -> None:
    """Ray begins a log with lines such as ``:actor_name:RolloutProcess``, and repeats them."""
    name, text = "ray", []
    with path.open(errors="replace") as file:
        for line in file:
            if line.startswith(":actor_name:"):
                actor = line.strip().removeprefix(":actor_name:")
                name = PARTS.get(actor, actor)
            elif not line.startswith((":job_id:", ":task_name:")):
                text.append(line)
    if text:
        into.mkdir(parents=True, exist_ok=True)
        with (into / f"{name}{path.suffix}").open("a") as kept:
            kept.writelines(text)
