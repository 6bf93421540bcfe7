"""What a switch is. Importing this package loads no torch, ray or transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.config import Config

R_WITH_S = (
    "switches.logprob_reuse and switches.chunk_overlap are both on: R leaves no old-policy forward for S to overlap, "
    "and their effects must not be conflated; switch one of them off"
)
Event = Mapping[str, Any]
"""A line of ``events.jsonl``."""


@dataclass(frozen=True)
class Exact:
    """Parity must find no difference."""


@dataclass(frozen=True)
class Bounded:
    """Parity must find no difference above ``tolerance`` (nats) in any log-prob of an update that begins with the same
    parameters; ``why`` there is one.
    """

    tolerance: float
    why: str


Numerics = Exact | Bounded
Facts = Mapping[str, Any]
"""What actor ranks found at their start, as the manifest has it under ``determinism.actor``."""


@dataclass(frozen=True)
class Evidence:
    """Whether a run shows that a switch did its work (``ok``), and the facts that say so, one line each.

    ``opportunity``: whether there was any work for it to do; without it, ``ok`` is a result, not a failure.
    """

    ok: bool
    facts: tuple[str, ...]
    opportunity: bool = True


class Switch(Protocol):
    """One optimization: default off, guarded, attributable."""

    name: str
    """The field of ``[switches]`` that sets it."""
    letter: str
    """Names conditions, such as P+R."""
    env: str
    """The environment control that sets it."""
    touches: tuple[str, ...]
    """Spans that it is expected to shorten; the others should not move."""

    def on(self, config: Config) -> bool: ...

    def numerics(self, config: Config, facts: Facts | None = None) -> Numerics:
        """What parity must find under this config; ``facts`` None: before anything is known of the machine."""
        ...

    def guards(self, config: Config) -> list[str]:
        """Every reason why this config and the switch exclude one another, each with its remedy, whether or not it is
        on. Options by their dotted names.
        """
        ...

    def apply(self, config: Config) -> Config:
        """A new config whose seams the switch has set."""
        ...

    def engaged(self, events: Sequence[Event]) -> Evidence:
        """What the events of a run, in any order, show of it."""
        ...


def named(events: Sequence[Event], *names: str) -> list[Event]:
    """The spans of these names."""
    return [event for event in events if event.get("name") in names]
