"""Which prompts a partition shows, and which of their groups it keeps: all, or those that say something.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2, eq. 11): a group whose rewards are all equal has no advantage, so
it is dropped, and the next prompts take its place. Candidates are numbered 0, 1, … over all rounds of a partition;
their number keys the noise. Which are kept, and under which group number, follows from candidates alone, never from
what finishes first.

    round 0           as many candidates as the partition has groups    positions start … start + groups - 1
    round r           as many as are still missing                      the positions after those
    next partition    starts where this one's candidates end

No round takes more than are missing, so none that says something is thrown away: a partition is the next ``groups``
prompts whose rewards differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stretto.rollout.finished import Finished
from stretto.types import GroupRecord, PartitionPlan, StrettoError, Truncated

Group = tuple[GroupRecord, Finished]


class Selection(Protocol):
    """The candidates of one partition. A candidate's record has its number as ``group`` until it is kept."""

    async def next_round(self) -> range:
        """Candidates to generate now; empty once there are enough. Waits for what the round before gave."""
        ...

    def row(self, candidate: int) -> int:
        """The row of the data whose prompt it shows."""
        ...

    def settle(self, record: GroupRecord, finished: Finished) -> list[Group]:
        """Take a candidate that is generated and scored; what can be put now, under group numbers."""
        ...

    def report(self) -> dict[str, int]:
        """Counts, once all is settled."""
        ...


class Planned:
    """One candidate for each row, all of which are kept: candidate and group numbers are the same."""

    def __init__(self, rows: Sequence[int]):
        self._rows = rows
        self._to_come = range(len(rows))

    async def next_round(self) -> range:
        candidates, self._to_come = self._to_come, range(0)
        return candidates

    def row(self, candidate: int) -> int:
        return self._rows[candidate]

    def settle(self, record: GroupRecord, finished: Finished) -> list[Group]:
        return [(record, finished)]

    def report(self) -> dict[str, int]:
        return {}


class TooFewGroups(StrettoError):
    """A partition is short of groups and may not take more prompts."""


@dataclass(kw_only=True)
class Refill:
    """Dynamic sampling of a run, ``groups`` a partition and at most ``rounds`` refills.

    ``row_at``: the row at a position of the endless sequence of epochs. ``position`` is that of the next candidate, of
    whichever partition; partitions take theirs strictly one after the other.
    """

    groups: int
    rounds: int
    truncated: Truncated
    row_at: Callable[[int], int]
    position: int = 0

    def select(self, plan: PartitionPlan) -> Selection:
        return _Refilled(self, plan)


class _Refilled:
    def __init__(self, refill: Refill, plan: PartitionPlan):
        self._refill, self._plan = refill, plan
        self._start = 0
        self._rounds = 0
        self._issued = 0
        self._decided = 0
        """Candidates below this one are kept or dropped."""
        self._ahead: dict[int, Group | None] = {}
        """Settled ones that wait for one before them; None: dropped."""
        self._round_over = asyncio.Event()
        self._kept = self._equal = self._uncounted = 0

    async def next_round(self) -> range:
        """Raises TooFewGroups where groups are missing after the last refill."""
        refill = self._refill
        if self._rounds == 0:
            self._start = refill.position if self._plan.start is None else self._plan.start
        else:
            await self._round_over.wait()
        if self._rounds > refill.rounds and self._kept < refill.groups:
            raise TooFewGroups(self._short())
        candidates = range(self._issued, self._issued + refill.groups - self._kept)
        self._issued = candidates.stop
        self._rounds += bool(candidates)
        self._round_over.clear()
        refill.position = self._start + self._issued
        return candidates

    def row(self, candidate: int) -> int:
        return self._refill.row_at(self._start + candidate)

    def settle(self, record: GroupRecord, finished: Finished) -> list[Group]:
        rewards = counted_rewards(record, self._refill.truncated)
        signal = len(set(rewards)) > 1
        self._equal += not signal and len(rewards) > 1
        self._uncounted += len(rewards) < 2
        self._ahead[record.group] = (record, finished) if signal else None
        known: list[Group] = []
        while self._decided in self._ahead:
            group = self._ahead.pop(self._decided)
            self._decided += 1
            if group is not None:
                known.append((replace(group[0], group=self._kept), group[1]))
                self._kept += 1
        if self._decided == self._issued:
            self._round_over.set()
        return known

    def report(self) -> dict[str, int]:
        return {
            "rollout_dropped_groups": self._equal + self._uncounted,
            "rollout_refill_rounds": self._rounds - 1,
            "next_position": self._start + self._issued,
        }

    def _short(self) -> str:
        refill = self._refill
        return (
            f"partition {self._plan.partition}: rewards differ in {self._kept} of the {refill.groups} prompt groups "
            f"that it takes, after {self._issued} prompts in {self._rounds} rounds (rollout.refill_rounds = "
            f"{refill.rounds}); in {self._equal} groups all rewards are equal, in {self._uncounted} fewer than two "
            "count, so that nothing is learnt from them: look at the reward, the temperature and how hard the prompts "
            "are, or raise rollout.refill_rounds, which a resumed run may"
        )


def counted_rewards(record: GroupRecord, truncated: Truncated) -> list[float]:
    """Those that count in the statistics of the group, under a policy for truncated responses."""
    return [reward for reward, counts in zip(record.rewards, record.counted(truncated), strict=True) if counts]
