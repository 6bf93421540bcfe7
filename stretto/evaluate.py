"""Greedy evaluation of a model on a split of the data, in this process."""

from __future__ import annotations

import asyncio

from stretto import build
from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.types import Evaluation, Split


def evaluate(config: Config, split: Split, prompts: int) -> Evaluation:
    """Exact match of ``config.model`` on the first ``prompts`` rows of ``split`` (train, validation or test).

    Raises:
        ConfigError: a model or reward function that cannot be used.
    """
    return asyncio.run(_evaluate(config, split, prompts))


async def _evaluate(config: Config, split: Split, prompts: int) -> Evaluation:
    worker, _ = await build.rollout_worker(
        config, None, Tracer(None, "eval"), lambda _: build.engine(config, "cpu", 0), replicas=1
    )
    try:
        return await worker.evaluate(split, prompts, None)
    finally:
        await worker.close()
