"""What a data set is to the rest of the engine, and the one place that opens one."""

from __future__ import annotations

from typing import Protocol

from stretto.config import DataConfig
from stretto.data.digits import Digits
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


def open_source(cfg: DataConfig, split: Split) -> Source:
    """The ``split`` of the data set that ``cfg`` names: train, validation, test, or labelled (for the warm-start).

    Raises:
        ConfigError: options that the data set cannot meet.
    """
    return Digits(cfg, split)
