"""Learning rate and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of a parameter."""
LrSchedule = Callable[[int], float]
"""Learning rate of an update, from the number of updates applied before it (``optimizer_step``)."""


def warmup_constant_decay(
    *,
    peak: float,
    warmup: int,
    updates: int,
    decay_fraction: float,
    decay_to: float,
    shape: Literal["linear", "cosine"] = "linear",
) -> LrSchedule:
    """Linear ramp over ``warmup`` updates (the first has peak / warmup), constant, then down to ``decay_to`` * peak,
    reached by the last of ``updates``; the decay covers the last ``decay_fraction`` of them: in a line, or by half a
    cosine (arXiv:1608.03983, eq. 5). Past the end it stays.
    """
    decay_start = updates - round(updates * decay_fraction)

    def lr(step: int) -> float:
        ramp = min(1.0, (step + 1) / warmup) if warmup else 1.0
        progress = (step + 1 - decay_start) / (updates - decay_start) if updates > decay_start else 0.0
        fallen = min(max(progress, 0.0), 1.0)
        if shape == "cosine":
            fallen = (1.0 - math.cos(math.pi * fallen)) / 2.0
        return peak * ramp * (1.0 - (1.0 - decay_to) * fallen)

    return lr


def build_adamw(
    masters: Sequence[Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """torch's AdamW over float32 masters. The fused kernel on every device: one element-wise pass, no reduction, so
    its result does not depend on order, threads or grouping. The learning rate is set before each step.

    Weights of two and more dimensions decay; norms and biases do not: pulling a scale or an offset to zero regularises
    nothing.
    """
    matrices = [master for master in masters if master.ndim >= 2]
    vectors = [master for master in masters if master.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True)
