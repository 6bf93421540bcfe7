"""The optimizations, each one object. Stages never import this package: a switch sets a seam, ``build`` reads it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stretto.config import Config
from stretto.switches.base import Bounded, Exact, Facts, Switch
from stretto.switches.chunk_overlap import ChunkOverlap
from stretto.switches.logprob_reuse import LogprobReuse
from stretto.switches.processor_pool import ProcessorPool
from stretto.types import ConfigError

__all__ = [
    "ALL",
    "BASE",
    "LETTERS",
    "Bounded",
    "Exact",
    "Facts",
    "Switch",
    "applied",
    "condition",
    "letters",
    "on",
    "options",
    "refusals",
]

ALL: tuple[Switch, ...] = (ProcessorPool(), LogprobReuse(), ChunkOverlap())
BASE = "B"
"""The condition in which every switch is off."""
LETTERS = tuple(switch.letter for switch in ALL)


def on(config: Config) -> tuple[Switch, ...]:
    return tuple(switch for switch in ALL if switch.on(config))


def condition(config: Config) -> str:
    """``B``, or the letters of the switches that are on: ``P+R``."""
    return "+".join(switch.letter for switch in on(config)) or BASE


def letters(condition: str) -> tuple[str, ...] | None:
    """``("P", "S")`` of ``P+S`` or ``S+P``, none of ``B``; None: that is no condition."""
    parts = [] if condition == BASE else condition.split("+")
    if len(set(parts)) < len(parts) or not set(parts) <= set(LETTERS):
        return None
    return tuple(letter for letter in LETTERS if letter in parts)


def options(letters: Collection[str], workers: int) -> dict[str, Any]:
    """Every option ``switches.*`` of a condition, those that are off too, for a recipe may have them on.

    ``workers``: processes of P.
    """
    values: dict[str, Any] = {f"switches.{switch.name}": switch.letter in letters for switch in ALL}
    return values | {"switches.processor_pool": workers if "P" in letters else 0}


def refusals(config: Config) -> list[str]:
    """Why the switches that are on are refused; empty where they are not."""
    return [f"{switch.letter}: {reason}" for switch in on(config) for reason in switch.guards(config)]


def applied(config: Config) -> Config:
    """The config with the seams of all switches that are on.

    Raises:
        ConfigError: a guard refuses one of them.
    """
    if reasons := refusals(config):
        raise ConfigError(reasons)
    for switch in on(config):
        config = switch.apply(config)
    return config
