"""The only place that picks implementations: from a config to the parts of each process.

Functions import what they build when they are called, so that a process loads only its own side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.types import ConfigError, StrettoError

if TYPE_CHECKING:
    from torch import nn

    from stretto.actor.device_weights import Sender
    from stretto.actor.parallel import RankGroup
    from stretto.actor.rank import ActorRankCore, Fetch, OldPolicyFactory
    from stretto.data.check import Gauge, Note
    from stretto.data.processor import ProcessorRunner
    from stretto.data.source import Source
    from stretto.models.qwen3_vl import Qwen3VL
    from stretto.phase1 import Forward, Phase1
    from stretto.plane.protocol import DataPlane, Producer
    from stretto.rollout.engine import Engine, Sampling
    from stretto.rollout.recorder import Recorder
    from stretto.rollout.refill import Refill
    from stretto.rollout.replay import RecordedRewards
    from stretto.rollout.reward import Rewarder
    from stretto.rollout.worker import Prompts, RolloutWorker
    from stretto.types import Split


def tracer(config: Config, process: str) -> Tracer:
    return Tracer(Path(config.run.dir) / "events.jsonl", process)


def plane(config: Config) -> Any:
    """Starts the data plane; the controller's end of it."""
    from stretto.plane.ray_plane import RayPlane

    return RayPlane.start(capacity_bytes=config.plane.capacity_mib * 2**20, lease_s=config.plane.lease_s)


def phase1(config: Config, plane: DataPlane, forward: Forward, tracer: Tracer, device: str) -> Phase1:
    """``device``: the actor's, cpu or cuda."""
    from stretto.phase1 import ByChunk, WholePartition

    kind = ByChunk if config.seams.phase1 == "chunks" else WholePartition
    return kind(config, plane, forward, tracer, device)


def engine(config: Config, device: str, replica: int) -> Engine:
    """An engine of this process, the one of ``replica``, not yet started; its model takes what
    ``models.lora.published`` gives.
    """
    if config.seams.replay:
        from stretto.recording import Recording
        from stretto.rollout.replay import ReplayEngine

        return ReplayEngine(Recording(config.seams.replay), paced=config.seams.replay_timing == "recorded")
    if config.rollout.engine == "http":
        return _http_engine(config, replica)
    from stretto.models import lora
    from stretto.models.loading import load_family, load_model
    from stretto.rollout.hf import HfEngine

    if config.rollout.engine == "vllm":
        return _vllm_engine(config, device)

    def model() -> nn.Module:
        loaded = load_model(config.model, config.run.seed, device)
        if config.lora.rank > 0 and config.lora.publish == "adapter":
            lora.inject(loaded, config.lora, config.run.seed)
        return loaded

    return HfEngine(load_family(config.model), model, device)


def _vllm_engine(config: Config, device: str) -> Engine:
    from stretto.models.loading import load_family, without_weights
    from stretto.rollout.device_transfer import DeviceTransfer
    from stretto.rollout.vllm import VllmEngine
    from stretto.rollout.vllm_transfer import HostTransfer, Transfer

    shapes = {name: tuple(p.shape) for name, p in without_weights(config.model).named_parameters()}
    transfer: Transfer = HostTransfer(shapes)
    if config.weight_transfer != "host":
        transfer = DeviceTransfer(shapes, workers=config.rollout.tensor_parallel)
    return VllmEngine(load_family(config.model), config, device, transfer)


def _http_engine(config: Config, replica: int) -> Engine:
    if find_spec("httpx2") is None:
        raise ConfigError(
            ["rollout.engine = \"http\" needs httpx2, which is not installed; pip install 'stretto[http]'"]
        )
    from stretto.models.loading import load_family, without_weights
    from stretto.rollout.http import HttpEngine

    return HttpEngine(
        load_family(config.model),
        config.rollout.servers[replica],
        shapes=cache(lambda: {n: tuple(p.shape) for n, p in without_weights(config.model).named_parameters()}),
        folder=Path(config.run.dir).absolute() / "http-weights",
        samples=config.rollout.n_samples_per_prompt,
        timeout_s=config.rollout.engine_timeout_s,
    )


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


def rewarder(config: Config) -> Rewarder | RecordedRewards:
    """What scores responses, not yet started."""
    if config.seams.replay:
        from stretto.recording import Recording
        from stretto.rollout.replay import RecordedRewards

        return RecordedRewards(Recording(config.seams.replay), paced=config.seams.replay_timing == "recorded")
    from stretto.rollout.reward import Rewarder

    return Rewarder(config.reward)


