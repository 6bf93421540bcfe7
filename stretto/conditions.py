"""What a run says of its switches: at its start, in its manifest, and where one cannot be exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from stretto import switches
from stretto.config import Config
from stretto.wording import shown


def told(config: Config, sources: Mapping[str, str]) -> str:
    """One line: the condition, and who set each switch."""
    each = [
        f"{switch.letter} {shown(getattr(config.switches, switch.name))} "
        f"({sources.get(f'switches.{switch.name}', 'default')})"
        for switch in switches.ALL
    ]
    return f"condition {switches.condition(config)}: {', '.join(each)}"


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
