"""Float32 master weights and gradients of a model whose compute type may be bfloat16, in one fixed flat layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """The float32 truth of a model's trainable parameters.

    A float32 parameter is its own master, and autograd accumulates straight into the flat gradient. A bfloat16
    parameter has a float32 copy, and a hook moves each microbatch's gradient into the flat float32 gradient, so
    that accumulation never happens in bfloat16.

    names:     sorted; a tied parameter appears once, under the name that ``named_parameters`` gives it
    masters:   float32 leaf tensors in that order; ``.grad`` of each is a view into ``flat_grad``
    flat_grad: float32 [sum of sizes]; parameters that took no part in a forward hold zeros
    """

    def __init__(self, model: nn.Module):
        named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self.names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        device = self._parameters[0].device
        self.flat_grad = torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float32, device=device)
        views = self.flat_grad.split([p.numel() for p in self._parameters])
        self.masters: list[Tensor] = []
        self._views: list[Tensor] = []
        self._hooks: list[Any] = []
        for parameter, flat in zip(self._parameters, views, strict=True):
            view = flat.view(parameter.shape)
            self._views.append(view)
            if parameter.dtype == torch.float32:
                self.masters.append(parameter)
            else:
                self.masters.append(parameter.detach().to(torch.float32).requires_grad_())
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_accumulate_into(view)))
        self._attach()

    def zero_grad(self) -> None:
        """Start of an update: zeros everywhere, views attached."""
        self.flat_grad.zero_()
        self._attach()

    def named(self) -> dict[str, Tensor]:
        """The float32 masters by name, detached and not copied."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    def named_grads(self) -> dict[str, Tensor]:
        """The float32 gradients by name, not copied."""
        return dict(zip(self.names, self._views, strict=True))

    @torch.no_grad()
    def cast_back(self) -> None:
        """Round the masters into the model's parameters (nothing to do where they are the same tensor)."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Set the masters from ``named()``'s form, and the model's parameters from them.

        Raises KeyError or RuntimeError when a name is missing or a shape differs.
        """
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[name])
        self.cast_back()

    def _attach(self) -> None:
        for master, view in zip(self.masters, self._views, strict=True):
            master.grad = view


def _accumulate_into(view: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
