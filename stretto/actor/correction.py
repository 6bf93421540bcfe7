"""Off-policy correction between the rollout engine's log-probs and the actor's: truncated importance sampling.

Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025): the loss of a
token is multiplied by min(pi_old / pi_rollout, cap), which carries no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before ``exp`` in statistics, so that one odd token cannot make a metric infinite."""


def tis_weights(old_T: Tensor, rollout_T: Tensor, cap: float) -> Tensor:
    """min(exp(old - rollout), cap) per token, float32 [T], detached."""
    return (old_T - rollout_T).detach().float().exp().clamp(max=cap)


def correction_statistics(
    old_T: Tensor, rollout_T: Tensor, weights_T: Tensor, mask_T: Tensor, cap: float
) -> dict[str, Tensor]:
    """Sums over the masked tokens that add up over microbatches and ranks (``_max`` and ``_min``: reduced so).

    ``weights_T`` are those used, before masking. k1 and k3 (http://joschu.net/blog/kl-approx.html) estimate
    KL(rollout || old) in nats from the rollout's own samples.
    """
    mask = mask_T.to(torch.float64)
    weights = torch.where(mask_T, weights_T, 0.0).to(torch.float64)
    log_ratio = torch.where(mask_T, old_T - rollout_T, 0.0).detach().to(torch.float64)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero = weights.new_zeros(())
    return {
        "is_weight_sum": weights.sum(),
        "is_weight_square_sum": weights.square().sum(),
        "is_weight_max": weights.max() if len(weights) else zero,
        "is_clipped_sum": ((bounded.exp() > cap) & mask_T).to(torch.float64).sum(),
        "rollout_kl_k1_sum": -log_ratio.sum(),
        "rollout_kl_k3_sum": ((bounded.exp() - 1 - bounded) * mask).sum(),
        "rollout_gap_max": log_ratio.abs().max() if len(log_ratio) else zero,
    }


def effective_sample_share(weight_sum: float, weight_square_sum: float, tokens: float) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2 as a share of ``tokens``: 1 for equal weights."""
    return weight_sum * weight_sum / (weight_square_sum * tokens) if weight_square_sum and tokens else float("nan")
