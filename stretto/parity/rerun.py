"""Runs again what a run folder records, up to one partition, whose gradients and parameters it writes down whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import stretto
from stretto.child import last_lines, run_logged
from stretto.config import Config
from stretto.parity.folder import RunFolder
from stretto.types import StrettoError


def rerun(run: Path, run_dir: Path, partition: int) -> None:
    """Train in ``run_dir`` what ``run`` has trained, from its start to the end of ``partition``, and dump that.

    Options are those of its manifest; neither environment nor recipe is asked. For a process of its own.

    Raises:
        StrettoError: the run cannot be repeated, or fails.
        Interrupted: it was asked to end.
    """
    from stretto.training import interruptible, train

    folder = RunFolder(run)
    if reasons := list(refusals(folder)):
        raise StrettoError("\n".join(reasons))
    config = repeated(folder.config, run_dir, partition)

    def left(done: int, _saved: int) -> str:
        return f"stopped after {done} of {config.updates_to_train} updates; remove {run_dir}, and run it again"

    with interruptible():
        train(config, dict(folder.session.get("sources", {})), resume=False, left=left)


def repeated(config: Config, run_dir: Path, partition: int) -> Config:
    """The config of such a run. It evaluates nothing, records nothing and writes no checkpoints."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": str(run_dir.absolute())}),
            "eval": config.eval.model_copy(update={"every": 0}),
        }
    ).with_seams(record="", record_partitions=0, partitions=partition + 1, dump_partition=partition, checkpoints=False)


def refusals(run: RunFolder) -> Iterator[str]:
    """Every reason why a run cannot be repeated to the bit."""
    if run.config.run.determinism == "fast":
        yield f'{run.path}: run.determinism = "fast", so that it need not end with the same numbers again'
    directory = Path(run.session.get("directory", "."))
    if not directory.is_dir():
        yield f"{run.path}: it ran in {directory}, which is no folder here; relative paths of its options start there"
    recording = run.config.seams.replay
    if recording and not (Path(recording) / "record.json").is_file():
        yield f"{run.path}: there is no recording in {recording}, which it trained on"
    sessions = {
        str({name: block for name, block in session["config"].items() if name not in ("run", "checkpoint", "eval")})
        for session in run.sessions
    }
    if len(sessions) > 1:
        yield f"{run.path}: it was resumed with other options, see its manifest; a run that was not is needed"


def start(run: RunFolder, run_dir: Path, partition: int) -> None:
    """``rerun`` in a process of its own, where ``run`` ran; its output goes to ``<run_dir>.log``.

    Raises:
        StrettoError: it failed; the end of its output is in the message.

    Where this process is interrupted, that one is given the time to end what it has started.
    """
    package = str(Path(stretto.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    log = run_dir.with_suffix(".log")
    command = [sys.executable, "-P", "-m", "stretto.cli", "parity", "rerun", str(run.path.absolute())]
    exit_code = run_logged(
        [*command, str(run_dir.absolute()), "--dump", str(partition)],
        log,
        directory=Path(run.session.get("directory", ".")),
        environment=os.environ | {"PYTHONPATH": paths},
    )
    if exit_code:
        raise StrettoError(f"running {run.path} again failed with code {exit_code}, see {log}:\n{last_lines(log)}")
