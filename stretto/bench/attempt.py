"""One attempt at a job: a fresh process, sampled while it runs, and the note that closes its folder for good."""

from __future__ import annotations

import datetime
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import stretto
from stretto.bench.campaign import BUSY_CORES, Kind, Note, Status, file_hash, number_of, write_note
from stretto.bench.jobs import Job
from stretto.bench.journal import Key, note_begun, note_closed, read_journal
from stretto.bench.sampler import Sampler, others_cores
from stretto.child import count_lines, last_lines, run_logged
from stretto.controls import CONTROLS
from stretto.observe.hardware import boot_id, machine_id
from stretto.settings import ENV_PREFIX
from stretto.stops import STOPS
from stretto.types import StrettoError

LISTENS_S = 2.0
"""Before a job, to hear whether others work on this machine."""
NEWS_EVERY_S = 30.0
RECORDED = (
    *("OMP_", "KMP_", "MKL_", "GOMP_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH_", "CUDA_"),
    *("CUBLAS_", "NCCL_", "RAY_", "HF_"),
)
"""Beginnings of the names of variables that change how libraries compute."""
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of the names of variables whose values nobody should read in a record."""
HASHED = (
    "log.txt",
    "hardware.jsonl",
    "run/manifest.json",
    "run/metrics.jsonl",
    "run/events.jsonl",
    "run/fingerprints.jsonl",
    "run/evaluations.jsonl",
    "run/alone.json",
)
"""Files that are analysed, as far as a job leaves them."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where jobs run: the program, its working directory and its environment. ``plan`` is the SHA-256 of the plan."""

    program: Sequence[str]
    root: Path
    environment: Mapping[str, str]
    plan: str


def perform(job: Job, folder: Path, place: Place, say: Say) -> Note:
    """Run a job in ``<folder>/<kind>/<name>/attempt-<n>``, the next that is free, and close it.

    Raises:
        KeyboardInterrupt: this process was asked to end; the attempt is closed as interrupted.
    """
    busy = others_cores(LISTENS_S)
    if busy > BUSY_CORES:
        say(f"    warning: {busy:.2f} cores are busy; figures taken beside the work of others say little")
    started, begun_s = _now(), time.monotonic()
    path = next_attempt(folder, job.kind, job.name, started)
    key: Key = (job.kind, job.name, number_of(path))
    words = job.words(spelled(path / "run", place.root))

    def closed(status: Status, exit_code: int | None, reason: str) -> Note:
        note = Note(
            plan=place.plan,
            stage=job.stage,
            condition=job.condition,
            seed=job.seed,
            block=job.block,
            position=job.position,
            attempt=key[2],
            command=("stretto", *words),
            started=started,
            ended=_now(),
            wall_s=round(time.monotonic() - begun_s, 3),
            exit_code=exit_code,
            status=status,
            reason=reason,
            machine_id=machine_id(),
            boot_id=boot_id(),
            others_before=round(busy, 3),
            files={name: file_hash(path / name) for name in HASHED if (path / name).is_file()},
            environment=recorded(place.environment),
            niceness=niceness(),
        )
        close(path, note)
        note_closed(folder, key, file_hash(path / "cell.json"))
        return note

    try:
        with Sampler(path / "hardware.jsonl") as sampler:
            exit_code = run_logged(
                [*place.program, *words],
                path / "log.txt",
                each=_News(job, path, say),
                started=sampler.watch,
                directory=place.root,
                environment=place.environment,
            )
    except KeyboardInterrupt:
        STOPS.ignore()  # the note is written whatever else is pressed
        closed("interrupted", None, f"the runner was stopped by {STOPS.name}")
        raise
    except StrettoError as error:
        return closed("failed", None, str(error))
    if exit_code:
        said = last_lines(path / "log.txt")
        return closed("failed", exit_code, f"it ended with exit code {exit_code}; the end of its log:\n{said}")
    return closed("finished", exit_code, "")


def next_attempt(campaign: Path, kind: Kind, name: str, started: str) -> Path:
    """A new folder, in the journal at once: numbered from 1, and never as one that was there before."""
    journal, folder = read_journal(campaign), campaign / kind / name
    last = max((number_of(path) for path in folder.glob("attempt-*")), default=0)
    number = max(last, journal.last(kind, name) if journal else 0) + 1
    path = folder / f"attempt-{number}"
    path.mkdir(parents=True)
    note_begun(campaign, (kind, name, number), started)
    return path


def recorded(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it a note keeps; of secrets that they were set."""
    return {
        name: "(set)" if any(part in name for part in SECRET) else value
        for name, value in sorted(environment.items())
        if name.startswith(RECORDED)
    }


def close(path: Path, note: Note) -> None:
    """Write the note, and take the right to write from every file: nothing of an attempt changes any more."""
    write_note(path, note)
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(stat.S_IMODE(file.stat().st_mode) & ~0o222)


def spelled(path: Path, root: Path) -> Path:
    """As a command that runs in ``root`` names it: relative where it lies below."""
    return path.relative_to(root) if path.is_relative_to(root) else path


def cell_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment of every job, and the variables that it is kept from: those that set options, which the plan
    alone does. It has this very package, wherever it runs.
    """
    dropped = sorted(name for name in environ if name.startswith(ENV_PREFIX) or name in CONTROLS)
    package = str(Path(stretto.__file__).parents[1])
    paths = [package, *(path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != package)]
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": os.pathsep.join(paths)}, dropped


def niceness() -> int:
    """Of this process, which its children have from it."""
    return os.getpriority(os.PRIO_PROCESS, 0)


class _News:
    """A line now and then of how far a job is."""

    def __init__(self, job: Job, path: Path, say: Say):
        self.job, self.metrics, self.say = job, path / "run" / "metrics.jsonl", say
        self._told_s = time.monotonic()

    def __call__(self) -> None:
        if self.job.lines and time.monotonic() - self._told_s >= NEWS_EVERY_S:
            self._told_s = time.monotonic()
            if lines := count_lines(self.metrics):
                self.say(f"    update {lines}/{self.job.lines}")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
