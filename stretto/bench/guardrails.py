"""What a condition must keep, however fast it is. One that fails decides the verdict on the condition.

How often they fail without any effect, for one condition: `step p95` at most 5 % (simulated: 2 to 6 blocks, runs that
scatter by 1 to 20 %); `reward` and `truncation` as ``stretto.bench.detectable.aa_exceeded`` says, 17.6 % each with 2
blocks and 2.5 % with 4, so that of four conditions any fails either one in 61 % of plans with 2 blocks, 14 % with 4
and 2.4 % with 6; where every two runs of B are the same bits, never: a condition that is the same as well passes, and
of any other they are not measured. `peak memory`, `tokens` and `multimodal bytes` hold what hardly scatters against
fixed bounds, and fail without an effect only where runs of one condition are as far apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stretto.bench.plan import Guardrails, Window
from stretto.bench.resample import DRAWS, LEVEL, SEED, PairedSteps, Steps, moving_stretches

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """What guardrails look at in one run, over its measured updates.

    peak_memory_bytes  device -> bytes; a device that was not sampled is not there
    multimodal_bytes   of pixel tensors and the like that were moved; None: not measured
    reward             mean over samples, as the reward function gave it
    truncated          share of responses cut by length
    """

    steps: Steps
    peak_memory_bytes: Mapping[str, float]
    multimodal_bytes: float | None
    reward: float
    truncated: float


@dataclass(frozen=True, kw_only=True)
class PairedFacts:
    """Of one block: the run of a condition, and those of what it is compared with (both B, in the order they ran)."""

    treated: CellFacts
    base: tuple[CellFacts, ...]


@dataclass(frozen=True, kw_only=True)
class Guardrail:
    """One row; ``told`` has the figures and the bound. What was not measured is no pass."""

    name: str
    status: Literal["passed", "failed", "not measured"]
    told: str


def check_guardrails(
    blocks: Sequence[PairedFacts], windows: Sequence[Window], limits: Guardrails
) -> tuple[Guardrail, ...]:
    """All of one condition; every block has equally many runs to compare with. Raises ValueError for no block."""
    if not blocks:
        raise ValueError("guardrails need at least one block with both conditions")
    return (
        _step_p95(blocks, windows, limits),
        _peak_memory(blocks, limits),
        _workload("tokens", blocks, lambda cell: float(cell.steps.tokens.sum()), limits),
        _workload("multimodal bytes", blocks, lambda cell: cell.multimodal_bytes, limits),
        _within_aa("reward", blocks, lambda cell: cell.reward),
        _within_aa("truncation", blocks, lambda cell: cell.truncated),
    )


def p95_ratio(blocks: Sequence[PairedSteps], windows: Sequence[Window], draws: int = DRAWS) -> tuple[float, float]:
    """The 95th percentile of a condition's step seconds over that of its base, each pooled over all blocks, and the
    2.5 % point of the ratio's bootstrap.

    A draw takes blocks with replacement, the condition and its base together, then stretches of steps within each run:
    steps of one run are no evidence of what another run would have taken.
    """
    treated = np.stack([block.treated.seconds for block in blocks])  # [blocks, steps]
    base = np.stack([np.stack([steps.seconds for steps in block.base]) for block in blocks])  # [blocks, runs, steps]
    n, runs, steps = base.shape
    rng = np.random.default_rng(SEED)
    chosen = rng.integers(n, size=(draws, n))
    at = moving_stretches(windows, draws * n, rng).reshape(draws, n, steps)
    base_at = moving_stretches(windows, draws * n * runs, rng).reshape(draws, n, runs, steps)
    drawn = treated[chosen[:, :, None], at].reshape(draws, -1)
    base_drawn = base[chosen[:, :, None, None], np.arange(runs)[:, None], base_at].reshape(draws, -1)
    ratios = np.quantile(drawn, 0.95, axis=1) / np.quantile(base_drawn, 0.95, axis=1)
    return float(np.quantile(treated, 0.95) / np.quantile(base, 0.95)), float(np.quantile(ratios, LEVEL / 2))


def _step_p95(blocks: Sequence[PairedFacts], windows: Sequence[Window], limits: Guardrails) -> Guardrail:
    paired = [
        PairedSteps(treated=block.treated.steps, base=tuple(cell.steps for cell in block.base)) for block in blocks
    ]
    ratio, lower = p95_ratio(paired, windows)
    bound = limits.step_p95_ratio
    return Guardrail(
        name="step p95",
        status="failed" if lower > bound else "passed",
        told=f"ratio {ratio:.4g}, lower bound {lower:.4g}; fails above {bound:g}",
    )


def _peak_memory(blocks: Sequence[PairedFacts], limits: Guardrails) -> Guardrail:
    """Paired within blocks, device by device, against the larger peak of the base's runs."""
    worst: tuple[float, str] | None = None
    for block in blocks:
        cells = (block.treated, *block.base)
        devices = set().union(*(cell.peak_memory_bytes for cell in cells))
        if not devices or any(device not in cell.peak_memory_bytes for cell in cells for device in devices):
            return Guardrail(name="peak memory", status="not measured", told="a run has no memory samples of a device")
        for device in sorted(devices):
            peak = block.treated.peak_memory_bytes[device]
            base = max(cell.peak_memory_bytes[device] for cell in block.base)
            allowed = max(limits.peak_memory_gib * GIB, limits.peak_memory_percent / 100 * base)
            told = f"{device}: {peak / GIB:.3f} GiB against {base / GIB:.3f}; fails above {allowed / GIB:.3f} GiB more"
            if worst is None or peak - base - allowed > worst[0]:
                worst = peak - base - allowed, told
    assert worst is not None
    return Guardrail(name="peak memory", status="failed" if worst[0] > 0 else "passed", told=worst[1])


