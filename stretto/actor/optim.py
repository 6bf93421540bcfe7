"""Learning rate and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LrSchedule = Callable[[int], float]
"""Learning rate of an update, from the number of updates applied before it (``optimizer_step``)."""


def warmup_constant_decay(
    *, peak: float, warmup: int, updates: int, decay_fraction: float, decay_to: float
) -> LrSchedule:
    """Linear ramp over ``warmup`` updates (the first has peak / warmup), constant, then linear to ``decay_to`` * peak,
    reached by the last of ``updates``; the decay covers the last ``decay_fraction`` of them. Past the end it stays.
    """
    decay_start = updates - round(updates * decay_fraction)

    def lr(step: int) -> float:
        ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
        progress = (step + 1 - decay_start) / (updates - decay_start) if updates > decay_start else 0.0
        return peak * ramp * (1.0 - (1.0 - decay_to) * min(max(progress, 0.0), 1.0))

    return lr


def build_adamw(
    masters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """torch's AdamW over float32 masters. The fused kernel on every device: one element-wise pass, no reduction, so
    its result does not depend on order, threads or grouping. The learning rate is set before each step.
    """
    return torch.optim.AdamW(list(masters), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
