"""The one log-prob forward: old-policy, reference, teacher and training forwards are all this function."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from stretto.models.batch import SampleBatch
from stretto.models.logprobs import logprobs_and_entropy


class Family(Protocol):
    """What the actor needs of a model family (``stretto/models``)."""

    suppressed_V: Tensor
    eos_ids: tuple[int, ...]

    def response_logits(self, model: nn.Module, batch: SampleBatch) -> Tensor:
        """Logits [T, V] that predict each response token, in row order."""
        ...


def forward_logprobs(
    family: Family, model: nn.Module, batch: SampleBatch, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each response token, float32 [T], with gradient where it is enabled; and the entropy in nats of
    each distribution, float32 [T] without gradient, where asked for.
    """
    logits_TV = family.response_logits(model, batch)
    suppressed_V = family.suppressed_V.to(logits_TV.device)
    return logprobs_and_entropy(logits_TV, batch.response_ids_T, suppressed_V, temperature, with_entropy=with_entropy)
