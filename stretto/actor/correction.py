"""Off-policy correction between the rollout engine's log-probs and the actor's: importance weights on the loss.

Sources: truncated weights (TIS), "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al.,
2025); masked weights (MIS), IcePop of "Every Step Evolves" (arXiv:2510.18855).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stretto.actor.loss import row_sums
from stretto.config import AlgorithmConfig
from stretto.models.batch import SampleBatch

Correction = Literal["none", "tis", "mis"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before ``exp`` in statistics, so that one odd token cannot make a metric infinite."""


def importance_weights(
    kind: Correction,
    level: Literal["token", "sequence"],
    old_T: Tensor,
    rollout_T: Tensor,
    mask_T: Tensor,
    batch: SampleBatch,
    algorithm: AlgorithmConfig,
) -> Tensor:
    """What the loss of each token is multiplied by, float32 [T] in row order, detached.

    With w = exp(old - rollout) of the token, or of the whole response (exp of the sum over its tokens, the same at each
    of them): TIS min(w, tis_cap); MIS w inside [mis_low, mis_high], else 0. NaN stays NaN, so that the update is
    skipped and not trained on less.
    """
    if kind == "none":
        return torch.ones_like(old_T)
    log_ratio_T = (old_T - rollout_T).detach().float()
    if level == "sequence":
        sums_B = row_sums(torch.where(mask_T, log_ratio_T, 0.0).to(torch.float64), batch.lengths)
        weights_T = sums_B.exp().float()[batch.row_T]
    else:
        weights_T = log_ratio_T.exp()
    if kind == "tis":
        return weights_T.clamp(max=algorithm.tis_cap)
    outside = (weights_T < algorithm.mis_low) | (weights_T > algorithm.mis_high)
    return torch.where(outside, 0.0, weights_T)


def correction_statistics(
    kind: Correction, old_T: Tensor, rollout_T: Tensor, weights_T: Tensor, mask_T: Tensor, algorithm: AlgorithmConfig
) -> dict[str, Tensor]:
    """Sums over the masked tokens that add up over microbatches and ranks (``_max``: the maximum).

    ``weights_T`` are those of ``importance_weights``. ``is_clipped``: tokens at the cap of TIS; ``is_masked``: tokens
    that MIS dropped. k1 and k3 (http://joschu.net/blog/kl-approx.html) estimate KL(rollout || old) in nats from the
    rollout's own samples.
    """
    mask = mask_T.to(torch.float64)
    weights = torch.where(mask_T, weights_T, 0.0).to(torch.float64)
    log_ratio = torch.where(mask_T, old_T - rollout_T, 0.0).detach().to(torch.float64)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero = weights.new_zeros(())
    statistics = {
        "is_weight_sum": weights.sum(),
        "is_weight_square_sum": weights.square().sum(),
        "is_weight_max": weights.max() if len(weights) else zero,
        "rollout_kl_k1_sum": -log_ratio.sum(),
        "rollout_kl_k3_sum": ((bounded.exp() - 1 - bounded) * mask).sum(),
        "rollout_gap_sum": log_ratio.abs().sum(),
        "rollout_gap_max": log_ratio.abs().max() if len(log_ratio) else zero,
    }
    if kind == "tis":
        statistics["is_clipped_sum"] = (mask_T & (weights_T >= algorithm.tis_cap)).to(torch.float64).sum()
    if kind == "mis":
        statistics["is_masked_sum"] = (mask_T & (weights_T == 0)).to(torch.float64).sum()
    return statistics


def effective_sample_share(weight_sum: float, weight_square_sum: float, tokens: float) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2 as a share of ``tokens``: 1 for equal weights, 0 where every
    token was dropped, NaN where there are none.
    """
    if not tokens:
        return float("nan")
    return weight_sum * weight_sum / (weight_square_sum * tokens) if weight_square_sum else 0.0