def recorder(config: Config) -> Recorder | None:
    """What writes partitions down; None where none is asked for."""
    if not config.seams.record:
        return None
    from stretto.data.images import originals
    from stretto.recording.writer import Writer
    from stretto.rollout.recorder import Recorder

    return Recorder(
        Writer(Path(config.seams.record)),
        partitions=config.seams.record_partitions or config.partitions,
        truncated=config.algorithm.truncated,
        originals=lambda prompt: originals(prompt.images),
    )


def refill(config: Config, rows: int) -> Refill | None:
    """Dynamic sampling from a source of ``rows`` rows; None where it is off."""
    from stretto.data.cursor import row_at
    from stretto.rollout.refill import Refill

    if config.rollout.refill_rounds == 0:
        return None
    return Refill(
        groups=config.rollout.prompts_per_partition,
        rounds=config.rollout.refill_rounds,
        truncated=config.algorithm.truncated,
        row_at=lambda position: row_at(position, rows, config.run.seed, config.data.shuffle)[1],
    )


def source(
    config: Config,
    split: Split,
    family: Qwen3VL | None = None,
    *,
    keep: bool,
    note: Note | None = None,
) -> Source:
    """A split of the data, its rows checked; with ``keep`` what is found stays in the run folder, or is taken from it.
    A replay trains on what its recording holds.

    Raises ConfigError for rows or options that cannot be used, StrettoError for a recording that cannot be read.
    """
    if config.seams.replay:
        from stretto.data.recorded import RecordedSource
        from stretto.recording import Recording

        return RecordedSource(Recording(config.seams.replay))
    from stretto.data.check import silent
    from stretto.data.source import open_source

    if config.data.source == "digits":
        return open_source(config.data, split)
    if family is None:
        from stretto.models.loading import load_family

        family = load_family(config.model)
    folder = Path(config.run.dir) / "data" if keep else None
    return open_source(config.data, split, gauge(config, family, split), folder, silent if note is None else note)


def gauge(config: Config, family: Qwen3VL, split: Split) -> Gauge:
    """How prompts are measured, and what the longest may be: the actor's budgets bind what is trained on."""
    from stretto.data.check import Gauge, Limit

    room = config.actor.max_tokens_per_microbatch - config.rollout.max_response_tokens
    tokens: list[Limit] = []
    patches: list[Limit] = []
    if split == "train":
        by = "actor.max_tokens_per_microbatch less rollout.max_response_tokens"
        beyond = config.rollout.max_response_tokens
        tokens.append(Limit(most=room, set_by=by, option="actor.max_tokens_per_microbatch", beyond=beyond))
        option = "actor.max_patches_per_microbatch"
        patches.append(Limit(most=config.actor.max_patches_per_microbatch, set_by=option, option=option))
    # Answers need to fit where they alone are right; a warm-start is measured by exact match whatever the reward.
    exact = split == "labelled" or config.reward.function == "exact_match"
    answer = Limit(most=config.rollout.max_response_tokens, set_by="rollout.max_response_tokens")
    if config.data.max_prompt_tokens:
        option = "data.max_prompt_tokens"
        tokens.append(Limit(most=config.data.max_prompt_tokens, set_by=option, option=option))
    return Gauge(
        tokens=family.prompt_tokens,
        patches=lambda prompt: sum(family.patches(prompt.images)),
        max_tokens=tuple(tokens),
        max_patches=tuple(patches),
        answer=lambda prompt: len(family.encode_answer(prompt.answer)),
        max_answer=answer if exact else None,
        key=family.reads_as(),
    )


