"""The controller of a run: what the loop works with, and everything that is written down around it."""

from __future__ import annotations

import fcntl
import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from stretto import build, machine
from stretto.actor.checkpoint import Found, config_hash, latest_valid, read_published
from stretto.cluster import Cluster
from stretto.config import Config
from stretto.data.cursor import rows_of_partition
from stretto.data.source import Source
from stretto.observe.lineage import UpdateLines, read_lines
from stretto.observe.manifest import Manifest, Status
from stretto.observe.metrics import FingerprintWriter, MetricsWriter
from stretto.observe.perfetto import write_trace
from stretto.observe.progress import Progress, StepReport
from stretto.observe.raw import RawLog
from stretto.phase1 import Phase1, Phase1Batch
from stretto.types import Evaluation, PartitionPlan, StrettoError

TERMINATE = signal.SIGTERM


class Stopped(StrettoError):
    """The run was asked to end (SIGTERM) and did so after a checkpoint."""


class WeightStore:
    """References to the buckets of the newest s + 1 policy versions."""

    def __init__(self, bound: int):
        self.bound = bound
        self._versions: dict[int, list[Any]] = {}

    def keep(self, version: int, buckets: list[Any]) -> None:
        """Offer ``version``; older ones than version - s are let go."""
        self._versions[version] = buckets
        for old in [v for v in self._versions if v < version - self.bound]:
            del self._versions[old]

    def __getitem__(self, version: int) -> list[Any]:
        return self._versions[version]

    def __iter__(self) -> Iterator[int]:
        """The kept versions, oldest first."""
        return iter(sorted(self._versions))

    def before(self, version: int) -> dict[int, list[Any]]:
        """The kept versions below ``version``: what a checkpoint at ``version`` must hold beside its parameters."""
        return {v: refs for v, refs in sorted(self._versions.items()) if v < version}


