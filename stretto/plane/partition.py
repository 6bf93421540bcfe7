"""One open partition of the ledger: which groups it has, who took them, and what was written back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.plane.protocol import (
    AlreadyConsumed,
    Duplicate,
    Missing,
    Order,
    Overfilled,
    PartitionFailed,
    PlaneError,
    Unconsumed,
    Underfilled,
    spans,
)
from stretto.types import GroupRecord

_CLAIM_REMEDY = "claim every group once per consumer"


@dataclass
class Entry:
    """A group that was put. It takes up room once it is ``admitted``, and is readable once ``arrival`` is set."""

    record: GroupRecord
    nbytes: int
    logical_bytes: int
    sequence: int
    admitted: bool = False
    arrival: int | None = None
    payload: Any = None


@dataclass
class Claim:
    """A claim that waits.

    ``wanted`` caches the groups it resolves to, of which the first ``ready`` are known to be there, so that waiting
    for n groups costs O(n) in all and not at each arrival. The versions say for which state of the consumer's Taken
    it was resolved, and checked.
    """

    partition: int
    consumer: str
    groups: tuple[int, ...] | int
    order: Order
    mini: int
    chunk: int
    since: float
    deadline: float
    left_version: int = -1
    wanted: tuple[int, ...] = ()
    taken_version: int = -1
    ready: int = 0

    @property
    def place(self) -> str:
        return f"partition {self.partition}, mini {self.mini}, chunk {self.chunk}"


@dataclass
class Taken:
    """What one consumer has of a partition: groups on lease (by lease id), and groups consumed."""

    leased: dict[int, str] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    version: int = 0

    def __contains__(self, group: int) -> bool:
        return group in self.leased or group in self.acked

    def __len__(self) -> int:
        return len(self.leased) + len(self.acked)


class Partition:
    def __init__(self, index: int, groups: int, n_samples: int, minis: int, chunks_per_mini: int):
        for name, value in (
            ("groups", groups),
            ("n_samples", n_samples),
            ("minis", minis),
            ("chunks_per_mini", chunks_per_mini),
        ):
            if value < 1:
                raise PlaneError(f"partition {index}: {name} is {value}; it must be at least 1")
        if groups % (minis * chunks_per_mini):
            raise PlaneError(
                f"partition {index}: {groups} groups do not divide into {minis} minis of {chunks_per_mini} chunks; "
                "choose rollout.prompts_per_partition as a multiple of minis * actor.chunks_per_mini"
            )
        self.index, self.groups, self.n_samples = index, groups, n_samples
        self._per_mini = groups // minis
        self._per_chunk = self._per_mini // chunks_per_mini
        self.entries: dict[int, Entry] = {}
        self.arrivals: list[int] = []
        self.columns: dict[str, dict[int, np.ndarray]] = {}
        self.consumers: dict[str, Taken] = {}
        self.failure: tuple[type[PartitionFailed], str] | None = None

    def place(self, group: int) -> str:
        """Partition, mini and chunk (by index) of a group, and the group, for messages."""
        mini, within = divmod(group, self._per_mini)
        return f"partition {self.index}, mini {mini}, chunk {within // self._per_chunk}, group {group}"

    def places(self, groups: Iterable[int]) -> str:
        """Groups by mini and chunk, for messages."""
        by_chunk: dict[tuple[int, int], list[int]] = {}
        for group in sorted(groups):
            mini, within = divmod(group, self._per_mini)
            by_chunk.setdefault((mini, within // self._per_chunk), []).append(group)
        return "; ".join(f"mini {mini}, chunk {chunk}: groups {spans(g)}" for (mini, chunk), g in by_chunk.items())

    def check_record(self, record: GroupRecord) -> None:
        """Raises Overfilled, Underfilled or Duplicate for a record that has no place here."""
        if not 0 <= record.group < self.groups:
            raise Overfilled(
                f"partition {self.index}, group {record.group}: the partition was opened for groups "
                f"0-{self.groups - 1}; open it with the number of prompts that are rolled out"
            )
        place = self.place(record.group)
        for name in ("response_tokens", "rewards", "valid", "truncated", "version_start", "version_end"):
            count = len(getattr(record, name))
            if count != self.n_samples:
                error = Underfilled if count < self.n_samples else Overfilled
                raise error(
                    f"{place}: {name} has {count} samples, the partition was opened with n_samples {self.n_samples}; "
                    "put every sample of the group at once, failed ones with valid = False"
                )
        if record.group in self.entries:
            raise Duplicate(f"{place}: has been put before; put every group once")

    @property
    def nbytes(self) -> int:
        groups = sum(entry.nbytes for entry in self.entries.values() if entry.admitted)
        return groups + sum(value.nbytes for column in self.columns.values() for value in column.values())

    @property
    def complete(self) -> bool:
        return len(self.arrivals) == self.groups

    def is_ready(self, group: int) -> bool:
        entry = self.entries.get(group)
        return entry is not None and entry.arrival is not None

    def taken(self, consumer: str) -> Taken:
        return self.consumers.setdefault(consumer, Taken())

    def check_claim(self, claim: Claim) -> None:
        """Raises Missing or Overfilled for a claim of groups that this partition cannot have."""
        if isinstance(claim.groups, int):
            return
        if not claim.groups or len(set(claim.groups)) != len(claim.groups):
            raise Overfilled(
                f"{claim.place}: consumer {claim.consumer!r} claims no groups, or one twice; {_CLAIM_REMEDY}"
            )
        if outside := [group for group in claim.groups if not 0 <= group < self.groups]:
            raise Missing(
                f"{claim.place}: consumer {claim.consumer!r} claims groups {spans(outside)}, the partition has groups "
                f"0-{self.groups - 1}"
            )

    def check_left(self, claim: Claim) -> None:
        """Raises AlreadyConsumed or Overfilled for a claim of more than its consumer has not consumed yet."""
        taken = self.taken(claim.consumer)
        if claim.left_version == taken.version:
            return
        claim.left_version = taken.version
        if isinstance(claim.groups, int):
            left = self.groups - len(taken.acked)
            if not 1 <= claim.groups <= left:
                raise Overfilled(
                    f"{claim.place}: consumer {claim.consumer!r} claims {claim.groups} groups, {left} of "
                    f"{self.groups} are left for it; {_CLAIM_REMEDY}"
                )
        elif again := taken.acked.intersection(claim.groups):
            raise AlreadyConsumed(
                f"{claim.place}: consumer {claim.consumer!r} has consumed groups {spans(again)} before; {_CLAIM_REMEDY}"
            )

    def select(self, claim: Claim) -> tuple[int, ...] | None:
        """The groups that meet a claim, in its order; None while they are not all there and free."""
        taken = self.taken(claim.consumer)
        if isinstance(claim.groups, int) and claim.order == "arrival":
            if len(self.arrivals) - len(taken) < claim.groups:
                return None
            free = (group for group in self.arrivals if group not in taken)
            return tuple(group for group, _ in zip(free, range(claim.groups), strict=False))
        wanted = self._resolve(claim, taken)
        while claim.ready < len(wanted) and self.is_ready(wanted[claim.ready]):
            claim.ready += 1
        short = isinstance(claim.groups, int) and len(wanted) < claim.groups
        if short or claim.ready < len(wanted) or any(group in taken for group in wanted):
            return None
        if claim.order == "arrival":
            return tuple(sorted(wanted, key=lambda group: self.entries[group].arrival or 0))
        return wanted

    def _resolve(self, claim: Claim, taken: Taken) -> tuple[int, ...]:
        """The groups that a claim names or, for a number by index, those it means while nothing else is taken."""
        if claim.taken_version != taken.version:
            if isinstance(claim.groups, int):
                free = (group for group in range(self.groups) if group not in taken)
                claim.wanted = tuple(group for group, _ in zip(free, range(claim.groups), strict=False))
            else:
                claim.wanted = tuple(sorted(claim.groups))
            claim.taken_version, claim.ready = taken.version, 0
        return claim.wanted

    def lacks(self, claim: Claim) -> bool:
        """Whether a claim needs groups that have not been let into the plane."""
        admitted = {group for group, entry in self.entries.items() if entry.admitted}
        if isinstance(claim.groups, int) and claim.order == "arrival":
            return len(admitted) - len(self.taken(claim.consumer)) < claim.groups
        return not admitted.issuperset(self._resolve(claim, self.taken(claim.consumer)))

    def explain(self, claim: Claim) -> str:
        """Why a claim is not met, for messages."""
        taken = self.taken(claim.consumer)
        if isinstance(claim.groups, int) and claim.order == "arrival":
            ready = [group for group in self.arrivals if group not in taken]
            return f"the next {claim.groups} groups to arrive, of which {len(ready)} are there"
        wanted = self._resolve(claim, taken)
        absent = [group for group in wanted if not self.is_ready(group)]
        held = [group for group in wanted if group in taken]
        parts = [f"groups {spans(wanted)}"]
        if absent:
            parts.append(f"of which {len(absent)} have not arrived ({spans(absent)})")
        if held:
            parts.append(f"of which {len(held)} are on an open lease or consumed ({spans(held)})")
        return ", ".join(parts)

    def sample_record(self, sample: int) -> tuple[GroupRecord, int]:
        """The record of a sample's group, and the sample's place in it. Raises Missing while it is not there."""
        group, position = divmod(sample, self.n_samples)
        if not self.is_ready(group):
            inside = 0 <= group < self.groups
            where = self.place(group) if inside else f"partition {self.index}"
            raise Missing(
                f"{where}: sample {sample} is not there; "
                + ("write to samples that have been put" if inside else f"samples are 0-{self._samples - 1}")
            )
        return self.entries[group].record, position

    @property
    def _samples(self) -> int:
        return self.groups * self.n_samples

    def check_closable(self) -> None:
        """Raises Underfilled unless all samples are there, Unconsumed unless they were consumed."""
        there = {index for group in self.arrivals for index in self.entries[group].record.global_indexes}
        if absent := set(range(self._samples)) - there:
            groups = {index // self.n_samples for index in absent}
            raise Underfilled(
                f"partition {self.index}: closed with {len(there)} of {self._samples} samples; absent are samples "
                f"{spans(absent)} ({self.places(groups)}); close it when all have been consumed, or discard it"
            )
        active = {name: taken for name, taken in self.consumers.items() if len(taken)}
        if not active:
            raise Unconsumed(f"partition {self.index}: closed, but nobody has claimed it; discard it to drop it unused")
        for name, taken in active.items():
            if rest := set(range(self.groups)) - taken.acked:
                raise Unconsumed(
                    f"partition {self.index}: closed, but consumer {name!r} has not acknowledged {self.places(rest)}; "
                    "acknowledge every lease first, or discard the partition"
                )

    def raise_failure(self, place: str) -> None:
        """Raises the partition's failure, if it has one, with its first cause."""
        if self.failure is not None:
            kind, cause = self.failure
            raise kind(f"{place}: {cause}")

    def values(self, field: str, samples: Sequence[int]) -> dict[int, np.ndarray]:
        """Written-back values. Raises Missing."""
        column = self.columns.get(field, {})
        if absent := [sample for sample in samples if sample not in column]:
            raise Missing(
                f"partition {self.index}: field {field!r} has not been written for samples {spans(absent)} "
                f"({self.places({sample // self.n_samples for sample in absent})}); write it back first"
            )
        return {sample: column[sample] for sample in samples}
