"""The controller of a run: what the loop works with, and what surrounds it from start to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from stretto import build, conditions, machine
from stretto.actor.checkpoint import Found, read_published
from stretto.cluster import Cluster, WeightStore
from stretto.config import Config
from stretto.data.source import Source
from stretto.gap_alarm import GapAlarm
from stretto.observe.manifest import Manifest, Status
from stretto.observe.perfetto import write_trace
from stretto.observe.progress import Progress
from stretto.phase1 import Phase1
from stretto.recording import Recording
from stretto.records import Records, Step, writing
from stretto.run_data import open_data, planned
from stretto.stops import STOPS
from stretto.types import PartitionPlan, StrettoError


class Stopped(StrettoError):
    """The run was asked to end (SIGTERM) and did so after a checkpoint."""


class Run:
    """A training run: its processes, its cursor, and its records. Made by ``open_run``."""

    def __init__(self, config: Config, cluster: Cluster, source: Source, records: Records, first: int):
        self.config = config
        self.source = source
        self.records = records
        self.first, self.last = first, config.partitions
        self.done = first
        """Partitions whose training has ended; the cursor."""
        self.saved = first
        """Partitions that the newest checkpoint holds."""
        self.plane, self.actor, self.rollout = cluster.plane, cluster.actor, cluster.rollout
        self.weights = WeightStore(config.staleness.max)
        self.tracer = build.tracer(config, "driver")
        self.phase1: Phase1 = build.phase1(config, self.plane, self.actor.forward, self.tracer, self.actor.place.device)

    @property
    def updates_done(self) -> int:
        """Optimizer updates whose training has ended, skipped ones among them."""
        return self.done * self.config.updates_per_partition

    @property
    def updates_saved(self) -> int:
        """Those of them that the newest checkpoint holds."""
        return self.saved * self.config.updates_per_partition

    # What the loop calls -------------------------------------------------------------------------------------------

    def start_rollout(self, k: int) -> None:
        """Open partition k in the data plane and queue its generation by version max(0, k - s)."""
        rollout, plan = self.config.rollout, self._plan(k)
        self.plane.open(
            k,
            rollout.prompts_per_partition,
            rollout.n_samples_per_prompt,
            minis=self.config.actor.minis_per_partition,
            chunks_per_mini=self.config.actor.chunks_per_mini,
        )
        self.rollout.run(plan, self.weights[plan.version])

    def _plan(self, k: int) -> PartitionPlan:
        start = self.rollout.position if k == self.first else None
        return planned(self.config, len(self.source), k, max(0, k - self.config.staleness.max), start)

    @contextmanager
    def step(self, k: int) -> Iterator[Step]:
        """The body is the training of partition k."""
        with self.tracer.span("loop.step", update=k):
            yield Step(k)

    def publish(self, version: int, step: Step) -> None:
        """Phase 4: offer ``version``, and queue its evaluation, where one is due, before the partition that it makes.

        A skipped update counts, but moves no bytes: a version without any other has the weights of the one before.
        """
        if step.metrics["update_skipped"] == self.config.updates_per_partition:
            self.weights.keep(version, self.weights[version - 1])
            step.merge({"published_bytes": 0})
        else:
            if self.config.weight_transfer != "host":  # the actor holds s + 2 versions, and writes over the oldest
                self.rollout.settle(version - self.config.staleness.max - 2)
            self.weights.keep(version, self.actor.publish(version))
            step.merge({"published_bytes": self.actor.published_bytes})
        self.rollout.offer(version, self.weights[version])
        if self._evaluation_due(version):
            self._evaluate(version)

    def after_step(self, step: Step) -> None:
        """Evidence, checkpoint, metrics and progress of an update; the rollout side is at work meanwhile.

        A run may be killed at any point of this: what a checkpoint holds is on record by then, or kept in it.

        Raises:
            Stopped: SIGTERM came; the checkpoint that it asked for is written, if this run writes any.
        """
        self.records.evidence(step.k, self.actor.end_partition())
        self.done = step.k + 1
        for evaluation in self.rollout.evaluations(wait=self.done == self.last):
            self.records.evaluation(evaluation)
        if self._checkpoint_due():
            with self.tracer.span("loop.checkpoint", update=step.k), step.timed("checkpoint"):
                extra: dict[str, Any] = {"metrics": self.records.line(step)}
                if self.config.rollout.refill_rounds > 0:
                    extra["position"] = self.rollout.position
                self.actor.save(self.done, self.weights.before(self.done), extra)
                self.saved = self.done
        self.records.step(step)
        if STOPS.terminated:
            held = "a checkpoint holds all of it" if self.saved == self.done else "this run writes no checkpoints"
            raise Stopped(f"ended by SIGTERM after update {self.updates_done}; {held}")

    # Around the loop -----------------------------------------------------------------------------------------------

    def begin(self, found: Found) -> None:
        """Offer the weights that the first partitions need, and queue the evaluations that are due and not on record:
        of a new run's first version, or of those that were in flight when the run was stopped.
        """
        if found.path is not None:
            self.actor.load(found.path, found.state)
            if self.config.rollout.refill_rounds > 0:
                self.rollout.position = found.state["extra"]["position"]
            for version, buckets in read_published(found.path).items():
                self.weights.keep(version, [ray.put(bucket) for bucket in buckets])
            if (line := found.state["extra"].get("metrics")) is not None:
                self.records.restore(self.first - 1, line)
        self.weights.keep(self.first, self.actor.publish(self.first))
        self.rollout.offer(self.first, self.weights[self.first])
        recorded = {evaluation.version for evaluation in self.records.evaluations()}
        for version in self.weights:
            if self._evaluation_due(version) and version not in recorded:
                self._evaluate(version)
        self.records.begin()

    def _evaluate(self, version: int) -> None:
        self.rollout.evaluate("validation", self.config.eval.prompts, version, self.weights[version])

    def _evaluation_due(self, version: int) -> bool:
        every = self.config.eval.every
        return every > 0 and (version in (0, self.last) or self._reached(every, version))

    def _checkpoint_due(self) -> bool:
        due = STOPS.terminated or self.done == self.last or self._reached(self.config.checkpoint.every, self.done)
        return due and self.config.seams.checkpoints

    def _reached(self, every: int, version: int) -> bool:
        """Whether a multiple of ``every`` updates falls among those that made ``version``."""
        per = self.config.updates_per_partition
        return every > 0 and version * per // every > (version - 1) * per // every


def check_model(config: Config, model: Mapping[str, Any]) -> None:
    """A replay must begin with the parameters that the recorded run began with.

    Raises:
        StrettoError: it does not; names both fingerprints.
    """
    if not config.seams.replay:
        return
    recorded, now = Recording(config.seams.replay).model.get("fingerprint"), model.get("fingerprint")
    if now != recorded:
        where = f"model.path = {config.model.path!r}" if config.model.path else f"run.seed = {config.run.seed}"
        raise StrettoError(
            f"the model is not the one of the recording {config.seams.replay}: its parameters have the fingerprint "
            f"{now}, the recorded ones {recorded} ({where}); put the same model there, or record again"
        )


@contextmanager
def open_run(
    config: Config, sources: dict[str, str], progress: Progress, found: Found, place: machine.Placement
) -> Iterator[Run]:
    """Start the processes of a run; end all of them on the way out, whatever happens, and record how it ended.

    The caller holds the run folder (``resume.locked``).
    """
    first = int(found.state["cursor"]) if found.path is not None else 0
    run_dir = Path(config.run.dir)
    source, data = open_data(config, progress, resumed=found.path is not None)
    done = first
    with STOPS.held():
        with writing(run_dir):
            manifest = Manifest.start(
                run_dir,
                config=config.model_dump(mode="json"),
                sources=sources,
                seeds={"run.seed": config.run.seed},
                model={"path": config.model.path},
                data=data,
                first_update=first,
            )
        alarm = GapAlarm(config, lambda told: manifest.add(alarms=told))
        try:
            for line in (conditions.told(config, sources), *conditions.closed(config)):
                progress.note(line)
            progress.note("starting Ray, the data plane, the actor and the rollout engine")
            with (
                Cluster(config, place, progress.note) as cluster,
                closing(Records(run_dir, first, progress, config.updates_per_partition, alarm)) as records,
            ):
                run = Run(config, cluster, source, records, first)
                facts = cluster.start()
                manifest.add(
                    model={"fingerprint": facts["actor"].pop("model"), "parameters": facts["actor"].pop("parameters")},
                    determinism={"mode": config.run.determinism, **facts},
                    switches=conditions.recorded(config, facts["actor"]),
                )
                check_model(config, manifest.session["model"])
                for text in conditions.inexact(config, facts["actor"]):
                    progress.note(text, stays=True)
                run.begin(found)
                STOPS.phase = "training"
                try:
                    yield run
                finally:
                    STOPS.phase = "ending"
                    done = run.done
                    run.tracer.flush()
        except BaseException as error:
            STOPS.phase = "ending"
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt | Stopped) else "failed"
            with suppress(OSError):  # the error that ended the run comes first
                manifest.finish(status, updates_done=done, cause=f"{type(error).__name__}: {error}")
                write_trace(run_dir / "events.jsonl", run_dir / "trace.json")
            raise
        else:
            with writing(run_dir):
                manifest.finish("finished", updates_done=done)
                write_trace(run_dir / "events.jsonl", run_dir / "trace.json")
