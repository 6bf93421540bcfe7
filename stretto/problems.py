"""One refusal, and how it is worded. Importing this module loads no torch, ray or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.config import Config
from stretto.wording import Given


@dataclass(frozen=True)
class Problem:
    """One refusal: the options it is about, and the message."""

    names: tuple[str, ...]
    text: str


class Reader:
    """Words a problem: ``actor.lr = 0.1 (--set), ...: why; remedy``."""

    def __init__(self, config: Config, origins: Mapping[str, str]):
        self.config = config
        self.origins = origins

    def problem(self, *names: str, why: str) -> Problem:
        read = ", ".join(f"{n} = {Given(self._value(n), self.origins.get(n, 'default'))}" for n in names)
        return Problem(names, f"{read}: {why}")

    def differs(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        block, key = name.split(".")
        return bool(self._value(name) != type(getattr(self.config, block)).model_fields[key].default)

    def _value(self, name: str) -> Any:
        block, key = name.split(".")
        return getattr(getattr(self.config, block), key)
