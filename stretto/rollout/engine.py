"""What the rollout side asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.types import ProcessedPrompt, Response

Weights = Sequence[Any]
"""All buckets of one version, in order: ``WeightBucket``s for an engine of this process, handles to them (references
into Ray's object store) for one elsewhere. What lies between only passes them on."""


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


class EngineLost(Exception):
    """An engine that is gone, hangs, or broke in a way that says nothing of its input: another one may do the work."""


class Engine(Protocol):
    """A rollout engine. Its methods never block the event loop they are awaited on.

    Errors: a ``StrettoError`` is about what the engine was asked (it would fail anywhere) and ends the run; after any
    other one the engine is killed and another takes its place.

    The bits of a response repeat from run to run if the engine has ``fixed_batches`` or is ``batch_invariant``; exact
    mode needs one of the two.
    """

    fixed_batches: bool
    """What one call of ``generate`` is given is decoded as one batch, alone. An engine that forms its batches itself,
    by what has arrived, is called for one group at a time."""
    batch_invariant: bool
    """The bits of a response are the same in any batch."""
    live_update: bool
    """Takes weights while it generates: what is under way goes on under them, every token stamped with its version."""
    concurrency: int
    """Calls of ``generate`` that are served at once; the router keeps others back. Known once it has started."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first ``load_weights``."""
        ...

    async def start(self) -> Mapping[str, Any]:
        """Ready for work once it returns, with what it has set for itself, for the manifest."""
        ...

    async def load_weights(self, version: int, weights: Weights) -> None:
        """Takes a version as a whole. Called while a ``generate`` runs only where the engine has ``live_update``; with
        any other one no response begins before and ends after it.
        """
        ...

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[list[Response]]:
        """In request order, ``sampling.n`` responses each, under the weights in use, stamped with their versions.

        A response that failed has ``error`` set, and may hold no token; those that it holds have their log-probs.
        Cancelling the call aborts its requests.
        """
        ...

    def kill(self) -> None:
        """Ends it at once with all of its processes, whatever it does; never waits. May be called at any time, and
        again."""
        ...

    async def close(self) -> None:
        """Ends it within a few seconds. May be called in any state."""
        ...
