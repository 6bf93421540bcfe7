"""One stage with the others idle: what a pipeline can at best hide behind the others. For processes of their own.

    processor   prompts of the partitions, inline or pooled as P says, on the rollout's cores; nothing else is started
    rollout     all processes of a run; engines generate, rewards score what was processed before; actor idle
    training    a run whose phase 1 waits until nothing can be generated: rollout idle while the actor works

Writes ``alone.json`` into the run folder: ``stage``, ``condition``, ``updates``, and for each of them ``seconds`` and
``tokens`` (of the processor those of prompts; else prompts and responses, as the metric of that name). Warm-up is left
out. Processor and rollout work on the partitions of the run, rollout under the weights that training begins with.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto import build, controller, loop, machine, switches
from stretto.bench.campaign import Stage
from stretto.config import Config, Seams
from stretto.engine_process import RemoteEngine
from stretto.observe.lineage import write_atomically
from stretto.observe.metrics import read_metrics
from stretto.observe.progress import PlainProgress
from stretto.phase1 import Phase1Batch
from stretto.preflight import checked
from stretto.resume import find_checkpoint, locked
from stretto.run_data import planned
from stretto.types import GroupFields, GroupRecord, PartitionPlan, ProcessedPrompt, Prompt, StrettoError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``alone.json``. ``updates``: partitions that were measured; ``seconds`` and ``tokens`` of each."""

    stage: Stage
    condition: str
    updates: int
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]


class GenerateFirst:
    """A phase 1 that waits until the rollout side has nothing left to do, then does as the one it stands before.

    That is until partition k + s is generated: the next one waits for the weights that training k makes. Partitions are
    generated in order, so it claims that one, as a consumer of its own that consumes nothing. ``waited_s``: partition
    -> seconds of that.
    """

    def __init__(self, run: controller.Run):
        self.run, self.phase1 = run, run.phase1
        self.waited_s: dict[int, float] = {}
        self._generated = -1

    def __call__(self, partition: int) -> Phase1Batch:
        begun = time.monotonic()
        config, plane = self.run.config, self.run.plane
        until = min(partition + config.staleness.max, self.run.last - 1)
        if until > self._generated:
            groups, timeout_s = config.rollout.prompts_per_partition, config.plane.fetch_timeout_s
            plane.release(plane.claim(until, "benchmark", groups, timeout_s))
            self._generated = until
        self.waited_s[partition] = time.monotonic() - begun
        return self.phase1(partition)


def measure_alone(
    stage: Stage, recipe: Path, run_dir: Path, sets: Sequence[str], *, condition: str, warmup: int
) -> Measured:
    """Run ``stage`` for ``run.updates``, and write down all but the first ``warmup`` of them.

    Raises:
        ConfigError: the options do not fit one another or this machine.
        StrettoError: ``run_dir`` holds a run, or the run fails.
    """
    if stage == "processor":  # where Ray starts, it is set there, after the manifest has noted the environment
        os.environ.update({name: value for name, value in machine.ENVIRONMENT.items() if name not in os.environ})
    config, sources = checked(recipe, [*sets, f"run.dir={run_dir}"], seams=Seams(checkpoints=False))
    config = switches.applied(config)
    if config.partitions <= warmup:
        raise StrettoError(f"--warmup {warmup} leaves none of {config.partitions} partitions; raise run.updates")
    with locked(run_dir):
        if stage == "processor":
            found = asyncio.run(_processed(config))
        elif stage == "rollout":
            found = _generated(config, sources)
        else:
            found = _trained(config, sources)
        measured = Measured(
            stage=stage,
            condition=condition,
            updates=len(found) - warmup,
            seconds=tuple(seconds for seconds, _ in found[warmup:]),
            tokens=tuple(tokens for _, tokens in found[warmup:]),
        )
        write_atomically(run_dir / "alone.json", (json.dumps(asdict(measured), indent=1) + "\n").encode())
    print(f"{stage} alone: {statistics.mean(measured.seconds):.3f} s an update, mean of {measured.updates}")
    return measured


