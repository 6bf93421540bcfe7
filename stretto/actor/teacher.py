"""The teacher of on-policy distillation: a model of its own, on the device only while it forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class HostedModel:
    """A module that is never trained, whose weights lie in host memory."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.requires_grad_(False), device
        self._tensors = [*model.parameters(), *model.buffers()]

    @contextmanager
    def resident(self) -> Iterator[nn.Module]:
        """Inside, the module computes on the device. What lies in host memory stays there, so that leaving costs no
        copy.
        """
        if self.device.type == "cpu":
            yield self.model
            return
        host: list[Tensor] = [tensor.data for tensor in self._tensors]
        try:
            for tensor in self._tensors:
                tensor.data = tensor.data.to(self.device, non_blocking=True)
            yield self.model
        finally:
            for tensor, data in zip(self._tensors, host, strict=True):
                tensor.data = data
