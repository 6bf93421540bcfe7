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
    logprobs_TV = torch.log_softmax(scaled_logits(logits_TV, suppressed_V, temperature), dim=-1)
    return logprobs_TV.gather(-1, ids_T[:, None])[:, 0]


def entropy(logits_TV: Tensor, suppressed_V: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of each distribution: float32 [T]; suppressed ids contribute nothing."""
    logprobs_TV = torch.log_softmax(scaled_logits(logits_TV, suppressed_V, temperature), dim=-1)
    return -(logprobs_TV.exp() * logprobs_TV.masked_fill(suppressed_V, 0.0)).sum(-1)
