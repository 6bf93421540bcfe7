"""``manifest.json``: everything that says which run this was. Written at the start, completed at the end.

A file holds ``sessions``, oldest first: a run that is resumed appends one and keeps those before it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import stretto
from stretto.observe.hardware import boot_id, hardware, machine_id
from stretto.observe.lineage import write_atomically
from stretto.types import StrettoError

PACKAGES = (
    "stretto",
    "torch",
    "transformers",
    "tokenizers",
    "ray",
    "numpy",
    "safetensors",
    "pillow",
    "pyarrow",
    "pydantic",
    "scikit-learn",
    "tensorboard",
    "psutil",
    "vllm",
    "TransferQueue",
)
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
)
Status = Literal["finished", "interrupted", "failed"]


def versions() -> dict[str, str | None]:
    """Installed versions; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state(directory: Path | None = None) -> dict[str, Any] | None:
    """``commit``, ``dirty`` and ``changed`` (paths as git prints them) of the checkout that tracks the package.

    None where the package is no checkout: installed from a wheel, or git is not there. Dirty means that a tracked
    file differs from the commit, or that the package's folder holds a file git does not know.
    """
    package = directory or Path(stretto.__file__).parent

    def git(*arguments: str) -> str | None:
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    # A site-packages folder may lie inside some other project's checkout: ask whether git tracks this very file.
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    tracked = git("status", "--porcelain", "--untracked-files=no")
    unknown = git("status", "--porcelain", "--untracked-files=all", "--", ".")
    if commit is None or tracked is None or unknown is None:
        return None
    changed = sorted({*tracked.splitlines(), *unknown.splitlines()})
    return {"commit": commit.strip(), "dirty": bool(changed), "changed": changed}


class Manifest:
    """The manifest of a run in progress. Every write is whole: a reader sees the file before or after it."""

    def __init__(self, run_dir: Path | str):
        self.path = Path(run_dir) / "manifest.json"
        self._data: dict[str, Any] = {"format": 1, "sessions": []}
        self._started = time.monotonic()

    @classmethod
    def start(
        cls,
        run_dir: Path | str,
        *,
        config: Mapping[str, Any],
        sources: Mapping[str, str],
        seeds: Mapping[str, int],
        model: Mapping[str, Any],
        data: Mapping[str, Any],
        first_update: int = 0,
        command: Sequence[str] | None = None,
        **facts: Any,
    ) -> Manifest:
        """Opens a session and writes it.

        ``config`` is the resolved config as plain data, ``sources`` says for each dotted key where its value came from,
        ``model`` and ``data`` hold fingerprints, ``command`` defaults to this process's own command line.
        Raises StrettoError where an earlier manifest cannot be read.
        """
        manifest = cls(run_dir)
        if manifest.path.exists():
            manifest._data = read_manifest(run_dir)
            for session in manifest._data["sessions"]:
                if session["status"] == "running":
                    session["status"] = "interrupted"
                    session["cause"] = "its end was not recorded: killed, or the machine stopped"
        manifest._data["sessions"].append(
            {
                "status": "running",
                "cause": None,
                "first_update": first_update,
                "updates_done": None,
                "started": _now(),
                "ended": None,
                "wall_s": None,
                "command": list(sys.orig_argv if command is None else command),
                "directory": os.getcwd(),
                "config": dict(config),
                "sources": dict(sources),
                "seeds": dict(seeds),
                "model": dict(model),
                "data": dict(data),
                "git": git_state(),
                "versions": versions(),
                "platform": platform.platform(),
                "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                "hardware": hardware(),
                "machine_id": machine_id(),
                "boot_id": boot_id(),
                **facts,
            }
        )
        manifest._write()
        return manifest

    @property
    def session(self) -> dict[str, Any]:
        """The session in progress."""
        return self._data["sessions"][-1]

    def add(self, **facts: Any) -> None:
        """Facts that become known while the run goes on, e.g. ``determinism`` or the model's fingerprint."""
        for name, value in facts.items():
            old = self.session.get(name)
            self.session[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        self._write()

    def finish(self, status: Status, *, updates_done: int, cause: str | None = None, **facts: Any) -> None:
        """Ends the session. ``updates_done`` counts from the run's first session; ``cause`` is why it stopped early."""
        ended = {"status": status, "cause": cause, "updates_done": updates_done, "ended": _now()}
        self.session.update(ended, wall_s=round(time.monotonic() - self._started, 3), **facts)
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._data, indent=1, allow_nan=False, default=_plain)
        write_atomically(self.path, (text + "\n").encode())


def read_manifest(run_dir: Path | str) -> dict[str, Any]:
    """``{"format": 1, "sessions": [...]}``. Raises StrettoError where there is none, or none that can be read."""
    path = Path(run_dir) / "manifest.json"
    try:
        data = json.loads(path.read_text())
        sessions = data["sessions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StrettoError(f"{path} is no manifest of a run ({error!r}); choose another run.dir or mend it") from None
    if data.get("format") != 1 or not isinstance(sessions, list):
        raise StrettoError(f"{path} has format {data.get('format')!r}, this version of stretto reads format 1")
    return data


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | set | frozenset | range):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise TypeError(f"a manifest holds plain data, not {type(value).__name__}")
