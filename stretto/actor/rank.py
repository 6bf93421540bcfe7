"""One data-parallel rank of the training actor, as plain Python: phases 1 to 4 of a step over its share of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.actor.advantage import GroupRelative
from stretto.actor.checkpoint import (
    Checkpointer,
    Entries,
    config_hash,
    iter_shards,
    read_shapes,
    read_shard,
    restore_rng,
    rng_tensors,
)
from stretto.actor.evidence import RankEvidence
from stretto.actor.forward import Family
from stretto.actor.objective import MicrobatchRows, grpo_objective, step_metrics
from stretto.actor.old_policy import DedicatedForward, OldPolicySource
from stretto.actor.optim import warmup_constant_decay
from stretto.actor.parallel import RankGroup
from stretto.actor.trainer import Trainer
from stretto.actor.weights import WeightTags, iter_buckets
from stretto.config import Config
from stretto.models.batch import SampleBatch, SampleInput
from stretto.observe.fingerprint import TensorSum, column_sum, combine, fingerprint, fingerprint_record, tensor_sums
from stretto.observe.trace import Tracer
from stretto.types import (
    GROUP_FIELDS,
    ChunkSchedule,
    GroupFields,
    GroupRecord,
    Microbatch,
    Mini,
    ProcessedPrompt,
    StrettoError,
    WeightBucket,
)

Fetch = Callable[[Any, Sequence[int]], dict[int, GroupFields]]
"""From (refs, groups) to the payload of each of those groups; ``refs`` is what the data plane handed the controller."""
OldPolicyFactory = Callable[[Family, nn.Module, float, Tracer], OldPolicySource]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Sample:
    """One sample as this rank keeps it from phase 1 to the end of the partition."""

    input: SampleInput
    rollout: np.ndarray
    valid: bool
    reward: float
    versions: tuple[int, int]
    """Policy version at its first and at its last token."""


class ActorRankCore:
    """Trains on what ``fetch`` brings, by the schedule that the controller built.

    ``old_policy`` builds the source of old-policy log-probs; ``group`` is this rank's place among its siblings.
    """

    def __init__(
        self,
        config: Config,
        family: Any,
        model: nn.Module,
        fetch: Fetch,
        tracer: Tracer,
        group: RankGroup | None = None,
        old_policy: OldPolicyFactory = DedicatedForward,
    ):
        self.config, self.family, self.model, self.fetch, self.tracer = config, family, model, fetch, tracer
        self.group = group or RankGroup()
        self.device = next(model.parameters()).device
        actor = config.actor
        lr = warmup_constant_decay(
            peak=actor.lr,
            warmup=actor.warmup_updates,
            updates=config.run.updates,
            decay_fraction=actor.decay_fraction,
            decay_to=actor.decay_to,
        )
        temperature = config.rollout.temperature
        self.trainer = Trainer(family, model, actor, lr, temperature=temperature, group=self.group)
        self.old_policy = old_policy(family, model, temperature, tracer)
        self.estimator = GroupRelative(config.algorithm.advantage_eps)
        self.tags = WeightTags(model)
        self.checkpointer = Checkpointer(Path(config.run.dir) / "checkpoints", config.checkpoint.keep)
        self._suppressed = family.suppressed_V.cpu().numpy()
        self.end_partition()

    # Phases --------------------------------------------------------------------------------------------------------

    def phase1(self, chunk: ChunkSchedule, records: Sequence[GroupRecord], refs: Any) -> dict[str, float]:
        """Fetch this rank's groups of one chunk and run the forwards without gradient.

        ``records``: those of the chunk's groups, in any order. Raises StrettoError naming the sample where its payload
        does not fit its record.
        """
        mine = chunk.ranks[self.group.rank]
        by_group = {record.group: record for record in records}
        n = records[0].n
        wanted = sorted({index // n for microbatch in mine for index in microbatch.samples})
        owned = sorted({index // n for microbatch in mine if not microbatch.inert for index in microbatch.samples})
        with self.tracer.span(
            "actor.fetch", partition=records[0].partition, chunk=chunk.chunk, groups=len(wanted)
        ) as attrs:
            payloads = self.fetch(refs, wanted)
            attrs["bytes"] = sum(_bytes(fields) for fields in payloads.values())
        for group in wanted:
            self._take(by_group[group], payloads[group])
        self._groups.update((group, by_group[group]) for group in owned)
        with self.tags.active("actor"):  # old-policy means the actor's own weights, whatever else was swapped in
            for microbatch in mine:
                self.old_policy.prepare(
                    microbatch.samples, partial(self._collate, microbatch.samples), inert=microbatch.inert
                )
        real = [index for microbatch in mine if not microbatch.inert for index in microbatch.samples]
        self._indexes.extend(real)
        return {"samples": len(real), "groups": len(owned), "microbatches": len(mine), "fill": chunk.fill}

    def phase2(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        """Advantages over the full batch: ``records`` are all groups of the partition, on every rank."""
        indexes = [index for record in records for index in record.global_indexes]
        valid = [v for record in records for v in record.valid]
        rewards = [r for record in records for r in record.rewards]
        with self.tracer.span("actor.advantages", samples=len(indexes)):
            result = self.estimator(
                torch.tensor(rewards, dtype=torch.float64),
                torch.tensor(valid, dtype=torch.bool),
                torch.tensor([record.group for record in records for _ in record.rewards]),
            )
        self._advantages.update(zip(indexes, result.advantages_B.tolist(), strict=True))
        metrics = {
            "groups": float(result.groups),
            "zero_signal_groups": float(result.zero_signal_groups),
            "samples": float(len(indexes)),
            "failed_samples": float(len(valid) - sum(valid)),
        }
        return metrics if math.isnan(result.mean_reward) else metrics | {"reward_mean": result.mean_reward}

    def phase3(self, mini: Mini, normaliser: int) -> dict[str, float]:
        """One optimizer update on the recorded schedule; ``normaliser`` is ``schedule.loss_normaliser`` of its records.

        Returns metrics; ``update_skipped`` is 1 where nothing was applied.
        """
        correction = self.config.importance_correction
        where: dict[str, Any] = {"partition": mini.partition, "mini": mini.index}
        self.trainer.begin()
        for microbatch in mini.microbatches(self.group.rank):
            count = 0 if microbatch.inert else len(microbatch.samples)
            with self.tracer.span("actor.train", **where, samples=count, inert=microbatch.inert):
                batch = self._collate(microbatch.samples)
                rows = self._rows(microbatch, batch)
                new_T = self.trainer.train(batch, grpo_objective(self.config.algorithm, correction, batch, rows))
            if not microbatch.inert:
                self._keep(self._new, microbatch.samples, batch, new_T)
        with self.tracer.span("actor.optimizer", **where) as attrs:
            stats = self.trainer.finish(normaliser)
            attrs.update(applied=stats.applied, reason=stats.reason)
        self._schedules.append(mini)
        return step_metrics(stats, correction) | {
            "optimizer_step": float(self.trainer.optimizer_step),
            "skipped_updates": float(self.trainer.skipped),
        }

    def publish(self, version: int) -> Iterator[WeightBucket]:
        """The model's weights as policy version ``version``, in the engine's dtype (``model.dtype``)."""
        dtype = DTYPES[self.config.model.dtype]
        return iter_buckets(dict(self.model.named_parameters()), version, dtype)

    def end_partition(self) -> None:
        """Forget the samples of the partition; call after ``evidence``."""
        self._samples: dict[int, _Sample] = {}
        self._prompts: dict[int, ProcessedPrompt] = {}
        self._groups: dict[int, GroupRecord] = {}
        self._indexes: list[int] = []
        self._advantages: dict[int, float] = {}
        self._old: dict[int, np.ndarray] = {}
        self._new: dict[int, np.ndarray] = {}
        self._schedules: list[Mini] = []
        self.old_policy.end_partition()

    # Samples -------------------------------------------------------------------------------------------------------

    def _take(self, record: GroupRecord, fields: GroupFields) -> None:
        """Keep one group's payload; its samples share one prompt object, hence one vision forward."""
        if record.group in self._prompts:
            return
        prompt = ProcessedPrompt(
            prompt_ids=np.asarray(fields["prompt_ids"]),
            mm_token_type_ids=np.asarray(fields["mm_token_type_ids"]),
            pixel_values=np.asarray(fields["pixel_values"]),
            image_grid_thw=np.asarray(fields["image_grid_thw"]),
        )
        if len(prompt.prompt_ids) != record.prompt_tokens:
            raise StrettoError(
                f"partition {record.partition}, group {record.group} (row {record.row_id!r}): "
                f"{len(prompt.prompt_ids)} prompt ids, but its record says {record.prompt_tokens}"
            )
        self._prompts[record.group] = prompt
        for i, index in enumerate(record.global_indexes):
            ids, rollout = np.asarray(fields["response_ids"][i]), np.asarray(fields["rollout_logprobs"][i])
            where = f"partition {record.partition}, sample {index} (row {record.row_id!r})"
            if not len(ids) == len(rollout) == record.response_tokens[i]:
                raise StrettoError(
                    f"{where}: {len(ids)} response ids and {len(rollout)} rollout log-probs, but its record says "
                    f"{record.response_tokens[i]} tokens; there must be one log-prob for every token"
                )
            self._samples[index] = _Sample(
                SampleInput(prompt, self._without_suppressed(ids, record.valid[i], where)),
                rollout,
                record.valid[i],
                record.rewards[i],
                (record.version_start[i], record.version_end[i]),
            )

    def _without_suppressed(self, ids: np.ndarray, valid: bool, where: str) -> np.ndarray:
        """A failed sample may hold vision ids, which would take pixels in the forward: EOS stands in for them there."""
        bad = self._suppressed[ids]
        if not bad.any():
            return ids
        if valid:
            raise StrettoError(
                f"{where}: response id {int(ids[bad][0])} is one that no response may hold, yet the sample is marked "
                "valid; the rollout engine must suppress it or mark the sample as failed"
            )
        return np.where(bad, np.int32(self.family.eos_ids[0]), ids).astype(np.int32)

    def _collate(self, samples: Sequence[int]) -> SampleBatch:
        inputs = [self._samples[index].input for index in samples]
        return self.family.collate(inputs, self.device, self.config.actor.layout_on(self.device.type))

    def _rows(self, microbatch: Microbatch, batch: SampleBatch) -> MicrobatchRows:
        samples = [self._samples[index] for index in microbatch.samples]

        def old(new_T: Tensor) -> Tensor:
            if microbatch.inert:
                return new_T
            old_T = self.old_policy.values(microbatch.samples, new_T)
            self._keep(self._old, microbatch.samples, batch, old_T)
            return old_T

        advantages = np.array([self._advantages[index] for index in microbatch.samples], dtype=np.float32)
        rollout = np.concatenate([sample.rollout for sample in samples]).astype(np.float32)
        trained = [sample.valid and not microbatch.inert for sample in samples]
        return MicrobatchRows(
            advantages_B=torch.from_numpy(advantages).to(self.device),
            trained_B=torch.tensor(trained, dtype=torch.bool, device=self.device),
            rollout_T=torch.from_numpy(rollout).to(self.device),
            old=old,
        )

    @staticmethod
    def _keep(into: dict[int, np.ndarray], samples: Sequence[int], batch: SampleBatch, values_T: Tensor) -> None:
        parts = np.split(values_T.cpu().numpy(), np.cumsum(batch.lengths)[:-1])
        into.update(zip(samples, parts, strict=True))

    # Evidence ------------------------------------------------------------------------------------------------------

    def raw(self) -> dict[str, np.ndarray]:
        """This rank's samples of the partition, sorted by ``global_index`` (int64 [B]), as flat arrays.

        ``lengths``, ``version_start``, ``version_end`` int32, ``rewards`` float64, ``valid`` bool, ``advantages``
        float32 [B]; ``response_ids`` int32 and ``rollout_logprobs``, ``old_logprobs``, ``train_logprobs`` float32
        [sum of lengths], in row order.
        """
        order = sorted(self._indexes)
        kept = [self._samples[index] for index in order]
        empty = [np.zeros(0, np.float32)]
        return {
            "global_index": np.array(order, np.int64),
            "lengths": np.array([len(s.rollout) for s in kept], np.int32),
            "rewards": np.array([s.reward for s in kept], np.float64),
            "valid": np.array([s.valid for s in kept], np.bool_),
            "version_start": np.array([s.versions[0] for s in kept], np.int32),
            "version_end": np.array([s.versions[1] for s in kept], np.int32),
            "advantages": np.array([self._advantages[index] for index in order], np.float32),
            "response_ids": np.concatenate([s.input.response_ids for s in kept] or [np.zeros(0, np.int32)]),
            "rollout_logprobs": np.concatenate([s.rollout for s in kept] or empty),
            "old_logprobs": np.concatenate([self._old[index] for index in order] or empty),
            "train_logprobs": np.concatenate([self._new[index] for index in order] or empty),
        }

    def input_sums(self) -> dict[str, dict[str, TensorSum]]:
        """Hash of each input column over this rank's samples, under its own name. Ranks' hashes add up
        (``fingerprint.add_sums``): the columns that a group owns are counted by the rank that holds its first sample.
        """
        order = sorted(self._indexes)
        owners = [group for group, record in sorted(self._groups.items()) if record.global_indexes[0] in set(order)]
        columns: dict[str, tuple[list[np.ndarray], list[int]]] = {
            spec.name: ([getattr(self._prompts[group], spec.name) for group in owners], owners)
            for spec in GROUP_FIELDS
            if spec.per == "group"
        }
        kept = [self._samples[index] for index in order]
        columns["response_ids"] = ([s.input.response_ids for s in kept], order)
        columns["rollout_logprobs"] = ([s.rollout for s in kept], order)
        columns["rewards"] = ([np.array([s.reward], np.float64) for s in kept], order)
        columns["valid"] = ([np.array([s.valid], np.uint8) for s in kept], order)
        # A rank without samples has no dtype to hash; it adds nothing.
        return {name: {name: column_sum(rows, indexes)} if indexes else {} for name, (rows, indexes) in columns.items()}

    def evidence(self) -> RankEvidence:
        """What the last update ended with on this rank, and what went into it."""
        indexes = sorted(self._advantages)
        rows = [np.array([self._advantages[index]], np.float32) for index in indexes]
        master = self.trainer.master
        grads = master.named_grads()
        return RankEvidence(
            alike={
                "advantages": combine({"advantages": column_sum(rows, indexes)}),
                "schedule": fingerprint_record(self._schedules),
            },
            replica=fingerprint(master.named_parameters()) if self.group.world > 1 else "",
            parts={
                "parameters": tensor_sums(master.named()),
                "gradients": tensor_sums({name: grads[name] for name in master.masters}),
                "optimizer": tensor_sums(self.trainer.optimizer_tensors()),
                **{f"inputs.{name}": sums for name, sums in self.input_sums().items()},
            },
            raw=self.raw(),
        )

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def write_shard(self, step: int) -> Entries:
        """Every rank, after ``checkpointer.begin`` on rank 0: its part of checkpoint ``step``."""
        tensors = {
            "masters": self.trainer.master.named(),
            "optimizer": self.trainer.optimizer_tensors(),
            "rng": rng_tensors(),
        }
        return self.checkpointer.write(step, tensors, self.group.rank, self.group.world)

    def commit(
        self,
        step: int,
        shards: Sequence[Entries],
        cursor: int,
        policy_version: int,
        published: Mapping[int, Callable[[], Iterable[WeightBucket]]],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Rank 0, once all ranks have written: complete checkpoint ``step``; ``shards`` are their answers.

        ``cursor``: the next partition to train. ``published``: versions v - s … v - 1, each a call that gives its
        buckets. ``extra``: plain JSON of the loop's, found again as ``state["extra"]``.
        """
        trainer = self.trainer
        state = {
            "cursor": cursor,
            "policy_version": policy_version,
            "optimizer_step": trainer.optimizer_step,
            "skipped": trainer.skipped,
            "lr": trainer.lr(trainer.optimizer_step),
            "config_hash": config_hash(self.config),
            "extra": dict(extra or {}),
        }
        return self.checkpointer.commit(step, shards, state, published)

    def load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that ``latest_valid`` found for this number of ranks; every rank reads it.

        Raises StrettoError where its tensors do not fit this model.
        """
        expected = {name: tuple(t.shape) for name, t in self.trainer.master.named_parameters().items()}
        found = read_shapes(path, "masters")
        if expected != found:
            odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise StrettoError(
                f"checkpoint {path} does not fit the model: {odd[0]!r} is {found.get(odd[0], 'absent')} there and "
                f"{expected.get(odd[0], 'absent')} here; resume with the model options it was saved with, or choose "
                "another run.dir"
            )
        rank = self.group.rank
        self.trainer.restore(
            iter_shards(path, "masters"),
            read_shard(path, "optimizer", rank),
            int(state["optimizer_step"]),
            int(state["skipped"]),
        )
        restore_rng(read_shard(path, "rng", rank))
        self.checkpointer.previous = path


def _bytes(fields: GroupFields) -> int:
    return sum(part.nbytes for column in fields.values() for part in (column if isinstance(column, list) else [column]))
