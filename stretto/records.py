"""What a run writes down and shows, update by update."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.actor.evidence import Evidence
from stretto.gap_alarm import GapAlarm
from stretto.observe.lineage import UpdateLines, read_lines
from stretto.observe.metrics import FingerprintWriter, MetricsWriter, plain_line, read_metrics
from stretto.observe.progress import Progress, StepReport
from stretto.observe.raw import RawLog
from stretto.phase1 import Phase1Batch
from stretto.types import Evaluation, StrettoError

REMIND = 10
"""Updates in a row without any signal, after which that is said again."""


class Step:
    """What is known of the training of partition ``k``, gathered while it runs."""

    def __init__(self, k: int):
        self.k = k
        self.metrics: dict[str, float] = {}

    def merge(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of its body to ``{name}_s``."""
        begun = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_s"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - begun

    def add(self, batch: Phase1Batch, rollout: Mapping[str, Any]) -> None:
        """Counts of the partition, of its schedule, and of the rollout side's report about it."""
        records, chunks = batch.records, [chunk for mini in batch.minis for chunk in mini.chunks]
        lags = [r.partition - v for r in records for v in r.version_start]
        lengths = [n for r in records for n in r.response_tokens]
        truncated = [t for r in records for t in r.truncated]
        self.metrics |= {
            name: v
            for name, v in rollout.items()
            if name.startswith(("rollout_", "reward_", "engine_", "processor_", "begun_again_"))
        }
        self.metrics |= {
            "exposed_wait_s": batch.exposed_wait_s,
            "forward_s": sum(ended - begun for begun, ended in batch.forwards),
            "overlap_fraction": batch.overlap(rollout["last_put_s"]),
            "put_bytes": rollout["put_bytes"],
            "fetched_bytes": batch.fetched_bytes,
            "tokens": sum(r.tokens for r in records),
            "response_tokens": sum(lengths),
            "images": sum(r.images for r in records),
            "patches": sum(r.patches for r in records),
            "response_length_mean": sum(lengths) / len(lengths),
            "response_length_max": max(lengths),
            "truncated_fraction": sum(truncated) / len(truncated),
            "staleness_mean": sum(lags) / len(lags),
            "staleness_max": max(lags),
            "mixed_version_samples": sum(
                v != end for r in records for v, end in zip(r.version_start, r.version_end, strict=True)
            ),
            "microbatches": sum(len(chunk.ranks[0]) for chunk in chunks),
            "fill": sum(chunk.fill for chunk in chunks) / len(chunks),
        }


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Raises StrettoError where the body cannot write to the run folder: the disk is full, or not writable."""
    try:
        yield
    except OSError as error:
        raise StrettoError(
            f"the run cannot write to {run_dir} ({error}): free space there, then resume from the last checkpoint"
        ) from error


class Records:
    """Writers of a run folder, opened at update ``first``: what an earlier session wrote of it and later ones is undone
    work and moves aside. ``tokens`` and ``training_s``, the seconds of all updates, are those of this session.
    """

    def __init__(
        self,
        run_dir: Path,
        first: int,
        progress: Progress,
        updates_per_partition: int = 1,
        gap_alarm: GapAlarm | None = None,
    ):
        self._progress = progress
        self._gap_alarm = gap_alarm
        self._per = updates_per_partition
        self._run_dir = run_dir
        with writing(run_dir):
            self._metrics = MetricsWriter(run_dir, first)
            self._fingerprints = FingerprintWriter(run_dir, first)
            self._evaluations = UpdateLines(run_dir / "evaluations.jsonl", first + 1)
            self._raw = RawLog(run_dir, first)
        self._step_ended = math.nan
        self.tokens = 0.0
        self.training_s = 0.0
        self._without_signal = self._skipped = self._replaced = 0

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._step_ended = time.monotonic()

    def evidence(self, k: int, evidence: Evidence) -> None:
        with writing(self._run_dir):
            self._fingerprints.write(k, evidence.fingerprints)
            self._raw.write(k, *evidence.raw, hashes=evidence.hashes)

    def note(self, text: str) -> None:
        """One line about the run; it stays on the display."""
        self._progress.note(text, stays=True)

    def evaluation(self, result: Evaluation) -> None:
        self._progress.evaluation(result)
        with writing(self._run_dir):
            row = asdict(result) | {"exact_match": result.exact_match, "update": result.version}
            if math.isnan(result.reward_mean):
                row["reward_mean"] = None
            self._evaluations.append(row)

    def evaluations(self) -> list[Evaluation]:
        """Those on record, from earlier sessions too, without their examples."""
        fields = ("split", "version", "correct", "total")
        found = []
        for row in read_lines(self._evaluations.path):
            reward = row.get("reward_mean")  # null where no reward was valid; absent in records of earlier versions
            known = {name: row[name] for name in fields}
            found.append(Evaluation(**known, reward_mean=math.nan if reward is None else reward))
        return found

    def rewards(self) -> list[float]:
        """Mean reward of every update of the surviving run, NaN where there was none."""
        means = [row.get("reward_mean") for row in read_metrics(self._run_dir)]
        return [math.nan if mean is None else mean for mean in means]

    def _metrics_at(self, step: Step, now: float) -> dict[str, Any]:
        step_s = now - self._step_ended
        metrics: dict[str, Any] = step.metrics | {"step_s": step_s, "policy_version": step.k + 1}
        return metrics | {f"{name}_per_s": metrics[name] / step_s for name in ("tokens", "response_tokens", "samples")}

    def line(self, step: Step) -> dict[str, Any]:
        """The line of an update as it would be if it ended now. A checkpoint keeps it, since the run may be killed when
        that is written and the line is not.
        """
        return plain_line(step.k, self._metrics_at(step, time.monotonic()))

    def restore(self, k: int, line: Mapping[str, Any]) -> None:
        """Write the line of update ``k``, as a checkpoint kept it, where it is not on record."""
        if all(row["update"] != k for row in read_metrics(self._run_dir)):
            with writing(self._run_dir):
                self._metrics.write(k, line)

    def step(self, step: Step) -> None:
        """Close update ``step.k``.

        ``step_s`` is measured from the end of the update before: nothing is left out.
        """
        now = time.monotonic()
        metrics = self._metrics_at(step, now)
        step_s, self._step_ended = metrics["step_s"], now
        with writing(self._run_dir):
            self._metrics.write(step.k, metrics)
        self.tokens += metrics["tokens"]
        self.training_s += step_s
        self._say_if_without_signal(step.k, metrics)
        self._say_if_skipped(step.k, metrics)
        self._say_if_replaced(step.k, metrics)
        self._say_if_apart(step.k, metrics)
        self._progress.step(
            StepReport(
                update=(step.k + 1) * self._per - 1,
                reward=metrics.get("reward_mean", math.nan),
                tokens_per_s=metrics["tokens_per_s"],
                staleness=metrics["staleness_mean"],
                step_s=step_s,
                actor_waited_s=metrics["exposed_wait_s"],
                rollout_waited_s=metrics["rollout_waited_s"],
            )
        )

    def _say_if_without_signal(self, k: int, metrics: Mapping[str, float]) -> None:
        """At the first of several updates in a row, and at every tenth."""
        silent = metrics["zero_signal_groups"] == metrics["groups"] and "teacher_kl" not in metrics
        self._without_signal = self._without_signal + 1 if silent else 0
        if self._without_signal == 1 or (self._without_signal and self._without_signal % REMIND == 0):
            row = "" if self._without_signal == 1 else f", as for {self._without_signal} updates in a row"
            self.note(
                f"update {(k + 1) * self._per}: the rewards of each of its {metrics['groups']:.0f} groups are "
                f"equal{row}, so that it learnt nothing; look at the reward, the temperature and how hard the prompts "
                "are"
            )

    def _say_if_skipped(self, k: int, metrics: Mapping[str, float]) -> None:
        """At the first of several in a row, and at every tenth."""
        skipped = int(metrics["update_skipped"])
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped == 1 or (self._skipped and self._skipped % REMIND == 0):
            why = (
                "no token of it carried loss, since all samples failed, were empty or were left out as truncated "
                "(algorithm.truncated)"
                if metrics["loss_tokens"] == 0
                else "its loss or gradient was not finite"
            )
            count = "was skipped" if self._per == 1 else f": {skipped} of {self._per} were skipped"
            self.note(f"update {(k + 1) * self._per} {count}: {why}")

    def _say_if_replaced(self, k: int, metrics: Mapping[str, float]) -> None:
        restarts = int(metrics.get("processor_restarts", 0))
        if restarts > self._replaced:
            self.note(f"a processor worker ended and was replaced ({restarts} so far), before update {k + 1}")
        self._replaced = restarts

    def _say_if_apart(self, k: int, metrics: Mapping[str, float]) -> None:
        """At the first gap beyond ``rollout.logprob_gap_alarm``, and at any of twice what was said before."""
        if self._gap_alarm is not None and "rollout_gap_mean" in metrics:
            with writing(self._run_dir):
                said = self._gap_alarm.look(k, metrics["rollout_gap_mean"])
            if said:
                self.note(f"update {(k + 1) * self._per}: {said}")

    def close(self) -> None:
        for writer in (self._metrics, self._fingerprints, self._evaluations):
            writer.close()
