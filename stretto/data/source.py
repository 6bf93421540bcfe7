"""What a data set is to the rest of the engine, and the one place that opens one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from stretto.config import DataConfig
from stretto.data.check import Gauge, Note, silent
from stretto.data.digits import Digits
from stretto.data.files import open_files
from stretto.types import Prompt, Split


class Source(Protocol):
    """One split of a data set: a finite, indexable collection of prompts.

    Row r is the same prompt whenever and wherever it is asked for; reading it has no side effect.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt:
        """The prompt of ``row``, 0 <= row < len. Raises IndexError outside."""
        ...

    def fingerprint(self) -> str:
        """Hash of everything that decides the content of every row; equal fingerprints, equal prompts."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it: ``rows``, ``fingerprint``, and counts of what was left out."""
        ...


def open_source(
    cfg: DataConfig,
    split: Split,
    gauge: Gauge | None = None,
    folder: Path | None = None,
    note: Note = silent,
) -> Source:
    """The ``split`` of the data set that ``cfg`` names: train, validation, test, or labelled (for the warm-start).

    Rows of files are checked against ``gauge``, which they need, and what is found is kept in ``folder``; see
    ``files.open_files``. The built-in data set needs neither.

    Raises:
        ConfigError: options that the data set cannot meet, or rows that cannot be used.
    """
    if cfg.source == "digits":
        return Digits(cfg, split)
    if gauge is None:
        raise ValueError("rows of files are checked against a model: open them with a gauge")
    return open_files(cfg, split, gauge, folder, note)
