"""A Qwen3-VL that vLLM takes (it wants heads of 32 dimensions and more), prompts, and engines of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from torch import nn

from stretto import build
from stretto.actor.weights import iter_buckets
from stretto.config import Config, ModelConfig, RolloutConfig, RunConfig
from stretto.models.batch import SampleInput
from stretto.models.loading import load_family, load_model
from stretto.models.logprobs import token_logprobs
from stretto.models.qwen3_vl import Qwen3VL
from stretto.rollout.engine import Engine, GroupRequest
from stretto.types import Response, WeightBucket

GAP = 2e-5
"""Most that log-probs of an engine may differ from the trainer's, in float32."""
LAYOUTS: list[tuple[tuple[int, int], ...]] = [((32, 64),), (), ((64, 32), (32, 32)), ((96, 64),), ((32, 64),) * 3]
"""Images (height, width) of each prompt."""


def block(tied: bool = True) -> dict[str, Any]:
    made = copy.deepcopy(tiny.BLOCK) | {"tie_word_embeddings": tied}
    made["text"] |= {"hidden_size": 64, "head_dim": 32}
    made["text"]["rope_parameters"]["mrope_section"] = [10, 3, 3]
    made["vision"] |= {"hidden_size": 64, "out_hidden_size": 64}
    return made


def config(folder: Path, engine: str, tied: bool = True, seed: int = 0, **rollout: Any) -> Config:
    """Of a run with random weights by ``seed``."""
    return Config(
        run=RunConfig(dir=str(folder), seed=seed),
        model=ModelConfig(config=block(tied)),
        rollout=RolloutConfig(engine=engine, **rollout),
    )


@lru_cache(maxsize=1)
def family() -> Qwen3VL:
    return load_family(ModelConfig(config=block()))


@lru_cache(maxsize=8)
def model(seed: int, tied: bool = True) -> nn.Module:
    return load_model(ModelConfig(config=block(tied)), seed)


def published(seed: int, version: int, tied: bool = True) -> list[WeightBucket]:
    """The weights of ``model(seed)`` in many buckets, as an actor publishes them."""
    return list(iter_buckets(dict(model(seed, tied).named_parameters()), version, torch.float32, 100_000))


def requests(layouts: Sequence[Any] = LAYOUTS, partition: int = 0) -> list[GroupRequest]:
    return [
        GroupRequest(partition=partition, group=g, prompt=family().process(tiny.prompt(g, images)))
        for g, images in enumerate(layouts)
    ]


def trainer_logprobs(
    of: nn.Module, asked: Sequence[GroupRequest], groups: Sequence[Sequence[Response]], temperature: float
) -> list[np.ndarray]:
    """What the trainer's forward of a model makes of every response, in order."""
    samples = [SampleInput(q.prompt, r.token_ids) for q, group in zip(asked, groups, strict=True) for r in group]
    batch = family().collate(samples)
    with torch.no_grad():
        logits = family().response_logits(of, batch)
        flat = token_logprobs(logits, batch.response_ids_T, family().suppressed_V, temperature or 1.0).numpy()
    return np.split(flat, np.cumsum(batch.lengths)[:-1])


class Served:
    """An engine on an event loop of its own, for tests that are not coroutines."""

    def __init__(self, config: Config):
        self.runner = asyncio.Runner()
        self.closed = False
        self.engine: Engine = build.engine(config, "cpu", 0)
        self.facts = self.do(self.engine.start())

    def do(self, call: Any) -> Any:
        async def awaited() -> Any:
            return await call

        return self.runner.run(awaited())

    def load(self, seed: int, version: int, tied: bool = True) -> None:
        self.do(self.engine.load_weights(version, published(seed, version, tied)))

    def generate(self, asked: Sequence[GroupRequest], sampling: Any) -> list[list[Response]]:
        return self.do(self.engine.generate(asked, sampling))

    def close(self) -> None:
        if not self.closed:
            self.do(self.engine.close())
            self.runner.close()
            self.closed = True


def flat(groups: Sequence[Sequence[Response]]) -> list[Response]:
    return [response for group in groups for response in group]


def assert_same_bits(groups: Sequence[Sequence[Response]], others: Sequence[Sequence[Response]]) -> None:
    for a, b in zip(flat(groups), flat(others), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)


def assert_logprobs(of: nn.Module, asked: Sequence[GroupRequest], groups: Any, temperature: float = 1.0) -> None:
    """All log-probs are those that the trainer computes with the weights of a model."""
    for r, expected in zip(flat(groups), trainer_logprobs(of, asked, groups, temperature), strict=True):
        np.testing.assert_allclose(r.logprobs, expected, atol=GAP)
