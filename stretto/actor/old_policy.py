"""Where old-policy log-probs come from: the seam of phase 1.

``DedicatedForward`` computes them before training, by a forward without gradient; ``RolloutLogprobs`` takes what the
rollout engine reported; ``TrainingForward`` lets the training forward's own values stand in. The stages call the same
methods in every condition and do not know which one was built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from stretto.actor.forward import Family, forward_logprobs
from stretto.models.batch import SampleBatch
from stretto.observe.trace import Tracer
from stretto.types import StrettoError

Role = Literal["old", "ref", "teacher"]
ROLES: dict[Role, str] = {"old": "old-policy", "ref": "reference", "teacher": "teacher"}
Collate = Callable[[], SampleBatch]
"""Lays a microbatch out when it is called."""


class KeptForward:
    """A forward without gradient, with the microbatches of training; its log-probs are kept per sample in host memory.

    ``role`` names it in spans.
    """

    def __init__(self, family: Family, model: nn.Module, temperature: float, tracer: Tracer, role: Role):
        self._family, self._model, self._temperature, self._tracer = family, model, temperature, tracer
        self.role = role
        self._kept: dict[int, Tensor] = {}

    def prepare(self, samples: Sequence[int], collate: Collate, partition: int, inert: bool = False) -> None:
        """Forward one microbatch; an ``inert`` one only keeps ranks in step, its values are not kept."""
        attrs = {"partition": partition, "role": self.role, "samples": 0 if inert else len(samples), "inert": inert}
        with self._tracer.span("actor.forward", **attrs), torch.no_grad():
            batch = collate()
            logprobs_T, _ = forward_logprobs(self._family, self._model, batch, self._temperature)
            host = logprobs_T.cpu()
        if not inert:
            self._kept.update(zip(samples, host.split(list(batch.lengths)), strict=True))

    def kept(self, sample: int) -> Tensor:
        """Log-probs of one sample's response, float32 [R], on the host. Raises StrettoError as ``values``."""
        if sample not in self._kept:
            raise StrettoError(f"no {ROLES[self.role]} log-probs for samples {[sample]}: phase 1 did not forward them")
        return self._kept[sample]

    def values(self, samples: Sequence[int], like_T: Tensor) -> Tensor:
        """Log-probs float32 [T] of several samples in row order, on the device of ``like_T``, which has their length.

        Raises StrettoError for a sample that phase 1 did not see, or saw with another length.
        """
        missing = [index for index in samples if index not in self._kept]
        if missing:
            raise StrettoError(f"no {ROLES[self.role]} log-probs for samples {missing}: phase 1 did not forward them")
        kept_T = torch.cat([self._kept[index] for index in samples])
        if kept_T.shape != like_T.shape:
            raise StrettoError(
                f"samples {list(samples)}: {len(kept_T)} {ROLES[self.role]} log-probs for {len(like_T)} tokens"
            )
        return kept_T.to(like_T.device)

    def end_partition(self) -> None:
        """Forget what was kept."""
        self._kept.clear()


class OldPolicySource(Protocol):
    """Supplies log-probs under the weights that the PPO ratio starts from."""

    tag: Literal["actor", "old_actor"]
    """The weights that ``prepare`` wants to find in the model."""
    reused: int
    """Samples, so far, whose values were those of the training forward."""

    def prepare(self, samples: Sequence[int], collate: Collate, partition: int, inert: bool = False) -> None:
        """Phase 1, once for each microbatch; ``collate`` lays it out when called. An ``inert`` one only keeps ranks in
        step: its values are not kept, and ``values`` is never asked for them.
        """
        ...

    def known(self, sample: int) -> Tensor | None:
        """Phase 2: float32 [R] of one sample on the host, or None where nothing is known before the training forward
        or what is known is not the actor's own.
        """
        ...

    def values(self, samples: Sequence[int], new_T: Tensor, rollout_T: Tensor) -> Tensor:
        """Phase 3: float32 [T] in row order, without gradient. ``new_T``: the training forward's values, detached;
        ``rollout_T``: the rollout engine's.
        """
        ...

    def end_partition(self) -> None:
        """Forget what phase 1 kept."""
        ...


class DedicatedForward:
    """A forward of its own before training, under the actor's weights or a snapshot of them."""

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        temperature: float,
        tracer: Tracer,
        tag: Literal["actor", "old_actor"] = "actor",
    ):
        self.tag = tag
        self.reused = 0
        self._forward = KeptForward(family, model, temperature, tracer, "old")

    def prepare(self, samples: Sequence[int], collate: Collate, partition: int, inert: bool = False) -> None:
        self._forward.prepare(samples, collate, partition, inert)

    def known(self, sample: int) -> Tensor | None:
        return self._forward.kept(sample) if self.tag == "actor" else None

    def values(self, samples: Sequence[int], new_T: Tensor, rollout_T: Tensor) -> Tensor:
        """Raises StrettoError for a sample that phase 1 did not see, or saw with another length."""
        return self._forward.values(samples, new_T)

    def end_partition(self) -> None:
        self._forward.end_partition()


class RolloutLogprobs:
    """What the rollout engine reported when it sampled: no forward at all. The ratio then corrects for stale samples,
    and for any difference between engine and actor.
    """

    tag: Literal["actor", "old_actor"] = "actor"

    def __init__(self, family: Family, model: nn.Module, temperature: float, tracer: Tracer):
        self.reused = 0

    def prepare(self, samples: Sequence[int], collate: Collate, partition: int, inert: bool = False) -> None:
        pass

    def known(self, sample: int) -> Tensor | None:
        return None

    def values(self, samples: Sequence[int], new_T: Tensor, rollout_T: Tensor) -> Tensor:
        return rollout_T

    def end_partition(self) -> None:
        pass


class TrainingForward(RolloutLogprobs):
    """The training forward's own values: no forward in phase 1. In the first update after the policy sampled they are
    the old policy's, so that the ratio is exactly 1 while the gradient flows.
    """

    def values(self, samples: Sequence[int], new_T: Tensor, rollout_T: Tensor) -> Tensor:
        self.reused += len(samples)
        return new_T
