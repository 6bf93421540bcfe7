"""Estimators of KL(new || ref) from tokens that ``new`` sampled (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
"""ref - new is cut here before ``exp``: beyond it k3 is a constant and its gradient 0. To cut afterwards would leave an
infinite ``exp`` inside, whose gradient is NaN."""


def kl_estimate(kind: Kind, new_T: Tensor, ref_T: Tensor) -> Tensor:
    """KL(new || ref) in nats at each token, float32 [T], with d = ref - new (float64 inside).

    ======  ===============  ============================================================================
    kind    value            as a loss (its gradient, averaged over samples of ``new``)
    ======  ===============  ============================================================================
    k1      -d               0 on average: of use in a reward alone
    k2      d^2 / 2          that of KL(new || ref)
    k3      exp(d) - 1 - d   that of KL(ref || new); never negative, of low variance while d is small
    ======  ===============  ============================================================================

    Gradient flows through ``new_T``. Values and gradients are finite for log-probs down to -1e15.
    """
    d = ref_T.to(torch.float64) - new_T.to(torch.float64)
    if kind == "k1":
        estimate = -d
    elif kind == "k2":
        estimate = d.square() / 2
    else:
        bounded = d.clamp(max=MAX_LOG_RATIO)
        estimate = bounded.expm1() - bounded
    return estimate.to(torch.float32)


def resolve(kind: Literal["auto", "k1", "k2", "k3"], where: Literal["loss", "reward"]) -> Kind:
    """``algorithm.kl_estimator`` with ``auto`` resolved: k3 in the loss, as GRPO has it (arXiv:2402.03300, equation 4),
    k1 in the reward: learnt from as a reward, it alone gives the gradient of KL(new || ref).
    """
    if kind == "auto":
        return "k3" if where == "loss" else "k1"
    return kind
