"""Calls that belong together: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Their results in order. Where one fails, or this is cancelled, the others are cancelled, and have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
