"""The data of a training run: opened and checked before its processes start, and the same as before when it goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import build
from stretto.config import Config
from stretto.data.check import Note, silent
from stretto.data.cursor import rows_of_partition
from stretto.data.source import Source
from stretto.observe.manifest import read_manifest
from stretto.observe.progress import Progress
from stretto.types import ConfigError, PartitionPlan, Split, StrettoError

if TYPE_CHECKING:
    from stretto.models.qwen3_vl import Qwen3VL


def open_data(config: Config, progress: Progress, *, resumed: bool) -> tuple[Source, dict[str, Any]]:
    """The source to train on, and what the manifest says of the data.

    The validation split is checked too where the run evaluates, so that nothing about data is left to find later.

    Raises:
        ConfigError: rows that are refused or columns that are missing, of all splits at once.
        StrettoError: a run goes on, and its data is not what it was.
    """
    opened = open_splits(config, keep=True, note=progress.note)
    facts = {split: source.facts() for split, source in opened.items()}
    if resumed:
        same_as_before(Path(config.run.dir), facts["train"])
    validation = {"validation": facts["validation"]} if "validation" in facts else {}
    return opened["train"], facts["train"] | validation


def open_splits(config: Config, family: Qwen3VL | None = None, *, keep: bool, note: Note = silent) -> dict[str, Source]:
    """The splits that a run reads, every row checked; see ``build.source``.

    Raises:
        ConfigError: what is wrong with any of them, at once.
    """
    splits: list[Split] = ["train", "validation"] if config.eval.every > 0 else ["train"]
    opened: dict[str, Source] = {}
    told: list[str] = []
    for split in splits:
        try:
            opened[split] = build.source(config, split, family, keep=keep, note=note)
        except ConfigError as error:
            told += [text for text in error.problems if text not in told]
    if told:
        raise ConfigError(told, exit_code=1)
    return opened


def open_as_begun(config: Config, family: Qwen3VL) -> Source:
    """The source to train on, for the rollout side: its rows must be those that the controller counts by number.

    Raises:
        StrettoError: the data has changed since the controller opened it.
    """
    source = build.source(config, "train", family, keep=True)
    same_as_before(Path(config.run.dir), source.facts())
    return source


def planned(config: Config, rows: int, k: int, version: int, start: int | None = None) -> PartitionPlan:
    """Which rows of a source of ``rows`` partition k is made of, and by which version. ``start``: under dynamic
    sampling, where its candidates start; None: where those of the one before have ended.
    """
    rollout = config.rollout
    if rollout.refill_rounds > 0:
        return PartitionPlan(partition=k, version=version, start=start)
    epochs, chosen = rows_of_partition(k, rollout.prompts_per_partition, rows, config.run.seed, config.data.shuffle)
    return PartitionPlan(partition=k, version=version, epochs=epochs, rows=chosen)


def same_as_before(run_dir: Path, now: dict[str, Any]) -> None:
    """The cursor of a checkpoint means rows by their number: with others, some would be trained twice and some never.

    Without a manifest there is nothing to compare with.
    """
    before: dict[str, Any] = {}
    with suppress(StrettoError, LookupError):
        before = read_manifest(run_dir)["sessions"][-1]["data"]
    if before.get("fingerprint") in (None, now["fingerprint"]):
        return
    raise StrettoError(
        f"run.dir = {str(run_dir)!r}: the training data has changed since this run began: {before.get('rows')} usable "
        f"rows then, {now['rows']} now"
        + (", with other content, columns or image files" if before.get("rows") == now["rows"] else "")
        + "; put the files back as they were (cp -p keeps the times of copies), or start a new run in another run.dir"
    )
