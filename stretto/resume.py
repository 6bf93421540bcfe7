"""Where a run goes on, who may write to its folder, and what is left when it was stopped."""

from __future__ import annotations

import fcntl
import json
import math
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from stretto.actor.checkpoint import FREE_BLOCKS, FREE_OPTIONS, Found, binding_options, config_hash, latest_valid
from stretto.config import Config
from stretto.observe.manifest import read_manifest
from stretto.types import StrettoError
from stretto.wording import shown


def find_checkpoint(config: Config, *, resume: bool) -> Found:
    """The checkpoint to go on from; none for a new run, or for one that ended before its first checkpoint.

    Raises:
        StrettoError: the run folder holds a run and ``resume`` is not asked for; a checkpoint should be there and
            is not, or none is whole; or the checkpoint was made under other options: names each with both values.
    """
    folder = Path(config.run.dir)
    metrics = folder / "metrics.jsonl"
    trained = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    found = latest_valid(folder / "checkpoints", config.actor.data_parallel)
    if not resume:
        if trained or found.path is not None:
            raise StrettoError(
                f"run.dir = {config.run.dir!r} already holds a run; add --resume to go on with it, or choose another "
                "run.dir"
            )
        return Found(None, {}, ())
    if found.path is None:
        _refuse_unless_none_was_due(config, folder, trained, found)
        return found  # ended before its first checkpoint: there is nothing to go on from, so it starts over
    if found.state["config_hash"] != config_hash(config):
        raise StrettoError(_other_options(found, folder, config))
    return found


def _other_options(found: Found, folder: Path, config: Config) -> str:
    free = [*(f"[{block}]" for block in sorted(FREE_BLOCKS)), *sorted(FREE_OPTIONS)]
    may = ", ".join([*free, "rollout.refill_rounds (neither to 0 nor from it)"])
    intro = f"{found.path} was saved under other options, and a run goes on under those that it began with; "
    saved = _saved_config(folder, found.state["config_hash"])
    if saved is None:
        return f"{intro}compare yours with the config in {folder / 'manifest.json'}. Only these may change: {may}"
    before, now = _flat(binding_options(saved)), _flat(binding_options(config))
    lines = []
    for name in [n for n in before | now if before.get(n) != now.get(n)]:
        why = "; the learning-rate schedule depends on it" if name == "run.updates" else ""
        lines.append(f"- {name} = {shown(now.get(name))} here, {shown(before.get(name))} in the checkpoint{why}")
    return "\n".join(
        [f"{intro}set these back, or start a new run in another run.dir:", *lines, f"Only these may change: {may}"]
    )


def _saved_config(folder: Path, wanted: str) -> Config | None:
    """The config that a checkpoint was saved under: of the newest session whose hash it has; None where none has."""
    try:
        sessions = read_manifest(folder)["sessions"]
    except (OSError, StrettoError):
        return None
    for session in reversed(sessions):
        try:
            config = Config.model_validate_json(json.dumps(session["config"]))
        except (ValidationError, KeyError):  # options of another version
            continue
        if config_hash(config) == wanted:
            return config
    return None


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Tables taken apart: ``{"model.config.text.depth": 2}`` for ``{"model.config": {"text": {"depth": 2}}}``."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            flat |= _flat({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _refuse_unless_none_was_due(config: Config, folder: Path, trained: int, found: Found) -> None:
    """Without a checkpoint a run may start over only where none is lost; ``trained`` updates are on record."""
    broken = [f"{path.name}: {why}" for path, why in found.passed_over if path.suffix != ".tmp"]
    if broken:
        problem = "none of its checkpoints can be used:\n" + "".join(f"  {line}\n" for line in broken)
    elif trained >= _first_checkpoint(config, folder):
        updates = trained * config.updates_per_partition
        problem = f"metrics.jsonl holds {updates} updates, but checkpoints/ holds no checkpoint; "
    else:
        return
    raise StrettoError(
        f"run.dir = {config.run.dir!r} cannot go on, {problem}mend what is there (or put a copy back), or start over "
        "in another run.dir"
    )


def _first_checkpoint(config: Config, folder: Path) -> int:
    """The partition after which the run in ``folder`` saves first, as it was started: its options may change since."""
    was = config.model_dump()
    with suppress(StrettoError, LookupError):  # without a manifest that can be read, these options have to do
        was = read_manifest(folder)["sessions"][-1]["config"]
    actor = was.get("actor", {})
    per = actor.get("minis_per_partition", 1) * actor.get("epochs", 1)
    return math.ceil(int(was["checkpoint"]["every"] or was["run"]["updates"]) / per)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; the lock ends with this process, however it ends.

    Raises:
        StrettoError: another process is writing to it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("w") as file:
        _lock(file, run_dir)
        yield


def refuse_if_locked(run_dir: Path) -> None:
    """As ``locked``, but the folder is neither made nor held."""
    if (run_dir / "lock").is_file():
        with (run_dir / "lock").open() as file:
            _lock(file, run_dir)


def _lock(file: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise StrettoError(
            f"run.dir = {str(run_dir)!r} is in use by a run that is still going; wait for it, stop it, or choose "
            "another run.dir"
        ) from None


def again(recipe: str, sets: Iterable[str], *, resume: bool = True) -> str:
    """The command line that goes on with ``recipe`` and the same options, to be pasted into a shell."""
    options = [word for option in sets for word in ("--set", option)]
    return shlex.join(["stretto", "train", recipe, *options, *(["--resume"] if resume else [])])


def failed(error: StrettoError, left: str) -> StrettoError:
    """The error that ended a run that trained, with ``what_is_left`` in place of a mere hint at it."""
    text = str(error)
    for hint in ("; resume from the last checkpoint", "; restart from the last checkpoint"):
        text = text.removesuffix(hint)
    return StrettoError(f"{text}\n{left}")


def what_is_left(done: int, saved: int, updates: int, command: str) -> str:
    """What a run that was stopped after ``done`` of ``updates`` has lost, and the ``command`` that goes on."""
    if saved == 0:
        state = "there is no checkpoint yet" + (": " + _all_lost(done) if done else "")
    else:
        lost = "nothing is lost"
        if done > saved:
            lost = f"updates {saved + 1} to {done} are lost and will be trained again"
        if done == saved + 1:
            lost = f"update {done} is lost and will be trained again"
        state = f"the newest checkpoint holds {saved}: {lost}"
    return f"stopped after {done} of {updates} updates; {state}\ngo on with: {command}"


def _all_lost(done: int) -> str:
    return (
        "update 1 is lost and will be trained again" if done == 1 else f"all {done} are lost and will be trained again"
    )