Found = list[tuple[float, int]]
"""Seconds and tokens of each partition."""


async def _processed(config: Config) -> Found:
    machine.settle(machine.placement(config).rollout_cores, config.run.determinism)
    tracer = build.tracer(config, "rollout")
    family, runner = await build.processor(config, tracer)
    source = build.source(config, "train", family, keep=False)
    found = []
    try:
        for k in range(config.partitions):
            prompts = [source[row] for row in planned(config, len(source), k, 0, 0).rows]
            begun = time.monotonic()
            done = await asyncio.gather(*(runner.process(prompt) for prompt in prompts))
            found.append((time.monotonic() - begun, sum(len(each.prompt_ids) for each in done)))
    finally:
        runner.close()
        tracer.flush()
    return found


def _generated(config: Config, sources: dict[str, str]) -> Found:
    place = machine.placement(config)
    with (
        PlainProgress(config.run.updates) as progress,
        controller.open_run(config, sources, progress, find_checkpoint(config, resume=False), place) as run,
    ):
        return asyncio.run(_generate(config, run, place.rollout_cores))


async def _generate(config: Config, run: controller.Run, cores: tuple[int, ...]) -> Found:
    """This process stands for the coordinator of the rollout side, which is idle, and has its cores."""
    machine.settle(cores, config.run.determinism)
    nowhere = _Nowhere()
    engines = run.rollout.engines
    worker, _ = await build.rollout_worker(config, nowhere, run.tracer, lambda i: RemoteEngine(engines[i]))
    plans = [planned(config, len(run.source), k, k, 0 if k == 0 else None) for k in range(config.partitions)]
    ended_s: dict[int, float] = {}

    at_once = asyncio.Semaphore(config.staleness.max + 1)  # as many as a run has under way while it trains

    async def generate(plan: PartitionPlan) -> None:
        await worker.run(plan, run.weights[0])  # loaded for every partition, as in a run
        ended_s[plan.partition] = time.monotonic()
        at_once.release()

    try:
        prompts = {row: worker.train[row] for plan in plans for row in plan.rows}
        done = await asyncio.gather(*(worker.scheduler.processor.process(prompt) for prompt in prompts.values()))
        ready = {prompt.row_id: processed for prompt, processed in zip(prompts.values(), done, strict=True)}
        worker.scheduler.processor.clock.take()
        worker.scheduler.processor = _Ready(ready, worker.scheduler.processor)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for plan in plans:
                await at_once.acquire()
                tasks.create_task(generate(plan))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first in time
    finally:
        await worker.close()
    ends = [begun, *(ended_s[plan.partition] for plan in plans)]
    return [(ends[k + 1] - ends[k], nowhere.tokens[k]) for k in range(len(plans))]


class _Ready:
    """A processor of prompts that are processed already; others, which dynamic sampling adds, are when asked for."""

    def __init__(self, ready: Mapping[str, ProcessedPrompt], others: Any):
        self._ready, self._others, self.clock = ready, others, others.clock

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        known = self._ready.get(prompt.row_id)
        return known if known is not None else await self._others.process(prompt)


class _Nowhere:
    """A data plane that counts what is put and keeps nothing."""

    def __init__(self) -> None:
        self.tokens: Counter[int] = Counter()

    async def put(self, record: GroupRecord, fields: GroupFields) -> None:
        self.tokens[record.partition] += record.tokens

    async def fail(self, partition: int | None, cause: BaseException | str) -> None:
        """Whoever runs the partition gets the error itself."""


def _trained(config: Config, sources: dict[str, str]) -> Found:
    place = machine.placement(config)
    with (
        PlainProgress(config.run.updates) as progress,
        controller.open_run(config, sources, progress, find_checkpoint(config, resume=False), place) as run,
    ):
        first = GenerateFirst(run)
        run.phase1 = first
        loop.train(run)
    rows = read_metrics(Path(config.run.dir))
    return [(row["step_s"] - first.waited_s[k], int(row["tokens"])) for k, row in enumerate(rows)]
