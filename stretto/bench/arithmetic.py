"""What was measured, as ratios with their spread, and the verdict on each contrast.

Everything is paired within blocks and done in natural logs: 0.1 is a ratio of 1.105. Values are larger where they are
better; of a duration take the reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from stretto.bench.plan import BASE, Contrast, Window
from stretto.observe.metrics import Throughput
from stretto.types import StrettoError

LEVEL = 0.05
"""Of the primary contrast, and of all other ones together."""
SIGNS_BELOW = 6
"""Fewer blocks than these must all have the sign of the effect."""
Finding = Literal["supported", "negative", "inconclusive", "guardrail failed"]
_NONE: Mapping[str, Collection[str]] = MappingProxyType({})


def percent(log_ratio: float) -> float:
    """The gain in percent that a log-ratio is: ln 1.39 -> 39.0."""
    return 100 * math.expm1(log_ratio) if log_ratio < 700 else math.inf


def windowed(tokens: Sequence[float], seconds: Sequence[float], windows: Sequence[Window]) -> Throughput:
    """sum(tokens) / sum(seconds) over the updates of all windows, never a mean of rates.

    tokens   [updates]  real ones, without padding
    seconds  [updates]  of consecutive updates of one run

    Raises:
        StrettoError: a window that the run does not reach; a value that is not finite, or no time at all, in a window.
    """
    if len(tokens) != len(seconds):
        raise ValueError(f"{len(tokens)} token counts, {len(seconds)} durations")
    updates = [update for window in windows for update in range(window.first, window.last + 1)]
    if not updates or max(updates) >= len(seconds):
        raise StrettoError(f"windows {', '.join(map(str, windows)) or '(none)'} do not lie in {len(seconds)} updates")
    for update in updates:
        if not (math.isfinite(tokens[update]) and math.isfinite(seconds[update]) and seconds[update] > 0):
            raise StrettoError(f"update {update} has {tokens[update]} tokens in {seconds[update]} s: no throughput")
    total_tokens, total_s = (math.fsum(values[update] for update in updates) for values in (tokens, seconds))
    return Throughput(total_tokens, total_s, updates[0], len(updates))


def pipeline_efficiency(
    processor_s: float, rollout_s: float, training_s: float, step_s: float, staleness_max: int
) -> float | None:
    """What share of a step its slowest resource needs: max of the seconds that processor, rollout and this condition's
    training take alone for one update, over the measured seconds of a step. 1: nothing is left to gain by overlap.

    None at a staleness bound of 0, where stages must wait for one another and the limit is not that of a pipeline.
    """
    return max(processor_s, rollout_s, training_s) / step_s if staleness_max > 0 else None


# Blocks and estimates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockValues:
    """One value for each cell of a block, all above 0, such as tokens per second.

    baseline  of the B cells in the order in which they ran: two, or one in a design of pairs
    others    condition -> value; without those whose cell was rejected
    """

    baseline: tuple[float, ...]
    others: Mapping[str, float]

    def log(self, condition: str) -> float | None:
        """Of B: that of the geometric mean. None: the block has no such cell."""
        if condition == BASE:
            return math.fsum(map(math.log, self.baseline)) / len(self.baseline) if self.baseline else None
        return math.log(self.others[condition]) if condition in self.others else None

    @property
    def aa(self) -> float | None:
        """ln(last B / first B): how far two runs of one condition are apart. None: there is no such pair."""
        return math.log(self.baseline[-1] / self.baseline[0]) if len(self.baseline) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean of log-ratios with its 95 % t interval over blocks.

    values      one a block, in the order of the blocks
    deviation   sample standard deviation between blocks; NaN for one block
    low, high   infinite for one block, which says nothing about spread
    p           two-sided, of a mean of 0; 1 for one block
    """

    values: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float
    p: float

    @property
    def blocks(self) -> int:
        return len(self.values)

    @property
    def signs(self) -> tuple[int, int]:
        """Blocks above 0, and below."""
        return sum(value > 0 for value in self.values), sum(value < 0 for value in self.values)


def estimate(values: Sequence[float]) -> Estimate:
    """Student's one-sample t, n - 1 degrees of freedom. Raises ValueError without values."""
    found = np.asarray(values, dtype=float)
    n = len(found)
    if n == 0:
        raise ValueError("an estimate needs at least one value")
    mean = float(found.mean())
    if n == 1:
        return Estimate(values=(mean,), mean=mean, deviation=math.nan, low=-math.inf, high=math.inf, p=1.0)
    deviation = float(found.std(ddof=1))
    error = deviation / math.sqrt(n)
    half = float(stdtrit(n - 1, 1 - LEVEL / 2)) * error
    # without error values are equal, as the counts of deterministic runs are
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Estimate(
        values=tuple(found.tolist()), mean=mean, deviation=deviation, low=mean - half, high=mean + half, p=p
    )