async def rollout_worker(
    config: Config,
    producer: Producer | None,
    tracer: Tracer,
    make_engine: Callable[[int], Engine],
    *,
    replicas: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> tuple[RolloutWorker, list[Mapping[str, Any]]]:
    """The rollout side, ready to run, and what each engine has set for itself. ``make_engine(i)`` gives the engine of
    replica i (``rollout.replicas`` of them, unless ``replicas`` says otherwise). Without a ``producer`` it can only
    evaluate.

    Raises ConfigError for a reward function or model that cannot be used.
    """
    from stretto.rollout.router import Router
    from stretto.rollout.scheduler import Scheduler
    from stretto.rollout.worker import RolloutWorker
    from stretto.run_data import open_as_begun

    rewards = rewarder(config)
    router = Router(
        make_engine,
        config.rollout.replicas if replicas is None else replicas,
        max_restarts=config.rollout.max_engine_restarts,
        timeout_s=config.rollout.engine_timeout_s,
        tracer=tracer,
        in_flight=config.rollout.in_flight,
        note=note,
    )
    _, facts, (family, runner) = await asyncio.gather(rewards.start(), router.start(), processor(config, tracer))
    if config.run.determinism == "exact" and not router.repeatable:
        rewards.close()
        await router.close()
        raise StrettoError(
            f"rollout.engine = {config.rollout.engine!r} forms its batches by what has arrived, and its bits depend on "
            'them: run.determinism = "exact" cannot be kept; set it to "fast", or make the engine batch-invariant'
        )
    train: Prompts = open_as_begun(config, family) if producer else ()
    scheduler = Scheduler(
        router=router,
        processor=runner,
        rewarder=rewards,
        put=producer.put if producer else _no_plane,
        sampling=sampling(config),
        groups_per_decode_batch=config.rollout.groups_per_decode_batch,
        tracer=tracer,
        refill=refill(config, len(train)),
        recorder=recorder(config) if producer else None,
    )
    worker = RolloutWorker(
        router=router,
        scheduler=scheduler,
        mode=config.staleness.mode,
        train=train,
        evaluation=cache(lambda split: source(config, split, family, keep=producer is not None)),
        fail=producer.fail if producer else _no_plane,
        closing=(rewards.close, runner.close, router.close),
        tracer=tracer,
    )
    return worker, facts


async def processor(config: Config, tracer: Tracer) -> tuple[Qwen3VL, ProcessorRunner]:
    """The model's family, and what processes prompts for it, started."""
    from stretto.data.pool import ProcessorPool
    from stretto.data.processor import InlineProcessor
    from stretto.models.loading import load_family

    family = await asyncio.to_thread(load_family, config.model)
    runner: ProcessorRunner = InlineProcessor(family.process, tracer)
    if config.seams.processor_workers:
        runner = ProcessorPool(family.process, config.seams.processor_workers, tracer)
    await runner.start()
    return family, runner


async def _no_plane(*_: Any) -> None:
    raise AssertionError("a rollout worker without a data plane can only evaluate")


@dataclass(frozen=True)
class ActorModels:
    """What the actor computes with: its family and model, and those of the teacher, where there is one."""

    family: Qwen3VL
    model: nn.Module
    teacher: tuple[Qwen3VL, nn.Module] | None = None

    def modules(self) -> list[nn.Module]:
        return [self.model, *([self.teacher[1]] if self.teacher else [])]


def actor_models(config: Config, device: str) -> ActorModels:
    """The model on ``device``, with whatever is trained of it requiring a gradient; a teacher in host memory."""
    from stretto.models.loading import load_family, load_model
    from stretto.models.parts import prepare
    from stretto.models.teacher import load_teacher_family, teacher_config

    family = load_family(config.model)
    model = load_model(config.model, config.run.seed, device)
    prepare(model, family, config)
    if not config.algorithm.teacher:
        return ActorModels(family, model)
    teacher = load_model(teacher_config(config), config.run.seed)
    return ActorModels(family, model, (load_teacher_family(config, family), teacher))


def actor_rank(
    config: Config, fetch: Fetch, tracer: Tracer, models: ActorModels, group: RankGroup | None = None
) -> ActorRankCore:
    """One rank of the actor on ``models``, with whatever else the algorithm asks for. ``group``: its place among
    several.
    """
    from stretto.actor.hook import load_hook
    from stretto.actor.old_policy import DedicatedForward, RolloutLogprobs, TrainingForward
    from stretto.actor.rank import ActorRankCore
    from stretto.actor.teacher import HostedModel
    from stretto.models.parts import seed_dropout

    sources: dict[str, OldPolicyFactory] = {
        "actor": DedicatedForward,
        "old_actor": partial(DedicatedForward, tag="old_actor"),
        "rollout": RolloutLogprobs,
        "training_forward": TrainingForward,
    }
    teacher = None
    if models.teacher is not None:
        family, module = models.teacher
        teacher = family, HostedModel(module, next(models.model.parameters()).device)
    seed_dropout(config.run.seed, group.rank if group else 0)
    return ActorRankCore(
        config,
        models.family,
        models.model,
        fetch,
        tracer,
        group,
        old_policy=sources[config.seams.old_policy or config.algorithm.old_policy],
        teacher=teacher,
        hook=load_hook(config.actor.before_logprob_hook),
    )


def sender(core: ActorRankCore) -> Sender:
    """What sends an actor rank's snapshots by NCCL."""
    from stretto.actor.device_weights import Sender

    return Sender(core.publisher.snapshots, core.device)
