"""Arithmetic in float64 throughout, for references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, what transformers computes in float32 whatever the model's type (norms, rotary positions, softmax) is
    computed in float64: ``torch.float32`` names that type, and ``tensor.float()`` is ``tensor.double()``.
    """
    single, to_single = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[misc,method-assign]
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = single, to_single  # type: ignore[misc,method-assign]
