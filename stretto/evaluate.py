"""Greedy evaluation of a model on a split of the data, in this process."""

from __future__ import annotations

import asyncio

from stretto import build, machine
from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.types import ConfigError, Evaluation, Split


def evaluate(config: Config, split: Split, prompts: int) -> Evaluation:
    """Exact match of ``config.model`` on the first ``prompts`` rows of ``split`` (train, validation or test).

    Raises:
        ConfigError: a model or reward function that cannot be used; or servers that hold a model of their own.
    """
    if config.rollout.engine == "http":
        raise ConfigError(
            [
                'rollout.engine = "http": servers answer with the weights that they hold, not with those of '
                "model.path; evaluate that in this process: --set rollout.engine=hf"
            ]
        )
    return asyncio.run(_evaluate(config, split, prompts))


async def _evaluate(config: Config, split: Split, prompts: int) -> Evaluation:
    device = machine.single_device(config)
    worker, _ = await build.rollout_worker(
        config, None, Tracer(None, "eval"), lambda _: build.engine(config, device, 0), replicas=1
    )
    try:
        return await worker.evaluate(split, prompts, None)
    finally:
        await worker.close()
