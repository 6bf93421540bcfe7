"""Where old-policy log-probs come from: the seam of phase 1.

``DedicatedForward`` computes them before training, by a forward without gradient. Another implementation may do
nothing in phase 1 and let the training forward's own values stand in (it then returns ``new_T`` itself): the
stages call both methods in every condition and do not know which one was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.actor.forward import Family, forward_logprobs
from stretto.models.batch import SampleBatch
from stretto.observe.trace import Tracer
from stretto.types import StrettoError


class OldPolicySource(Protocol):
    """Supplies log-probs under the weights before the update."""

    def prepare(self, samples: Sequence[int], collate: Callable[[], SampleBatch], inert: bool = False) -> None:
        """Phase 1, once for each microbatch; ``collate`` lays it out when called. An ``inert`` one only keeps ranks in
        step: its values are not kept, and ``values`` is never asked for them.
        """
        ...

    def values(self, samples: Sequence[int], new_T: Tensor) -> Tensor:
        """Phase 3: float32 [T] in row order, without gradient. ``new_T``: the training forward's values, detached."""
        ...

    def end_partition(self) -> None:
        """Forget what phase 1 kept."""
        ...


class DedicatedForward:
    """A forward of its own, without gradient, with the microbatches of training; kept per sample in host memory."""

    def __init__(self, family: Family, model: nn.Module, temperature: float, tracer: Tracer):
        self._family, self._model, self._temperature, self._tracer = family, model, temperature, tracer
        self._kept: dict[int, Tensor] = {}

    def prepare(self, samples: Sequence[int], collate: Callable[[], SampleBatch], inert: bool = False) -> None:
        count = 0 if inert else len(samples)
        with self._tracer.span("actor.forward", role="old", samples=count, inert=inert), torch.no_grad():
            batch = collate()
            logprobs_T, _ = forward_logprobs(self._family, self._model, batch, self._temperature)
            host = logprobs_T.cpu()
        if inert:
            return
        self._kept.update(zip(samples, host.split(list(batch.lengths)), strict=True))

    def values(self, samples: Sequence[int], new_T: Tensor) -> Tensor:
        """Raises StrettoError for a sample that phase 1 did not see, or saw with another length."""
        missing = [index for index in samples if index not in self._kept]
        if missing:
            raise StrettoError(f"no old-policy log-probs for samples {missing}: phase 1 did not forward them")
        old_T = torch.cat([self._kept[index] for index in samples])
        if old_T.shape != new_T.shape:
            raise StrettoError(f"samples {list(samples)}: {len(old_T)} old-policy log-probs for {len(new_T)} tokens")
        return old_T.to(new_T.device)

    def end_partition(self) -> None:
        self._kept.clear()
