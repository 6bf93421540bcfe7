"""What a run says of its switches: at its start, in its manifest, and where one cannot be exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def recorded(config: Config, actor: Mapping[str, Any]) -> dict[str, Any]:
    """For the manifest: the condition, and what parity must find for each switch that is on. ``actor``: what actor
    ranks found at their start.
    """
    exact = {
        switch.name: isinstance(switch.numerics(config), switches.Exact)
        and (switch.name != "logprob_reuse" or _same_bits(actor))
        for switch in switches.on(config)
    }
    return {"condition": switches.condition(config)} | {n: "exact" if e else "bounded" for n, e in exact.items()}


def inexact(config: Config, actor: Mapping[str, Any]) -> Iterator[str]:
    """Why a switch that is on is not exact here."""
    if config.switches.logprob_reuse and not _same_bits(actor):
        yield (
            "on this device a forward without gradient has other bits than the training forward: R is not exact here, "
            "see docs/switches.md"
        )


def _same_bits(actor: Mapping[str, Any]) -> bool:
    return all(rank["no_grad_is_grad"] for rank in actor.get("ranks", [actor]))
