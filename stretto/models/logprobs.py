"""The one measure of log-probs, used by rollout, old-policy, reference, teacher and training forwards alike.

log-softmax of float32 logits, suppressed ids masked out, divided by the temperature. Taking it anywhere else,
or in another order (raw logits, or the temperature after the softmax), makes importance ratios differ from one
at equal weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logits(logits: Tensor, suppressed_V: Tensor, temperature: float) -> Tensor:
    """float32 logits [..., V] with suppressed ids at -inf, divided by ``temperature`` (> 0)."""
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return scaled.masked_fill(suppressed_V, float("-inf"))


def token_logprobs(logits_TV: Tensor, ids_T: Tensor, suppressed_V: Tensor, temperature: float) -> Tensor:
    """Log-prob of each of ``ids_T`` (int64): float32 [T]."""
    return logprobs_and_entropy(logits_TV, ids_T, suppressed_V, temperature, with_entropy=False)[0]


def logprobs_and_entropy(
    logits_TV: Tensor, ids_T: Tensor, suppressed_V: Tensor, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs float32 [T]; and where asked for, the entropy in nats of each distribution, float32 [T], no gradient,
    from the same softmax (a second one would cost as much memory again). Suppressed ids contribute nothing to it.
    """
    all_TV = torch.log_softmax(scaled_logits(logits_TV, suppressed_V, temperature), dim=-1)
    logprobs_T = all_TV.gather(-1, ids_T[:, None])[:, 0]
    if not with_entropy:
        return logprobs_T, None
    with torch.no_grad():
        entropy_T = -(all_TV.exp() * all_TV.masked_fill(suppressed_V, 0.0)).sum(-1)
    return logprobs_T, entropy_T
