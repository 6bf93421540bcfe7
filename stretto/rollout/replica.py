"""A live engine as the router sees it, and what it takes to give up a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stretto.rollout.engine import Engine

T = TypeVar("T")


class GivenUp(Exception):
    """A batch was given up for a newer version; it is begun again."""


@dataclass(eq=False)
class Replica:
    """A live engine and what it has been given. ``version`` is the one its calls run under, or will once loaded."""

    index: int
    engine: Engine
    facts: Mapping[str, Any]
    version: int
    calls: int = 0
    pinned: int = 0
    """Those of ``calls`` that name their version."""
    tokens: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once what it generates is to be begun again; another one then takes its place."""


async def unless(event: asyncio.Event, call: Awaitable[T]) -> T:
    """What ``call`` gives. Raises GivenUp, and cancels it, where the event is set before."""
    running, set_ = asyncio.ensure_future(call), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((running, set_), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise GivenUp
        return await running
    finally:
        for task in (running, set_):
            task.cancel()
        await asyncio.gather(running, set_, return_exceptions=True)
