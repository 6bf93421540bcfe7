"""One data-parallel rank of the training actor, as plain Python: phases 1 to 4 of a step over its share of samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.actor.advantage import estimator
from stretto.actor.evidence import RankEvidence
from stretto.actor.forward import Family
from stretto.actor.hook import Hook
from stretto.actor.kl import kl_estimate
from stretto.actor.kl import resolve as resolve_estimator
from stretto.actor.objective import MicrobatchRows, policy_objective, step_metrics
from stretto.actor.old_policy import DedicatedForward, KeptForward, OldPolicySource
from stretto.actor.optim import warmup_constant_decay
from stretto.actor.others import OtherPolicy, fingerprint_of
from stretto.actor.parallel import RankGroup, reduce_sum
from stretto.actor.publishing import Publisher
from stretto.actor.samples import Place, Samples
from stretto.actor.saving import Saving
from stretto.actor.selfcheck import no_grad_is_grad
from stretto.actor.teacher import HostedModel
from stretto.actor.trainer import Trainer
from stretto.actor.weights import WeightTags
from stretto.config import Config
from stretto.models.batch import SampleBatch
from stretto.observe.dump import GRADIENTS, PARAMETERS, write_dump
from stretto.observe.fingerprint import column_sum, combine, fingerprint, fingerprint_record, tensor_sums
from stretto.observe.trace import Tracer
from stretto.types import (
    ChunkSchedule,
    ForwardReport,
    GroupFields,
    GroupRecord,
    Microbatch,
    Mini,
    StrettoError,
)

Fetch = Callable[[Any, Sequence[int]], dict[int, GroupFields]]
"""From (refs, groups) to the payload of each of those groups; ``refs`` is what the data plane handed the controller."""
OldPolicyFactory = Callable[[Family, nn.Module, float, Tracer], OldPolicySource]


class ActorRankCore:
    """Trains on what ``fetch`` brings, by the schedule that the controller built.

    ``old_policy`` builds the source of old-policy log-probs; ``group`` is this rank's place among its siblings;
    ``teacher`` is the family and the model of one to distil, ``hook`` what to call before log-probs are computed.
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
        teacher: tuple[Any, HostedModel] | None = None,
        hook: Hook | None = None,
    ):
        self.config, self.family, self.model, self.fetch, self.tracer = config, family, model, fetch, tracer
        self.group = group or RankGroup()
        self.device = next(model.parameters()).device
        actor, algorithm = config.actor, config.algorithm
        lr = warmup_constant_decay(
            peak=actor.lr,
            warmup=actor.warmup_updates,
            updates=config.run.updates,
            decay_fraction=actor.decay_fraction,
            decay_to=actor.decay_to,
            shape=actor.decay_shape,
        )
        temperature = config.rollout.temperature
        self.trainer = Trainer(family, model, actor, lr, temperature=temperature, group=self.group)
        self.tags = WeightTags(model)
        self.publisher = Publisher(config, model)
        self.old_policy = old_policy(family, model, temperature, tracer)
        self.estimator = estimator(algorithm)
        self.hook = hook
        self.reference: OtherPolicy | None = None
        if algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0:
            self.tags.save("ref")
            forward = KeptForward(family, model, temperature, tracer, "ref")
            self.reference = OtherPolicy(family, forward, lambda: self.tags.active("ref"), fingerprint_of(model))
        self.teacher: OtherPolicy | None = None
        if teacher is not None:
            teacher_family, hosted = teacher
            forward = KeptForward(teacher_family, hosted.model, temperature, tracer, "teacher")
            self.teacher = OtherPolicy(teacher_family, forward, hosted.resident, fingerprint_of(hosted.model))
        roles = {other.forward.role: other.fingerprint for other in self._others()}
        old_actor = self.tags if self.old_policy.tag == "old_actor" else None
        self.saving = Saving(config, self.trainer, self.group, roles, old_actor)
        self.end_partition()

    def no_grad_is_grad(self) -> bool:
        """See ``selfcheck``."""
        layout = self.config.actor.layout_on(self.device.type)
        return no_grad_is_grad(self.family, self.trainer, layout, self.device)

    # Phases --------------------------------------------------------------------------------------------------------

    def phase1(self, chunk: ChunkSchedule, records: Sequence[GroupRecord], refs: Any) -> ForwardReport:
        """Fetch this rank's groups of one chunk and run the forwards without gradient.

        ``records``: those of the chunk's groups, in any order. Raises StrettoError naming the sample where its payload
        does not fit its record.
        """
        mine, partition = chunk.ranks[self.group.rank], records[0].partition
        by_group = {record.group: record for record in records}
        n = records[0].n
        wanted = sorted({index // n for microbatch in mine for index in microbatch.samples})
        owned = sorted({index // n for microbatch in mine if not microbatch.inert for index in microbatch.samples})
        if self.samples.partition < 0:
            self._begin(partition)
        with self.tracer.span("actor.fetch", partition=partition, chunk=chunk.chunk, groups=len(wanted)) as attrs:
            payloads = self.fetch(refs, wanted)
            nbytes = attrs["bytes"] = sum(_bytes(fields) for fields in payloads.values())
        begun_s = time.time()
        for group in wanted:
            self.samples.take(by_group[group], payloads[group])
        self.samples.records.update((group, by_group[group]) for group in owned)
        with self.tags.active(self.old_policy.tag):
            for microbatch in mine:
                collate = partial(self._collate, self.family, microbatch.samples)
                self.old_policy.prepare(microbatch.samples, collate, partition, inert=microbatch.inert)
        for other in self._others():
            with other.resident():
                for microbatch in mine:
                    collate = partial(self._collate, other.family, microbatch.samples)
                    other.forward.prepare(microbatch.samples, collate, partition, inert=microbatch.inert)
        real = [index for microbatch in mine if not microbatch.inert for index in microbatch.samples]
        self.samples.owned.extend(real)
        return ForwardReport(begun_s, time.time(), nbytes)

    def _begin(self, partition: int) -> None:
        """What comes before the first forward of a partition."""
        self.samples.partition = partition
        if self.old_policy.tag == "old_actor" and partition % self.config.algorithm.old_actor_every == 0:
            self.tags.save("old_actor")
        if self.hook is not None:
            with self.tracer.span("actor.hook", partition=partition):
                self.hook(model=self.model, partition=partition, rank=self.group.rank)

    def _others(self) -> list[OtherPolicy]:
        return [other for other in (self.reference, self.teacher) if other is not None]

    def phase2(self, records: Sequence[GroupRecord]) -> dict[str, float]:
        """Advantages over the full batch: ``records`` are all groups of the partition, on every rank."""
        indexes = [index for record in records for index in record.global_indexes]
        valid = torch.tensor([v for record in records for v in record.valid])
        rewards = torch.tensor([r for record in records for r in record.rewards], dtype=torch.float64)
        counted = [c for record in records for c in record.counted(self.config.algorithm.truncated)]
        with self.tracer.span("actor.advantages", samples=len(indexes)):
            metrics = {}
            judged = rewards
            if self.config.algorithm.kl_reward_coef > 0:
                kl = self._reward_kl(indexes)
                judged = rewards - self.config.algorithm.kl_reward_coef * kl
                metrics["reward_kl_mean"] = float(kl[valid].mean()) if valid.any() else 0.0
            result = self.estimator(
                judged,
                torch.tensor(counted, dtype=torch.bool),
                torch.tensor([record.group for record in records for _ in record.rewards]),
            )
        self.samples.rewards.update(zip(indexes, judged.tolist(), strict=True))
        self.samples.advantages.update(zip(indexes, result.advantages_B.tolist(), strict=True))
        metrics |= {
            "groups": float(result.groups),
            "zero_signal_groups": float(result.zero_signal_groups),
            "samples": float(len(indexes)),
            "failed_samples": float(len(valid) - int(valid.sum())),
        }
        return metrics | ({"reward_mean": float(rewards[valid].mean())} if valid.any() else {})

    def _reward_kl(self, indexes: Sequence[int]) -> Tensor:
        """Estimated KL(old policy || reference) of each sample in nats, float64 [B] on the host: the sum over its
        response tokens, the same on every rank.

        Raises:
            StrettoError: the actor's own log-probs before the update are not known.
        """
        assert self.reference is not None
        kind = resolve_estimator(self.config.algorithm.kl_estimator, "reward")
        owned = set(self.samples.owned)
        sums = torch.zeros(len(indexes), dtype=torch.float64)
        for row, index in enumerate(indexes):
            if index in owned:
                old_R = self.old_policy.known(index)
                if old_R is None:
                    raise StrettoError(
                        f"sample {index}: algorithm.kl_reward_coef needs the actor's own log-probs before the update, "
                        "and there are none; compute them, or use algorithm.kl_loss_coef"
                    )
                sums[row] = kl_estimate(kind, old_R, self.reference.forward.kept(index)).to(torch.float64).sum()
        # Every sample is owned by one rank; the others add zeros, which change no bit.
        sums = sums.to(self.device)
        reduce_sum(sums, self.group, "the KL of each sample")
        return sums.cpu()

    def phase3(self, mini: Mini, normaliser: int) -> dict[str, float]:
        """One optimizer update on the recorded schedule; ``normaliser`` is ``schedule.loss_normaliser`` of its records.

        Returns metrics; ``update_skipped`` is 1 where nothing was applied.
        """
        where: dict[str, Any] = {"partition": mini.partition, "mini": mini.index}
        self.trainer.begin()
        for place, microbatch in self._placed(mini):
            count = 0 if microbatch.inert else len(microbatch.samples)
            reused = self.old_policy.reused
            with self.tracer.span("actor.train", **where, samples=count, inert=microbatch.inert) as attrs:
                batch = self._collate(self.family, microbatch.samples)
                rows = self._rows(microbatch, batch)
                new_T = self.trainer.train(batch, policy_objective(self.config, batch, rows))
                attrs["reused"] = self.old_policy.reused - reused
            if not microbatch.inert:
                self.samples.keep(self.samples.new, microbatch.samples, batch, new_T)
                self.samples.places.update(
                    (index, replace(place, row=row)) for row, index in enumerate(microbatch.samples)
                )
        with self.tracer.span("actor.optimizer", **where) as attrs:
            stats = self.trainer.finish(normaliser)
            attrs.update(applied=stats.applied, reason=stats.reason)
        self._schedules.append(mini)
        return step_metrics(stats, self.config) | {
            "optimizer_step": float(self.trainer.optimizer_step),
            "skipped_updates": float(self.trainer.skipped),
        }

    def _placed(self, mini: Mini) -> Iterator[tuple[Place, Microbatch]]:
        """This rank's microbatches in schedule order, and the place of the first row of each."""
        for chunk in mini.chunks:
            number = mini.index * len(mini.chunks) + chunk.chunk
            for i, microbatch in enumerate(chunk.ranks[self.group.rank]):
                yield Place(number, self.group.rank, i, 0), microbatch

    def end_partition(self) -> None:
        """Forget the samples of the partition; call after ``evidence``."""
        self.samples = Samples(self.family, self.config.algorithm.truncated)
        self._schedules: list[Mini] = []
        self.old_policy.end_partition()
        for other in self._others():
            other.forward.end_partition()

    def _collate(self, family: Any, indexes: Sequence[int]) -> SampleBatch:
        inputs = [sample.input for sample in self.samples.of(indexes)]
        batch: SampleBatch = family.collate(inputs, self.device, self.config.actor.layout_on(self.device.type))
        return batch

    def _rows(self, microbatch: Microbatch, batch: SampleBatch) -> MicrobatchRows:
        samples, indexes = self.samples.of(microbatch.samples), microbatch.samples
        rollout = np.concatenate([sample.rollout for sample in samples]).astype(np.float32)
        rollout_T = torch.from_numpy(rollout).to(self.device)
        trained = [sample.trained and not microbatch.inert for sample in samples]

        def old(new_T: Tensor) -> Tensor:
            if microbatch.inert:
                return new_T
            old_T = self.old_policy.values(indexes, new_T, rollout_T)
            self.samples.keep(self.samples.old, indexes, batch, old_T)
            return old_T

        def note_mask(mask_T: Tensor) -> None:
            if not microbatch.inert:
                self.samples.keep(self.samples.masks, indexes, batch, mask_T)

        def other(policy: OtherPolicy | None) -> Tensor | None:
            if policy is None:
                return None
            return torch.zeros_like(rollout_T) if microbatch.inert else policy.forward.values(indexes, rollout_T)

        return MicrobatchRows(
            advantages_B=torch.tensor(
                [self.samples.advantages[index] for index in indexes], dtype=torch.float32, device=self.device
            ),
            trained_B=torch.tensor(trained, dtype=torch.bool, device=self.device),
            rollout_T=rollout_T,
            old=old,
            note_mask=note_mask,
            ref_T=other(self.reference),
            teacher_T=other(self.teacher),
        )

    # Evidence ------------------------------------------------------------------------------------------------------

    def evidence(self) -> RankEvidence:
        """What the last update of the partition ended with on this rank, and what went into it."""
        indexes = sorted(self.samples.advantages)
        rows = [np.array([self.samples.advantages[index]], np.float32) for index in indexes]
        master = self.trainer.master
        grads = master.named_grads()
        if self.samples.partition == self.config.seams.dump_partition:
            self._dump()
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
                **{f"inputs.{name}": sums for name, sums in self.samples.input_sums().items()},
            },
            raw=self.samples.raw(),
        )

    def _dump(self) -> None:
        """Everything that the last update of the partition was, for ``observe/dump.py``."""
        master = self.trainer.master
        kinds = {PARAMETERS: master.named()} | ({GRADIENTS: master.named_grads()} if self.group.rank == 0 else {})
        tensors = {f"{kind}{name}": _host(t) for kind, named in kinds.items() for name, t in named.items()}
        write_dump(self.config.run.dir, self.samples.partition, self.group.rank, self.group.world, tensors)


def _host(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())


def _bytes(fields: GroupFields) -> int:
    return sum(part.nbytes for column in fields.values() for part in (column if isinstance(column, list) else [column]))
