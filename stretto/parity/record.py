"""``stretto parity record``: a live run whose rollout partitions are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto import switches
from stretto.config import Config, Seams
from stretto.observe.manifest import read_manifest
from stretto.preflight import checked
from stretto.recording.writer import seal
from stretto.training import interruptible, train
from stretto.types import ConfigError, StrettoError


def record(
    recipe: Path, folder: Path, sets: Sequence[str] = (), *, partitions: int | None = None, updates: int | None = None
) -> None:
    """Run ``recipe`` for ``updates`` updates and record its first ``partitions`` partitions in ``folder``.

    Raises:
        ConfigError: the recipe cannot run, or trains less than is asked for.
        StrettoError: ``folder`` is not empty, or the run fails.
        Interrupted: it was asked to end.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StrettoError(f"{folder} is not empty; record into a new folder, or remove it")
    again = f"remove {folder}, and record again"
    with interruptible(again):
        config, sources = checked(recipe, [f"run.dir={folder / 'run'}", *sets], seams=Seams(checkpoints=False))
        trained, kept = counts(config, partitions, updates)
        config = switches.applied(config).with_seams(
            record=str(folder.absolute()), record_partitions=kept, partitions=trained
        )

        def left(done: int, _saved: int) -> str:
            return f"stopped after {done} of {config.updates_to_train} updates; the recording is not finished: {again}"

        train(config, sources, resume=False, left=left)
    finish(config)


def counts(config: Config, partitions: int | None, updates: int | None) -> tuple[int, int]:
    """Partitions to train and partitions to record.

    Raises:
        ConfigError: they do not fit one another, or the recipe.
    """
    per, whole = config.updates_per_partition, config.run.updates
    if updates is None:
        updates = whole if partitions is None else partitions * per
    if updates > whole:
        raise ConfigError(
            [f"run.updates = {whole}: {updates} updates are asked for, and the recipe ends before; raise run.updates"]
        )
    if updates % per:
        raise ConfigError([f"--updates {updates}: every partition takes {per} updates; ask for a multiple of that"])
    trained = updates // per
    if partitions is not None and partitions > trained:
        raise ConfigError(
            [f"--partitions {partitions}: {updates} updates train on {trained} of them; ask for fewer, or more updates"]
        )
    return trained, partitions or trained


def finish(config: Config) -> None:
    """Make the folder of a run that has ended a recording, and say so."""
    folder = Path(config.seams.record)
    session = read_manifest(config.run.dir)["sessions"][-1]
    rollout, kept = config.rollout, config.seams.record_partitions
    seal(
        folder,
        config=session["config"],
        model={name: session["model"].get(name) for name in ("fingerprint", "parameters")},
        data=session["data"],
        partitions=kept,
        groups=rollout.prompts_per_partition,
        n=rollout.n_samples_per_prompt,
    )
    samples = kept * rollout.prompts_per_partition * rollout.n_samples_per_prompt
    print(f"recording           {folder} ({kept} partition{'s' * (kept > 1)}, {samples:,} samples)")