def paired(blocks: Sequence[BlockValues], contrast: Contrast) -> tuple[float, ...]:
    """ln(treated / base) of every block that has both."""
    pairs = [(block.log(contrast.treated), block.log(contrast.base)) for block in blocks]
    return tuple(x - y for x, y in pairs if x is not None and y is not None)


def aa_values(blocks: Sequence[BlockValues]) -> tuple[float, ...]:
    """The A/A log-ratios of the blocks that have one."""
    return tuple(value for block in blocks if (value := block.aa) is not None)


def holm(p: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjustment (1979, Scand. J. Stat. 6:65): rejecting where it is at most L keeps the chance of any
    false rejection at L, however the tests depend on one another.
    """
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return tuple(adjusted)


# Verdicts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on one contrast.

    estimate    None: no block has both conditions
    p_adjusted  by Holm for all but the primary contrast, whose p stands alone
    largest_aa  of abs(A/A) over all blocks; None: the design has no such pair
    finding     by the rules of ``judge``
    reasons     the guardrails that failed, with the condition; what is missing for ``supported`` or ``negative``
    """

    contrast: Contrast
    primary: bool
    estimate: Estimate | None
    p_adjusted: float
    largest_aa: float | None
    finding: Finding
    reasons: tuple[str, ...]


def judge(
    blocks: Sequence[BlockValues],
    primary: Contrast,
    others: Sequence[Contrast],
    failed_guardrails: Mapping[str, Sequence[str]],
    idle: Mapping[str, Collection[str]] = _NONE,
) -> tuple[Judgement, ...]:
    """Verdicts on the primary contrast and then the others.

    ``supported``: the interval lies above 0 (for the others: Holm's p is at most 5 %), with fewer than 6 blocks every
    block has that sign, and the effect is larger than the largest difference of two B in one block. ``negative`` is its
    mirror, all else ``inconclusive``, and so is an effect of switches that had no work to do in any cell of the treated
    condition (``idle``: condition -> their letters): whatever made it was not they. A guardrail that either condition
    failed (``failed_guardrails``: condition -> which) replaces the finding.
    """
    contrasts = (primary, *others)
    values = [paired(blocks, contrast) for contrast in contrasts]
    estimates = [estimate(found) if found else None for found in values]
    raw = [found.p if found else 1.0 for found in estimates]
    adjusted = (raw[0], *holm(raw[1:]))
    largest = max(map(abs, aa_values(blocks)), default=None)
    return tuple(
        _judged(contrast, index == 0, found, p, largest, failed_guardrails, idle.get(contrast.treated, ()))
        for index, (contrast, found, p) in enumerate(zip(contrasts, estimates, adjusted, strict=True))
    )


def _judged(
    contrast: Contrast,
    primary: bool,
    found: Estimate | None,
    p: float,
    largest: float | None,
    failed_guardrails: Mapping[str, Sequence[str]],
    idle: Collection[str],
) -> Judgement:
    sides = (contrast.treated, contrast.base)
    failed = [f"{side}, {failure}" for side in sides for failure in failed_guardrails.get(side, ())]
    missing = [*_missing(found, p, largest, primary), *_without_work(contrast, idle)]
    finding: Finding = "inconclusive"
    if found is not None and not missing:
        finding = "supported" if found.mean > 0 else "negative"
    if failed:
        finding = "guardrail failed"
    return Judgement(
        contrast=contrast,
        primary=primary,
        estimate=found,
        p_adjusted=p,
        largest_aa=largest,
        finding=finding,
        reasons=(*failed, *missing),
    )


def _without_work(contrast: Contrast, idle: Collection[str]) -> Iterator[str]:
    """Of the switches that make the contrast."""
    shared = contrast.base.partition("(")[0].split("+")
    for letter in idle:
        if letter not in shared:
            yield f"switch {letter} had nothing to do in any cell of {contrast.treated}"


def _missing(found: Estimate | None, p: float, largest: float | None, primary: bool) -> tuple[str, ...]:
    """Why there is no effect to speak of, in either direction."""
    if found is None:
        return ("no block has both conditions",)
    reasons = []
    if p > LEVEL:
        tested = "the 95 % interval holds 0" if primary else f"Holm's p is {p:.2g}, above {LEVEL}"
        reasons.append("one block has no interval" if found.blocks == 1 else tested)
    agreeing = found.signs[0] if found.mean > 0 else found.signs[1]
    if found.blocks < SIGNS_BELOW and agreeing < found.blocks:
        reasons.append(f"{found.blocks - agreeing} of {found.blocks} blocks do not have the sign of the mean")
    if largest is None:
        reasons.append("no A/A pair says how far two runs of one condition are apart")
    elif abs(found.mean) <= largest:
        reasons.append(f"the effect is within the largest A/A difference, {percent(largest):.3g} %")
    return tuple(reasons)


def against_target(found: Estimate, target_percent: float) -> Literal["reached", "missed", "open"]:
    """Whether the interval lies at or above a gain that was aimed at, below it, or holds it."""
    aimed = math.log1p(target_percent / 100)
    return "reached" if found.low >= aimed else "missed" if found.high < aimed else "open"
