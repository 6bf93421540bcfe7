"""The samples of one rank, from phase 1 to the end of the partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stretto.actor.forward import Family
from stretto.models.batch import SampleBatch, SampleInput
from stretto.observe.fingerprint import TensorSum, column_sum
from stretto.types import GROUP_FIELDS, GroupFields, GroupRecord, ProcessedPrompt, StrettoError, Truncated


@dataclass(frozen=True)
class Sample:
    """One sample. ``valid``: neither engine nor reward failed; ``trained``: its tokens carry loss; ``versions``: those
    of the policy at its first and at its last token.
    """

    input: SampleInput
    rollout: np.ndarray
    valid: bool
    trained: bool
    reward: float
    versions: tuple[int, int]


class Samples:
    """What a rank has fetched, and what it has computed for each sample that it owns.

    owned       ``global_index`` of the samples that this rank trains, in the order of its microbatches; samples that it
                only fetched to fill up with inert microbatches are not among them
    prompts     by group; the samples of a group share one prompt object, hence one vision forward
    records     of the groups of owned samples
    advantages  of every sample of the partition, on every rank
    old, new    log-probs of owned samples, float32 [R]: those that the ratio starts from, and those of training
    """

    def __init__(self, family: Family, truncated: Truncated):
        self._suppressed = family.suppressed_V.cpu().numpy()
        self._eos = family.eos_ids[0]
        self._truncated: Truncated = truncated
        self.partition = -1
        self._samples: dict[int, Sample] = {}
        self.prompts: dict[int, ProcessedPrompt] = {}
        self.records: dict[int, GroupRecord] = {}
        self.owned: list[int] = []
        self.advantages: dict[int, float] = {}
        self.old: dict[int, np.ndarray] = {}
        self.new: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def of(self, indexes: Sequence[int]) -> list[Sample]:
        return [self._samples[index] for index in indexes]

    def take(self, record: GroupRecord, fields: GroupFields) -> None:
        """Keep the payload of one group; taken again, it changes nothing.

        Raises StrettoError naming the sample where the payload does not fit the record.
        """
        if record.group in self.prompts:
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
        self.prompts[record.group] = prompt
        trained = record.trained(self._truncated)
        for i, index in enumerate(record.global_indexes):
            ids, rollout = np.asarray(fields["response_ids"][i]), np.asarray(fields["rollout_logprobs"][i])
            where = f"partition {record.partition}, sample {index} (row {record.row_id!r})"
            if not len(ids) == len(rollout) == record.response_tokens[i]:
                raise StrettoError(
                    f"{where}: {len(ids)} response ids and {len(rollout)} rollout log-probs, but its record says "
                    f"{record.response_tokens[i]} tokens; there must be one log-prob for every token"
                )
            if record.valid[i] and not np.isfinite(rollout).all():
                token = int(np.flatnonzero(~np.isfinite(rollout))[0])
                raise StrettoError(
                    f"{where}: the rollout log-prob of token {token} is {rollout[token]}, yet the sample is marked "
                    "valid; the rollout engine must report one for every token that it sampled"
                )
            self._samples[index] = Sample(
                SampleInput(prompt, self._without_suppressed(ids, record.valid[i], where)),
                rollout,
                record.valid[i],
                trained[i],
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
        return np.where(bad, np.int32(self._eos), ids).astype(np.int32)

    @staticmethod
    def keep(into: dict[int, np.ndarray], indexes: Sequence[int], batch: SampleBatch, values_T: Tensor) -> None:
        """Note ``values_T`` [T] of the rows of ``batch`` by sample."""
        parts = np.split(values_T.cpu().numpy(), np.cumsum(batch.lengths)[:-1])
        into.update(zip(indexes, parts, strict=True))

    def raw(self) -> dict[str, np.ndarray]:
        """The owned samples, sorted by ``global_index`` (int64 [B]), as flat arrays.

        ``lengths``, ``version_start``, ``version_end`` int32, ``rewards`` float64, ``valid`` bool, ``advantages``
        float32 [B]; ``response_ids`` int32 and ``rollout_logprobs``, ``old_logprobs``, ``train_logprobs`` float32
        [sum of lengths], in row order.
        """
        order = sorted(self.owned)
        kept = self.of(order)
        empty = [np.zeros(0, np.float32)]
        return {
            "global_index": np.array(order, np.int64),
            "lengths": np.array([len(s.rollout) for s in kept], np.int32),
            "rewards": np.array([s.reward for s in kept], np.float64),
            "valid": np.array([s.valid for s in kept], np.bool_),
            "version_start": np.array([s.versions[0] for s in kept], np.int32),
            "version_end": np.array([s.versions[1] for s in kept], np.int32),
            "advantages": np.array([self.advantages[index] for index in order], np.float32),
            "response_ids": np.concatenate([s.input.response_ids for s in kept] or [np.zeros(0, np.int32)]),
            "rollout_logprobs": np.concatenate([s.rollout for s in kept] or empty),
            "old_logprobs": np.concatenate([self.old[index] for index in order] or empty),
            "train_logprobs": np.concatenate([self.new[index] for index in order] or empty),
        }

    def input_sums(self) -> dict[str, dict[str, TensorSum]]:
        """Hash of each input column over the owned samples, under its own name. Ranks' hashes add up
        (``fingerprint.add_sums``): the columns that a group owns are counted by the rank that holds its first sample.
        """
        order = sorted(self.owned)
        owners = [group for group, record in sorted(self.records.items()) if record.global_indexes[0] in set(order)]
        columns: dict[str, tuple[list[np.ndarray], list[int]]] = {
            spec.name: ([getattr(self.prompts[group], spec.name) for group in owners], owners)
            for spec in GROUP_FIELDS
            if spec.per == "group"
        }
        kept = self.of(order)
        columns["response_ids"] = ([s.input.response_ids for s in kept], order)
        columns["rollout_logprobs"] = ([s.rollout for s in kept], order)
        columns["rewards"] = ([np.array([s.reward], np.float64) for s in kept], order)
        columns["valid"] = ([np.array([s.valid], np.uint8) for s in kept], order)
        # A rank without samples has no dtype to hash; it adds nothing.
        return {name: {name: column_sum(rows, indexes)} if indexes else {} for name, (rows, indexes) in columns.items()}
