"""Engines without a model, for what surrounds engines: they take a known time, and return what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from stretto.rollout.engine import GroupRequest, Sampling
from stretto.types import Response


def response(ids: Sequence[int], version: int, *, text: str = "1", finish_reason: str = "stop") -> Response:
    return Response(
        token_ids=np.asarray(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        text=text,
        finish_reason=finish_reason,
        version_start=version,
        version_end=version,
    )


Answer = Callable[[GroupRequest, int, int], Response]
"""(request, sample, version) to response."""


class StubEngine:
    """Holds the version that it was given last; notes every call. It asserts what an engine may rely on."""

    fixed_batches = True
    batch_invariant = True
    live_update = False

    def __init__(
        self,
        *,
        per_sample_s: float = 0.0,
        load_s: float = 0.0,
        concurrency: int = 1,
        answer: Answer = lambda request, sample, version: response([5 + sample, 6], version),
        before: Callable[[StubEngine], object] = lambda engine: None,
    ):
        self.per_sample_s = per_sample_s
        self.load_s = load_s
        self.concurrency = concurrency
        self.answer = answer
        self.before = before
        self.version = -1
        self.calls: list[tuple] = []
        self.running = 0
        self.requests = 0
        self.killed = False
        self.aborted = 0

    async def start(self):
        return {}

    async def load_weights(self, version, weights):
        assert self.running == 0, "weights taken while a response is under way"
        assert list(weights) == [f"weights {version}"]
        self.running += 1
        await asyncio.sleep(self.load_s)
        self.running -= 1
        self.version = version
        self.calls.append(("load", version))

    async def generate(self, requests: Sequence[GroupRequest], sampling: Sampling):
        assert self.running < self.concurrency
        self.running += 1
        self.requests += 1
        try:
            version = self.version
            self.calls.append(("generate", requests[0].partition, requests[0].group, version))
            outcome = self.before(self)
            if asyncio.iscoroutine(outcome):
                await outcome
            await asyncio.sleep(self.per_sample_s * len(requests) * sampling.n)
            assert self.version == version
            return [[self.answer(r, i, version) for i in range(sampling.n)] for r in requests]
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def kill(self):
        self.killed = True

    async def close(self):
        self.kill()


def weights(version: int) -> list[str]:
    """What the stub expects to be given for a version."""
    return [f"weights {version}"]
