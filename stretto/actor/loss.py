"""Policy losses, as an unnormalised sum over tokens. Pure: tensors in, tensors out.

Sources: PPO (arXiv:1707.06347) equation 7; separate bounds from DAPO (arXiv:2503.14476), "clip-higher"; GSPO
(arXiv:2507.18071) equations 5 to 7; CISPO (arXiv:2506.13585) equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MAX_LOG_RATIO = 20.0
"""new - old is clamped to +-20 before ``exp``: beyond it the ratio is a constant and its gradient is 0, not NaN."""


def token_weights(
    lengths: Sequence[int],
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Weight of each response token before normalising, float32 [T]: 1, or 1 / length of its sample for
    ``sequence_mean``. ``constant_length`` (Dr. GRPO, arXiv:2503.20783) differs from ``token_mean`` in its normaliser
    alone.
    """
    per_row = [1.0 / max(length, 1) if aggregation == "sequence_mean" else 1.0 for length in lengths]
    weights = torch.tensor(per_row, dtype=torch.float32)
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device)


def row_sums(values_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over the tokens of each row, [B]; 0 for an empty one.

    Through a rectangle of zeros: adding into rows by index has no fixed order on a GPU.
    """
    return pad_sequence(list(values_T.split(list(lengths))), batch_first=True).sum(dim=1)


def policy_loss(
    kind: Literal["ppo_clip", "gspo", "cispo"],
    new_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    is_weights_T: Tensor,
    weights_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over masked tokens of -weight * is_weight * surrogate, with r = exp(new - old) and c(x) = x clipped to
    [1 - clip_low, 1 + clip_high]:

    ppo_clip  min(r * A, c(r) * A)
    gspo      the same with s = exp(mean of new - old over the tokens of the row) in place of r. Token t carries the
              gradient s * A_t of its own log-prob (GSPO-token, section 4.3): with one advantage and one weight a row
              this is the gradient through s, and token advantages keep their tokens
    cispo     c(r) * A * new, with no gradient through c(r)

    ``new_T`` carries the gradient; everything else is constant. ``lengths``: tokens of each row; ``mask_T`` leaves out
    whole rows, and they add nothing whatever their values are, NaN included. Returns the scalar sum and statistics that
    add up over microbatches and ranks (names in ``_max``: the maximum), float64 and detached.
    """
    token_log_ratio = torch.where(mask_T, new_T - old_T, 0.0)
    log_ratio = row_mean_log_ratio(token_log_ratio, lengths) if kind == "gspo" else token_log_ratio
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(mask_T, advantages_T, 0.0)
    scale = torch.where(mask_T, weights_T * is_weights_T, 0.0)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    low, high = mask_T & (ratio < 1 - clip_low), mask_T & (ratio > 1 + clip_high)
    if kind == "cispo":
        surrogate = clipped.detach() * advantages * torch.where(mask_T, new_T, 0.0)
    else:
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        low, high = low & (advantages < 0), high & (advantages > 0)  # on the other side the minimum is not the clipped
    loss = -(scale * surrogate).sum()
    return loss, _statistics(token_log_ratio, ratio, mask_T, low, high)


def row_mean_log_ratio(log_ratio_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """At each token the mean over its row, float32 [T]; the gradient is that of the token's own log-ratio."""
    counts = torch.tensor(lengths, device=log_ratio_T.device)
    means_B = row_sums(log_ratio_T.detach().to(torch.float64), lengths) / counts.clamp(min=1)
    means_T = means_B.to(log_ratio_T.dtype).repeat_interleave(counts, output_size=len(log_ratio_T))
    return means_T + (log_ratio_T - log_ratio_T.detach())


@torch.no_grad()
def _statistics(log_ratio: Tensor, ratio: Tensor, mask: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    kl = -log_ratio.to(torch.float64)  # log(old / new); tokens are old's samples: KL(old || new)
    bounded = kl.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = torch.where(mask, ratio, 0.0).to(torch.float64)
    deviation = torch.where(mask, (ratio - 1).abs(), 0.0).to(torch.float64)
    return {
        "tokens_sum": mask.to(torch.float64).sum(),
        "clip_low_sum": low.to(torch.float64).sum(),
        "clip_high_sum": high.to(torch.float64).sum(),
        "ppo_kl_k1_sum": kl.sum(),
        "ppo_kl_k3_sum": ((-bounded).exp() - 1 + bounded).sum(),
        "ratio_sum": ratios.sum(),
        "ratio_deviation_max": deviation.max() if len(deviation) else kl.new_zeros(()),
    }
