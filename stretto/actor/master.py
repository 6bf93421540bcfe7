"""Float32 master weights and gradients of a model whose compute type may be bfloat16, in one fixed flat layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.actor.parallel import RankGroup, broadcast_from_owners, owners


class MasterWeights:
    """The float32 truth of a model's trainable parameters: of all of them, or of those that one rank of several owns.

    A float32 parameter is its own master, and autograd accumulates straight into the flat gradient. A bfloat16
    parameter has a float32 copy, where this rank owns it, and a hook moves each microbatch's gradient into the flat
    float32 gradient, so that accumulation never happens in bfloat16.

    names:     of all trainable parameters, sorted; a tied one appears once, under the name that ``named_parameters``
               gives it
    masters:   name -> float32 leaf tensor, of the parameters that this rank owns, sorted; ``.grad`` of each is a view
               into ``flat_grad``
    flat_grad: float32 [sum of sizes], all parameters on every rank; those that took no part in a forward hold zeros
    """

    def __init__(self, model: nn.Module, group: RankGroup | None = None):
        self.group = group or RankGroup()
        self._parameters = dict(sorted((name, p) for name, p in model.named_parameters() if p.requires_grad))
        self.names = list(self._parameters)
        self.owner = owners({name: p.numel() for name, p in self._parameters.items()}, self.group.world)
        sizes = [p.numel() for p in self._parameters.values()]
        device = self._parameters[self.names[0]].device
        self.flat_grad = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.masters: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        for (name, parameter), flat in zip(self._parameters.items(), self.flat_grad.split(sizes), strict=True):
            view = self._views[name] = flat.view(parameter.shape)
            mine = self.owner[name] == self.group.rank
            if parameter.dtype != torch.float32:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_accumulate_into(view)))
            if mine and parameter.dtype == torch.float32:
                self.masters[name] = parameter
            elif mine:
                self.masters[name] = parameter.detach().to(torch.float32).requires_grad_()
        self._attach()

    def zero_grad(self) -> None:
        """Start of an update: zeros everywhere, views attached."""
        self.flat_grad.zero_()
        self._attach()

    def named(self) -> dict[str, Tensor]:
        """This rank's float32 masters by name, detached and not copied. Ranks' names are disjoint, and together all."""
        return {name: master.detach() for name, master in self.masters.items()}

    def named_parameters(self) -> dict[str, Tensor]:
        """All trainable parameters as the model computes with them, detached and not copied: the same on every rank."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def named_grads(self) -> dict[str, Tensor]:
        """The float32 gradients by name, not copied; once reduced, the same on every rank."""
        return dict(self._views)

    @torch.no_grad()
    def cast_back(self) -> None:
        """Round the masters into the model's parameters (nothing to do where they are the same tensor), and give every
        rank those of the others.
        """
        for name, master in self.masters.items():
            if self._parameters[name] is not master:
                self._parameters[name].copy_(master)
        broadcast_from_owners(self._parameters, self.owner, self.group)

    @torch.no_grad()
    def load(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Set the masters, and all of the model's parameters, from float32 tensors that together hold every name.

        ``parts`` may be read one by one. No rank asks another. Raises RuntimeError where a shape differs.
        """
        for part in parts:
            for name, value in part.items():
                self._parameters[name].copy_(value)
                if name in self.masters:
                    self.masters[name].copy_(value)

    def _attach(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.dtype == torch.float32:
                parameter.grad = self._views[name]
        for name, master in self.masters.items():
            master.grad = self._views[name]


def _accumulate_into(view: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
