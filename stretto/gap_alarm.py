"""The alarm on the gap between the log-probs of training and of the rollout: ``rollout.logprob_gap_alarm``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stretto.config import Config

AGAIN = 2.0
"""A gap is news again at this many times the one that was told last."""


class GapAlarm:
    """Told of the mean gap |old - rollout| of every partition, in nats; tells of the first beyond the threshold, and
    then only of one twice as large as the last that it told of. NaN and infinity are beyond any threshold, and told
    of once.

    ``record`` is handed all that was told so far, oldest first, as plain data: NaN is null there.

    Silent for ever where no gap can be told from none: with ``algorithm.old_policy = "rollout"`` old *is* rollout, so
    that the gap is 0 whatever the engine does; and in a replay the rollout's log-probs are recorded ones, of whose
    engine the recorded run has told.
    """

    def __init__(self, config: Config, record: Callable[[list[dict[str, Any]]], None] = lambda _: None):
        blind = bool(config.seams.replay) or config.algorithm.old_policy == "rollout"
        self.threshold = 0.0 if blind else config.rollout.logprob_gap_alarm
        self._staleness, self._record = config.staleness.max, record
        self._older = config.algorithm.old_policy == "old_actor"
        self._told: list[dict[str, Any]] = []
        self._largest, self._nonfinite = 0.0, False

    def look(self, k: int, gap: float) -> str:
        """What to say of the gap of partition ``k``; empty where that is nothing."""
        if not self.threshold or not self._is_news(gap):
            return ""
        finite = math.isfinite(gap)
        found = {"metric": "rollout_gap_mean", "update": k, "value": gap if finite else None}
        self._told.append(found | {"threshold": self.threshold})
        self._record(list(self._told))
        differ = f"differ by {gap:.3g} nats, mean over loss tokens" if finite else f"cannot be compared ({gap})"
        return (
            f"the log-probs of training and rollout {differ}; rollout.logprob_gap_alarm = {self.threshold:g}. The "
            "engine may have stale or wrong weights, read images or prompts otherwise, or sample under another "
            f"temperature or mask{self._also()}. See rollout_gap_* and staleness_* in metrics.jsonl, and "
            "docs/observability.md"
        )

    def _is_news(self, gap: float) -> bool:
        if not math.isfinite(gap):
            news, self._nonfinite = not self._nonfinite, True
            return news
        if gap <= self.threshold or gap < AGAIN * self._largest:
            return False
        self._largest = gap
        return True

    def _also(self) -> str:
        """What makes a gap without any fault."""
        if self._older:
            return ', or training has moved since the snapshot of old_policy = "old_actor"'
        if self._staleness:
            return f", or training has moved much in staleness.max = {self._staleness} versions"
        return ""
