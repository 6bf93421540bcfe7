"""The optimizations, each one object. Stages never import this package: a switch sets a seam, ``build`` reads it."""

from __future__ import annotations

from stretto.config import Config
from stretto.switches.base import Bounded, Exact, Facts, Switch
from stretto.switches.chunk_overlap import ChunkOverlap
from stretto.switches.logprob_reuse import LogprobReuse
from stretto.switches.processor_pool import ProcessorPool
from stretto.types import ConfigError

__all__ = ["ALL", "Bounded", "Exact", "Facts", "Switch", "applied", "condition", "on", "refusals"]

ALL: tuple[Switch, ...] = (ProcessorPool(), LogprobReuse(), ChunkOverlap())


def on(config: Config) -> tuple[Switch, ...]:
    return tuple(switch for switch in ALL if switch.on(config))


def condition(config: Config) -> str:
    """``B``, or the letters of the switches that are on: ``P+R``."""
    return "+".join(switch.letter for switch in on(config)) or "B"


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