class Step:
    """What is known of one update, gathered while it runs."""

    def __init__(self, k: int):
        self.k = k
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.step_s = math.nan

    def merge(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of its body to ``{name}_s``."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[f"{name}_s"] = self.seconds.get(f"{name}_s", 0.0) + time.monotonic() - begun

    def add(self, batch: Phase1Batch) -> None:
        """Counts of the partition and of its schedule."""
        records, mini = batch.records, batch.mini
        lags = [r.partition - v for r in records for v in r.version_start]
        lengths = [n for r in records for n in r.response_tokens]
        truncated = [t for r in records for t in r.truncated]
        self.metrics |= {
            "exposed_wait_s": batch.exposed_wait_s,
            "tokens": sum(r.tokens for r in records),
            "response_tokens": sum(lengths),
            "images": sum(r.images for r in records),
            "patches": sum(r.patches for r in records),
            "response_length_mean": sum(lengths) / len(lengths),
            "response_length_max": max(lengths),
            "truncated_fraction": sum(truncated) / len(truncated),
            "staleness_mean": sum(lags) / len(lags),
            "staleness_max": max(lags),
            "microbatches": sum(len(chunk.ranks[0]) for chunk in mini.chunks),
            "fill": sum(chunk.fill for chunk in mini.chunks) / len(mini.chunks),
        }


class Run:
    """A training run: its processes, its cursor, and its records. Made by ``open_run``."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        source: Source,
        progress: Progress,
        manifest: Manifest,
        first: int,
    ):
        self.config = config
        self.dir = Path(config.run.dir)
        self.source = source
        self.progress = progress
        self.manifest = manifest
        self.first, self.last = first, config.run.updates
        self.done = first
        """Updates whose training has ended; the cursor."""
        self.saved = first
        """Updates that the newest checkpoint holds."""
        self.plane, self.actor, self.rollout = cluster.plane, cluster.actor, _RolloutQueue(cluster)
        self.weights = WeightStore(config.staleness.max)
        self.tracer = build.tracer(config, "driver")
        self.phase1: Phase1 = build.phase1(config, self.plane, self.actor.forward, self.tracer)
        self.metrics = MetricsWriter(self.dir, first)
        self.fingerprints = FingerprintWriter(self.dir, first)
        self.evaluations = UpdateLines(self.dir / "evaluations.jsonl", first + 1)
        self.raw = RawLog(self.dir, first)
        self.rewards: list[float] = []
        self.tokens = 0.0
        self.evaluated: list[Evaluation] = []
        self.terminated = False
        self._begun = math.nan
        self._rollout_reports: dict[int, dict[str, Any]] = {}

    # What the loop calls -------------------------------------------------------------------------------------------

    def plan(self, k: int) -> PartitionPlan:
        """Prompts and policy version of partition k; opens it in the data plane."""
        rollout = self.config.rollout
        epochs, rows = rows_of_partition(
            k, rollout.prompts_per_partition, len(self.source), self.config.run.seed, self.config.data.shuffle
        )
        self.plane.open(k, len(rows), rollout.n_samples_per_prompt, chunks_per_mini=self.config.actor.chunks_per_mini)
        version = max(0, k - self.config.staleness.max)
        return PartitionPlan(partition=k, version=version, epochs=epochs, rows=rows)

    @contextmanager
    def step(self, k: int) -> Iterator[Step]:
        """The body is update k; ``step_s`` is measured from the end of the update before: nothing is left out."""
        step = Step(k)
        if math.isnan(self._begun):
            self._begun = time.monotonic()
        with self.tracer.span("loop.step", update=k):
            yield step

    def publish(self, version: int, step: Step) -> None:
        """Phase 4: offer ``version``. A skipped update counts, but moves no bytes: its version is the one before."""
        if step.metrics["update_skipped"]:
            self.weights.keep(version, self.weights[version - 1])
        else:
            self.weights.keep(version, self.actor.publish(version))

    def after_step(self, k: int, step: Step) -> None:
        """Evidence, checkpoint, evaluation, metrics and progress of update k."""
        fingerprints, raw = self.actor.end_partition()
        self.done = k + 1
        self.fingerprints.write(k, fingerprints)
        self.raw.write(k, raw)
        every = self.config.checkpoint.every
        if self.terminated or self.done == self.last or (every > 0 and self.done % every == 0):
            with self.tracer.span("loop.checkpoint", update=k), step.timed("checkpoint"):
                self.save()
        if self._eval_due(self.done):
            self.evaluate(self.done)
        self._collect(wait=self.done == self.last)
        self._write(k, step)
        if self.terminated:
            raise Stopped(f"ended by SIGTERM after update {self.done}; a checkpoint holds all of it")

    # Around the loop -----------------------------------------------------------------------------------------------

    def begin(self, found: Found) -> None:
        """Offer the weights that the first partitions need, and evaluate a new run before its first update."""
        if found.path is not None:
            self.actor.load(found.path, found.state)
            for version, buckets in read_published(found.path).items():
                self.weights.keep(version, [ray.put(bucket) for bucket in buckets])
        self.weights.keep(self.first, self.actor.publish(self.first))
        recorded = {row["version"] for row in read_lines(self.evaluations.path)}
        for version in self.weights:
            if self._eval_due(version) and version not in recorded:
                self.evaluate(version)

    def evaluate(self, version: int) -> None:
        """Queue an evaluation of ``version``; it runs before the partition that this version generates."""
        self.rollout.evaluate("validation", self.config.eval.prompts, version, self.weights[version])

    def _eval_due(self, version: int) -> bool:
        every = self.config.eval.every
        return every > 0 and (version % every == 0 or version == self.last)

    def save(self) -> None:
        self.actor.save(self.done, self.weights.before(self.done))
        self.saved = self.done

    def _collect(self, *, wait: bool) -> None:
        for item in self.rollout.finished(wait=wait):
            if isinstance(item, Evaluation):
                self.evaluated.append(item)
                self.progress.evaluation(item)
                row = asdict(item) | {"exact_match": item.exact_match, "update": item.version}
                self.evaluations.append(row)
            else:
                self._rollout_reports[item["partition"]] = item

    def _write(self, k: int, step: Step) -> None:
        now = time.monotonic()
        step_s, self._begun = now - self._begun, now
        report = self._rollout_reports.pop(k, {})
        metrics = (
            step.metrics | step.seconds | {n: v for n, v in report.items() if n.startswith(("rollout_", "reward_"))}
        )
        metrics |= {"step_s": step_s, "tokens_per_s": metrics["tokens"] / step_s, "policy_version": k + 1}
        metrics |= {f"{name}_per_s": metrics[name] / step_s for name in ("response_tokens", "samples")}
        self.metrics.write(k, metrics)
        self.rewards.append(metrics.get("reward_mean", math.nan))
        self.tokens += metrics["tokens"]
        self.progress.step(
            StepReport(
                update=k,
                reward=self.rewards[-1],
                tokens_per_s=metrics["tokens_per_s"],
                staleness=metrics["staleness_mean"],
                step_s=step_s,
                actor_waited_s=metrics["exposed_wait_s"],
                rollout_waited_s=metrics.get("rollout_waited_s", math.nan),
            )
        )

    def close(self) -> None:
        for writer in (self.metrics, self.fingerprints, self.evaluations):
            writer.close()
        self.tracer.flush()


class _RolloutQueue:
    """The rollout process as the loop sees it."""

    def __init__(self, cluster: Cluster):
        self._rollout = cluster.rollout
        self.evaluate = cluster.rollout.evaluate
        self.finished = cluster.rollout.finished

    def start(self, plan: PartitionPlan, weights: WeightStore) -> None:
        self._rollout.run(plan, weights[plan.version])


def find_checkpoint(config: Config, *, resume: bool) -> Found:
    """The checkpoint to go on from; none for a new run, or for one that ended before its first checkpoint.

    Raises:
        StrettoError: the run folder holds a run and ``resume`` is not asked for, or the checkpoint was made under
            other options.
    """
    folder = Path(config.run.dir)
    found = latest_valid(folder / "checkpoints", config.actor.data_parallel)
    if not resume:
        if (folder / "metrics.jsonl").exists() or found.path is not None:
            raise StrettoError(
                f"run.dir = {config.run.dir!r} already holds a run; add --resume to go on with it, or choose another "
                "run.dir"
            )
        return Found(None, {}, ())
    if found.path is None:
        return found  # killed before its first checkpoint: there is nothing to go on from, so it starts over
    if found.state["config_hash"] != config_hash(config):
        raise StrettoError(
            f"{found.path} was saved under other options than these (only [cluster], [checkpoint] and run.dir may "
            f"change); compare with the config in {folder / 'manifest.json'}"
        )
    return found


def what_is_left(config: Config, run: Run | None, recipe: str) -> str:
    """What a run that was stopped has lost, and how to go on."""
    done, saved = (run.done, run.saved) if run else (0, 0)
    resume = f"go on with: stretto train {recipe} --resume (and the same --set options)"
    if saved == 0:
        state = "there is no checkpoint yet: " + (f"all {done} are lost and will be trained again" if done else "")
    else:
        lost = f"updates {saved + 1} to {done} are lost and will be trained again"
        state = f"the newest checkpoint holds {saved}: {lost if done > saved else 'nothing is lost'}"
    return f"stopped after {done} of {config.run.updates} updates; {state}\n{resume}"


def data_facts(source: Source) -> dict[str, Any]:
    return {"rows": len(source), "fingerprint": source.fingerprint()}


@contextmanager
def open_run(
    config: Config, sources: dict[str, str], progress: Progress, found: Found, place: machine.Placement
) -> Iterator[Run]:
    """Start the processes of a run; end all of them on the way out, whatever happens, and record how it ended."""
    from stretto.data.source import open_source

    first = int(found.state["cursor"]) if found.path is not None else 0
    source = open_source(config.data, "train")
    with ExitStack() as stack:
        stack.enter_context(locked(Path(config.run.dir)))
        manifest = Manifest.start(
            config.run.dir,
            config=config.model_dump(mode="json"),
            sources=sources,
            seeds={"run.seed": config.run.seed},
            model={"path": config.model.path},
            data=data_facts(source),
            first_update=first,
        )
        run: Run | None = None
        try:
            progress.note("starting Ray, the data plane, the actor and the rollout engine")
            cluster = stack.enter_context(Cluster(config, place))
            run = Run(config, cluster, source, progress, manifest, first)
            stack.callback(run.close)
            facts = cluster.start()
            manifest.add(
                model={"parameters": facts["actor"].pop("parameters")},
                determinism={"mode": config.run.determinism, **facts},
            )
            stack.enter_context(_terminating(run))
            run.begin(found)
            yield run
        except BaseException as error:
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt | Stopped) else "failed"
            done = run.done if run else first
            manifest.finish(status, updates_done=done, cause=f"{type(error).__name__}: {error}")
            raise
        else:
            manifest.finish("finished", updates_done=run.done)
        finally:
            stack.close()  # processes end, and with them what they still had to write
            write_trace(Path(config.run.dir) / "events.jsonl", Path(config.run.dir) / "trace.json")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder; the lock ends with this process, however it ends.

    Raises:
        StrettoError: another process is writing to it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StrettoError(
                f"run.dir = {str(run_dir)!r} is in use by a run that is still going; wait for it, stop it, or choose "
                "another run.dir"
            ) from None
        yield


@contextmanager
def _terminating(run: Run) -> Iterator[None]:
    """SIGTERM: finish the update in progress, checkpoint, end."""

    def note(_signal: int, _frame: FrameType | None) -> None:
        run.terminated = True

    before = signal.signal(TERMINATE, note)
    try:
        yield
    finally:
        signal.signal(TERMINATE, before)
