"""The only place that picks implementations: from a config to the parts of each process.

Functions import what they build when they are called, so that a process loads only its own side.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.config import Config
from stretto.observe.trace import Tracer

if TYPE_CHECKING:
    from stretto.actor.parallel import RankGroup
    from stretto.actor.rank import ActorRankCore, Fetch
    from stretto.models.qwen3_vl import Qwen3VL
    from stretto.phase1 import Forward, Phase1
    from stretto.plane.protocol import DataPlane, Producer
    from stretto.rollout.engine import Engine, Sampling
    from stretto.rollout.worker import RolloutWorker


def tracer(config: Config, process: str) -> Tracer:
    return Tracer(Path(config.run.dir) / "events.jsonl", process)


def plane(config: Config) -> Any:
    """Starts the data plane; the controller's end of it."""
    from stretto.plane.ray_plane import RayPlane

    return RayPlane.start(capacity_bytes=config.plane.capacity_mib * 2**20, lease_s=config.plane.lease_s)


def phase1(config: Config, plane: DataPlane, forward: Forward, tracer: Tracer) -> Phase1:
    from stretto.phase1 import WholeMini

    return WholeMini(config, plane, forward, tracer)


def engine(config: Config, family: Qwen3VL, device: str) -> Engine:
    from stretto.models.loading import load_model
    from stretto.rollout.hf import HfEngine

    return HfEngine(family, lambda: load_model(config.model, config.run.seed, device), device)


def sampling(config: Config) -> Sampling:
    """How training rollouts are drawn."""
    from stretto.rollout.engine import Sampling

    rollout = config.rollout
    return Sampling(
        n=rollout.n_samples_per_prompt,
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        stop=rollout.stop,
        seed=config.run.seed,
    )


async def rollout_worker(
    config: Config, producer: Producer | None, tracer: Tracer, device: str, *, own_engine: Engine | None = None
) -> RolloutWorker:
    """The rollout side, ready to run. Without a ``producer`` it can only evaluate.

    Raises ConfigError for a reward function or model that cannot be used.
    """
    from stretto.data.processor import InlineProcessor
    from stretto.data.source import open_source
    from stretto.models.loading import load_family
    from stretto.rollout.reward import Rewarder
    from stretto.rollout.scheduler import Scheduler
    from stretto.rollout.worker import RolloutWorker

    rewarder = Rewarder(config.reward)
    await rewarder.start()
    family = load_family(config.model)
    processor = InlineProcessor(family.process, tracer)
    rollout_engine = own_engine or engine(config, family, device)
    scheduler = Scheduler(
        engine=rollout_engine,
        processor=processor,
        rewarder=rewarder,
        put=producer.put if producer else _no_plane,
        sampling=sampling(config),
        groups_per_decode_batch=config.rollout.groups_per_decode_batch,
        tracer=tracer,
    )
    return RolloutWorker(
        scheduler=scheduler,
        train=open_source(config.data, "train"),
        evaluation=lambda split: open_source(config.data, split),
        fail=producer.fail if producer else _no_plane,
        closing=(rewarder.close, processor.close, rollout_engine.close),
        tracer=tracer,
    )


async def _no_plane(*_: Any) -> None:
    raise AssertionError("a rollout worker without a data plane can only evaluate")


def actor_rank(config: Config, fetch: Fetch, tracer: Tracer, device: str, group: RankGroup) -> ActorRankCore:
    """One rank of the actor with its model on ``device``."""
    from stretto.actor.old_policy import DedicatedForward
    from stretto.actor.rank import ActorRankCore
    from stretto.models.loading import load_family, load_model

    family = load_family(config.model)
    model = load_model(config.model, config.run.seed, device)
    return ActorRankCore(config, family, model, fetch, tracer, group, old_policy=DedicatedForward)
