"""The PPO-clip loss of GRPO, as an unnormalised sum over tokens. Pure: tensors in, tensors out.

Sources: PPO (arXiv:1707.06347) equation 7; separate bounds from DAPO (arXiv:2503.14476), "clip-higher".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""new - old is clamped to +-20 before ``exp``: beyond it the ratio is a constant and its gradient is 0, not NaN."""


def token_weights(
    lengths: Sequence[int], aggregation: Literal["token_mean", "sequence_mean"], device: torch.device | str = "cpu"
) -> Tensor:
    """Weight of each response token before normalising, float32 [T]: 1, or 1 / length of its sample."""
    per_row = [1.0 if aggregation == "token_mean" else 1.0 / max(length, 1) for length in lengths]
    weights = torch.tensor(per_row, dtype=torch.float32)
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device)


def policy_loss(
    new_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    is_weights_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over masked tokens of -weight * is_weight * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    r = exp(new - old). ``new_T`` carries the gradient; everything else is constant. A masked-out token adds nothing
    whatever its values are, NaN included. Returns the scalar sum and statistics that add up over microbatches and
    ranks (names in ``_max``: the maximum), float64 and detached.
    """
    log_ratio = torch.where(mask_T, new_T - old_T, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(mask_T, advantages_T, 0.0)
    scale = torch.where(mask_T, weights_T * is_weights_T, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -(scale * torch.minimum(ratio * advantages, clipped * advantages)).sum()
    return loss, _statistics(log_ratio, ratio, advantages, mask_T, clip_low, clip_high)


@torch.no_grad()
def _statistics(
    log_ratio: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    kl = -log_ratio.to(torch.float64)  # log(old / new); tokens are old's samples: KL(old || new)
    bounded = kl.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = torch.where(mask, ratio, 0.0).to(torch.float64)
    deviation = torch.where(mask, (ratio - 1).abs(), 0.0).to(torch.float64)
    low = (ratio < 1 - clip_low) & (advantages < 0) & mask
    high = (ratio > 1 + clip_high) & (advantages > 0) & mask
    return {
        "tokens_sum": mask.to(torch.float64).sum(),
        "clip_low_sum": low.to(torch.float64).sum(),
        "clip_high_sum": high.to(torch.float64).sum(),
        "ppo_kl_k1_sum": kl.sum(),
        "ppo_kl_k3_sum": ((-bounded).exp() - 1 + bounded).sum(),
        "ratio_sum": ratios.sum(),
        "ratio_deviation_max": deviation.max() if len(deviation) else kl.new_zeros(()),
    }
