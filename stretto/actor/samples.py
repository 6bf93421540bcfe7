"""The samples of one rank, from phase 1 to the end of the partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from stretto.actor.forward import Family
from stretto.models.batch import SampleBatch, SampleInput
from stretto.observe.fingerprint import MASK, TensorSum, column_sum, combine, row_sums
from stretto.types import GROUP_FIELDS, GroupFields, GroupRecord, ProcessedPrompt, StrettoError, Truncated


@dataclass(frozen=True)
class Sample:
    """One sample. ``valid``: neither engine nor reward failed; ``trained``: its tokens carry loss; ``truncated``: cut
    by length; ``reward``: as the reward function gave it; ``versions``: those of the policy at its first and at its
    last token.
    """

    input: SampleInput
    rollout: np.ndarray
    valid: bool
    trained: bool
    truncated: bool
    reward: float
    versions: tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Where a sample was trained: its row in a microbatch, counted within its chunk on its rank; chunks are counted
    within the partition.
    """

    chunk: int
    rank: int
    microbatch: int
    row: int


GROUP_COLUMNS = tuple(spec.name for spec in GROUP_FIELDS if spec.per == "group")
PROMPT_COLUMNS = ("prompt_ids", "mm_token_type_ids")
IMAGE_COLUMNS = ("pixel_values", "image_grid_thw")


class Samples:
    """What a rank has fetched, and what it has computed for each sample that it owns.

    owned       ``global_index`` of the samples that this rank trains, in the order of its microbatches; samples that it
                only fetched to fill up with inert microbatches are not among them
    prompts     by group; the samples of a group share one prompt object, hence one vision forward
    records     of the groups of owned samples
    rewards     of every sample of the partition, on every rank: those that advantages are computed from
    advantages  likewise
    places      of owned samples, where they were trained last
    old, new    log-probs of owned samples, float32 [R]: those that the ratio starts from, and those of training
    masks       of owned samples, bool [R]: which tokens the loss took in
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
        self.rewards: dict[int, float] = {}
        self.advantages: dict[int, float] = {}
        self.places: dict[int, Place] = {}
        self.old: dict[int, np.ndarray] = {}
        self.new: dict[int, np.ndarray] = {}
        self.masks: dict[int, np.ndarray] = {}

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
                record.truncated[i],
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
        """The owned samples, sorted by ``global_index``, as the flat arrays of ``observe/raw.py``."""
        order = sorted(self.owned)
        kept, places = self.of(order), [self.places[index] for index in order]
        hashes = self._group_hashes()
        groups = [self._group_of(index) for index in order]
        return {
            "global_index": np.array(order, np.int64),
            "lengths": np.array([len(s.rollout) for s in kept], np.int32),
            "rewards": np.array([self.rewards[index] for index in order], np.float64),
            "raw_rewards": np.array([s.reward for s in kept], np.float64),
            "valid": np.array([s.valid for s in kept], np.bool_),
            "truncated": np.array([s.truncated for s in kept], np.bool_),
            "version_start": np.array([s.versions[0] for s in kept], np.int32),
            "version_end": np.array([s.versions[1] for s in kept], np.int32),
            "advantages": np.array([self.advantages[index] for index in order], np.float32),
            "chunk": np.array([place.chunk for place in places], np.int32),
            "rank": np.array([place.rank for place in places], np.int32),
            "microbatch": np.array([place.microbatch for place in places], np.int32),
            "row": np.array([place.row for place in places], np.int32),
            "prompt_hash": np.array([hashes[group][0] for group in groups], np.uint64),
            "image_hash": np.array([hashes[group][1] for group in groups], np.uint64),
            "response_ids": _flat([s.input.response_ids for s in kept], np.int32),
            "rollout_logprobs": _flat([s.rollout for s in kept], np.float32),
            "old_logprobs": _flat([self.old[index] for index in order], np.float32),
            "train_logprobs": _flat([self.new[index] for index in order], np.float32),
            "loss_mask": _flat([self.masks[index] for index in order], np.uint8),
        }

    def _group_of(self, index: int) -> int:
        return index // next(iter(self.records.values())).n

    @cached_property
    def _group_sums(self) -> dict[str, np.ndarray]:
        """``row_sums`` of each column that groups own, over the groups of owned samples in order. A partition's images
        are most of its bytes: they are read once, for all that is said of them.
        """
        groups = sorted(self.records)
        return {name: row_sums([getattr(self.prompts[group], name) for group in groups]) for name in GROUP_COLUMNS}

    def _group_hashes(self) -> dict[int, tuple[int, int]]:
        """By group, the hashes of its prompt and of its images: ``fingerprint`` of these tensors by their names."""

        def of(row: int, group: int, names: Sequence[str]) -> int:
            tensors = {name: getattr(self.prompts[group], name) for name in names}
            sums = {
                name: TensorSum(str(tensor.dtype), tensor.shape, int(self._group_sums[name][row]) & MASK)
                for name, tensor in tensors.items()
            }
            return int(combine(sums), 16)

        return {
            group: (of(row, group, PROMPT_COLUMNS), of(row, group, IMAGE_COLUMNS))
            for row, group in enumerate(sorted(self.records))
        }

    def input_sums(self) -> dict[str, dict[str, TensorSum]]:
        """Hash of each input column over the owned samples, under its own name. Ranks' hashes add up
        (``fingerprint.add_sums``): the columns that a group owns are counted by the rank that holds its first sample.
        """
        order = sorted(self.owned)
        mine = set(order)
        rows = [row for row, group in enumerate(sorted(self.records)) if self.records[group].global_indexes[0] in mine]
        groups = [sorted(self.records)[row] for row in rows]
        found: dict[str, dict[str, TensorSum]] = {}
        for name in GROUP_COLUMNS:
            arrays = [getattr(self.prompts[group], name) for group in groups]
            found[name] = {name: column_sum(arrays, groups, self._group_sums[name][rows])} if groups else {}
        kept = self.of(order)
        columns = {
            "response_ids": [s.input.response_ids for s in kept],
            "rollout_logprobs": [s.rollout for s in kept],
            "rewards": [np.array([s.reward], np.float64) for s in kept],
            "valid": [np.array([s.valid], np.uint8) for s in kept],
        }
        # A rank without samples has no dtype to hash; it adds nothing.
        return found | {name: {name: column_sum(arrays, order)} if order else {} for name, arrays in columns.items()}


def _flat(rows: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """One array, also where there are no rows."""
    return np.concatenate([*rows, np.zeros(0, dtype)]).astype(dtype, copy=False)
