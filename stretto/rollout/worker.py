"""The rollout side as one object: takes plans in order, loads the weights they name, evaluates where asked.

One partition at a time, drained at its end, so that an engine takes new weights at a partition boundary only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from stretto.observe.trace import Tracer
from stretto.rollout.scheduler import Scheduler
from stretto.types import Evaluation, PartitionPlan, Prompt, Split, WeightBucket


class Prompts(Protocol):
    """What the worker needs of a data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Prompt: ...


class RolloutWorker:
    """Serves ``run`` and ``evaluate`` calls strictly in the order they arrive."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        train: Prompts,
        evaluation: Callable[[Split], Prompts],
        fail: Callable[[int, str], Awaitable[None]],
        closing: Sequence[Callable[[], Awaitable[None] | None]],
        tracer: Tracer,
    ):
        self.scheduler = scheduler
        self.train = train
        self.evaluation = evaluation
        self.fail = fail
        self.closing = closing
        self.tracer = tracer
        self._order = asyncio.Lock()
        self._idle_since = time.monotonic()

    async def run(self, plan: PartitionPlan, weights: Callable[[], Iterable[WeightBucket]]) -> dict[str, Any]:
        """Generate partition ``plan.partition`` with policy version ``plan.version``.

        Returns its counts and times in seconds: ``rollout_waited_s`` for the plan (that is, for weights),
        ``rollout_load_s``,
        ``rollout_s``. An error is also told to the data plane, so that whoever waits for the partition gets its cause.
        """
        async with self._order:
            started = time.monotonic()
            waited = started - self._idle_since
            try:
                await self._load(plan.version, weights)
                loaded = time.monotonic()
                prompts = [self.train[row] for row in plan.rows]
                report = await self.scheduler.run(plan, prompts)
            except Exception as error:
                await self.fail(plan.partition, f"{type(error).__name__}: {error}")
                raise
            self._idle_since = time.monotonic()
            self.tracer.flush()
            return report | {
                "partition": plan.partition,
                "version": plan.version,
                "rollout_waited_s": waited,
                "rollout_load_s": loaded - started,
                "rollout_s": self._idle_since - loaded,
            }

    async def evaluate(
        self, split: Split, prompts: int, version: int, weights: Callable[[], Iterable[WeightBucket]]
    ) -> Evaluation:
        """Greedy evaluation of ``version`` on the first ``prompts`` rows of ``split``."""
        async with self._order:
            await self._load(version, weights)
            return await self._evaluate(split, prompts)

    async def evaluate_loaded(self, split: Split, prompts: int) -> Evaluation:
        """The same for the weights that the engine was built with."""
        async with self._order:
            return await self._evaluate(split, prompts)

    async def _evaluate(self, split: Split, prompts: int) -> Evaluation:
        rows = self.evaluation(split)
        result = await self.scheduler.evaluate([rows[i] for i in range(min(prompts, len(rows)))], split)
        self._idle_since = time.monotonic()
        self.tracer.flush()
        return result

    async def _load(self, version: int, weights: Callable[[], Iterable[WeightBucket]]) -> None:
        if self.scheduler.engine.version == version:
            return
        with self.tracer.span("rollout.load_weights", version=version):
            await self.scheduler.engine.load_weights(version, await asyncio.to_thread(weights))

    async def close(self) -> None:
        """End the threads and processes of every part; the engine last, since what it generates goes nowhere then."""
        for close in self.closing:
            pending = close()
            if pending is not None:
                await pending
        self.tracer.flush()
