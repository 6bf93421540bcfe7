"""What the rollout side asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.types import ProcessedPrompt, Response, WeightBucket


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn. ``temperature = 0`` is greedy (evaluation only)."""

    n: int
    temperature: float
    max_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt to sample ``Sampling.n`` responses for; (partition, group) key the noise."""

    partition: int
    group: int
    prompt: ProcessedPrompt


class Engine(Protocol):
    """A rollout engine. Its methods never block the event loop they are awaited on.

    ``generate`` returns, in request order, n responses each, under the weights that ``load_weights`` gave last.
    What one call is given is decoded as one batch: an engine that is not ``batch_invariant`` may give other bits
    for another composition of calls, so in lockstep mode the caller fixes them.
    """

    batch_invariant: bool

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``load_weights``."""
        ...

    async def load_weights(self, version: int, buckets: Iterable[WeightBucket]) -> None: ...

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]: ...

    async def close(self) -> None: ...
