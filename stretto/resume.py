"""Where a run goes on, who may write to its folder, and what is left when it was stopped."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.actor.checkpoint import Found, config_hash, latest_valid
from stretto.config import Config
from stretto.types import StrettoError


def find_checkpoint(config: Config, *, resume: bool) -> Found:
    """The checkpoint to go on from; none for a new run, or for one that ended before its first checkpoint.

    Raises:
        StrettoError: the run folder holds a run and ``resume`` is not asked for, or the checkpoint was made under
            other options.
    """
    folder = Path(config.run.dir)
    found = latest_valid(folder / "checkpoints", config.actor.data_parallel)
    if not resume:
        if (folder / "metrics.jsonl").exists() or found.path is not None:
            raise StrettoError(
                f"run.dir = {config.run.dir!r} already holds a run; add --resume to go on with it, or choose another "
                "run.dir"
            )
        return Found(None, {}, ())
    if found.path is None:
        return found  # killed before its first checkpoint: there is nothing to go on from, so it starts over
    if found.state["config_hash"] != config_hash(config):
        raise StrettoError(
            f"{found.path} was saved under other options than these (only [cluster], [checkpoint] and run.dir may "
            f"change); compare with the config in {folder / 'manifest.json'}"
        )
    return found


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; the lock ends with this process, however it ends.

    Raises:
        StrettoError: another process is writing to it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StrettoError(
                f"run.dir = {str(run_dir)!r} is in use by a run that is still going; wait for it, stop it, or choose "
                "another run.dir"
            ) from None
        yield


def what_is_left(done: int, saved: int, updates: int, recipe: str) -> str:
    """What a run that was stopped after ``done`` of ``updates`` has lost, and how to go on."""
    if saved == 0:
        state = "there is no checkpoint yet" + (f": all {done} are lost and will be trained again" if done else "")
    else:
        lost = (
            f"updates {saved + 1} to {done} are lost and will be trained again" if done > saved else "nothing is lost"
        )
        state = f"the newest checkpoint holds {saved}: {lost}"
    return (
        f"stopped after {done} of {updates} updates; {state}\n"
        f"go on with: stretto train {recipe} --resume (and the same --set options)"
    )
