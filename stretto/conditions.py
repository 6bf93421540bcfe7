"""What a run says of its switches: at its start, in its manifest, and where one cannot be exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from stretto import switches
from stretto.config import Config
from stretto.switches.base import R_WITH_S
from stretto.wording import shown


def told(config: Config, sources: Mapping[str, str]) -> str:
    """One line: the condition, and who set each switch."""
    each = [
        f"{switch.letter} {shown(getattr(config.switches, switch.name))} "
        f"({sources.get(f'switches.{switch.name}', 'default')})"
        for switch in switches.ALL
    ]
    return f"condition {switches.condition(config)}: {', '.join(each)}"


def closed(config: Config) -> Iterator[str]:
    """A line for every guard that would refuse a switch that is off. Of the two that exclude one another, no line."""
    for switch in switches.ALL:
        if not switch.on(config):
            reasons = [reason for reason in switch.guards(config) if reason != R_WITH_S]
            yield from (f"{switch.letter} could not be switched on: {reason}" for reason in reasons)


def crowded(config: Config, cores: int) -> str:
    """What is to be said of a processor pool that shares ``cores`` with more than they are; empty: nothing is.

    Of the cores of another machine (``cluster.address``) nothing is known.
    """
    pool, ranks, engines = config.switches.processor_pool, config.actor.data_parallel, config.rollout.replicas
    if not pool or pool + ranks + engines <= cores or config.cluster.address:
        return ""
    return (
        f"{_counted(pool, 'processor worker')}, {_counted(ranks, 'actor rank')} and {_counted(engines, 'engine')} "
        f"share {_counted(cores, 'core')}: what the pool gains it may take from the others"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def recorded(config: Config, facts: switches.Facts) -> dict[str, Any]:
    """For the manifest: the condition, and what parity must find for each switch that is on."""
    named = {switch.name: _plain(switch.numerics(config, facts)) for switch in switches.on(config)}
    return {"condition": switches.condition(config)} | named


def _plain(numerics: switches.Exact | switches.Bounded) -> dict[str, Any]:
    return {"numerics": type(numerics).__name__.lower()} | asdict(numerics)


def inexact(config: Config, facts: switches.Facts) -> Iterator[str]:
    """Why a switch that is on is not exact here."""
    for switch in switches.on(config):
        numerics = switch.numerics(config, facts)
        if isinstance(numerics, switches.Bounded):
            yield f"{switch.letter} is not exact here, see docs/switches.md: {numerics.why}"