def _workload(
    name: str, blocks: Sequence[PairedFacts], of: Callable[[CellFacts], float | None], limits: Guardrails
) -> Guardrail:
    """The difference of every block, relative to the mean of the base's runs."""
    differences, aa = [], []
    for block in blocks:
        treated, base = of(block.treated), [value for cell in block.base if (value := of(cell)) is not None]
        if treated is None or len(base) < len(block.base):
            return Guardrail(name=name, status="not measured", told="a run has no count of them")
        mean = math.fsum(base) / len(base)
        differences.append(_relative(treated - mean, mean))
        aa.append(_relative(base[-1] - base[0], mean))
    largest = max(differences)
    return Guardrail(
        name=name,
        status="failed" if largest > limits.workload_percent / 100 else "passed",
        told=f"largest difference in a block {100 * largest:.3g} % (A/A {100 * max(aa):.3g} %); "
        f"fails above {limits.workload_percent:g} %",
    )


def _relative(difference: float, mean: float) -> float:
    """0 of 0 is no difference: a workload without images moves no bytes."""
    return abs(difference) / mean if mean else math.inf if difference else 0.0


def _within_aa(name: str, blocks: Sequence[PairedFacts], of: Callable[[CellFacts], float]) -> Guardrail:
    """The mean over blocks of condition less mean of both base runs, against the largest A/A difference in a block.

    Where all A/A differences are exactly 0 there is no spread to hold a difference against, and none is a pass or a
    failure but no difference at all.
    """
    if any(len(block.base) < 2 for block in blocks):
        return Guardrail(name=name, status="not measured", told="no A/A pair says how far two runs are apart")
    bases = [[of(cell) for cell in block.base] for block in blocks]
    gaps = [of(block.treated) - math.fsum(base) / len(base) for block, base in zip(blocks, bases, strict=True)]
    mean, spread = math.fsum(gaps) / len(gaps), max(abs(base[-1] - base[0]) for base in bases)
    if not all(math.isfinite(value) for base in bases for value in base) or not math.isfinite(mean):
        return Guardrail(name=name, status="not measured", told="a run has no such figure in its windows")
    if spread == 0 and any(gaps):
        told = (
            "two runs of B are the same bits, so that nothing says how far sound runs lie apart; "
            f"mean difference {mean:+.4g}"
        )
        return Guardrail(name=name, status="not measured", told=told)
    return Guardrail(
        name=name,
        status="failed" if abs(mean) > spread else "passed",
        told=f"mean difference {mean:+.4g}; fails outside the largest A/A difference, {spread:.4g}",
    )
