"""Phase 3 of one optimizer update: ``begin / train(microbatch) ... / finish(normaliser)``.

Microbatches add unnormalised loss sums in schedule order, without synchronisation; ``finish`` reduces once,
divides, clips, and steps. The objective is the caller's, so that GRPO and supervised training share all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto import compat
from stretto.actor.forward import Family, forward_logprobs
from stretto.actor.master import MasterWeights
from stretto.actor.optim import STATE_KEYS, LrSchedule, build_adamw
from stretto.actor.parallel import RankGroup, Statistics, reduce_sum
from stretto.config import ActorConfig
from stretto.models.batch import SampleBatch
from stretto.models.parts import has_dropout

Objective = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""From log-probs float32 [T] (with gradient) and entropies float32 [T] (without) of one microbatch to the unnormalised
loss sum and statistics that add up (see ``Statistics``)."""


@dataclass(frozen=True)
class StepStats:
    """One optimizer update. ``applied`` is False where it was skipped, ``reason`` then says why; weights, optimizer
    state and learning-rate schedule are then as before. ``totals`` are the statistics over all microbatches and
    ranks; ``grad_norm`` is the norm before clipping.
    """

    applied: bool
    reason: str
    loss: float
    grad_norm: float
    lr: float
    normaliser: int
    totals: dict[str, float]


class Trainer:
    """Owns the masters, the optimizer and ``optimizer_step`` (updates applied) of one rank.

    Of several ranks, each steps the parameters that it owns, from a gradient and a norm that are the same on all, and
    hands them to the others: every element is computed by the same operations as on one rank, so with the same bits.
    """

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        actor: ActorConfig,
        lr: LrSchedule,
        *,
        temperature: float,
        group: RankGroup | None = None,
    ):
        self.family, self.model, self.temperature = family, model, temperature
        self.group = group or RankGroup()
        self.lr: LrSchedule = lr
        self.grad_clip = actor.grad_clip
        self.master = MasterWeights(model, self.group)
        self.optimizer = build_adamw(
            list(self.master.masters.values()), betas=actor.betas, eps=actor.eps, weight_decay=actor.weight_decay
        )
        self.optimizer_step = 0
        self.skipped = 0
        # Without dropout, transformers does the same in both modes but for recomputing activations.
        self._train_mode = actor.gradient_checkpointing or has_dropout(model)
        if actor.gradient_checkpointing:
            compat.enable_gradient_checkpointing(model)
        self._statistics = Statistics()

    def begin(self) -> None:
        """Start an update: gradients and statistics at zero."""
        self.master.zero_grad()
        self._statistics = Statistics()

    def train(self, batch: SampleBatch, objective: Objective) -> Tensor:
        """Forward and backward of one microbatch; returns its log-probs, float32 [T], detached.

        Dropout is drawn here, from torch's generators, and in no other forward.
        """
        with self._training():
            logprobs_T, entropy_T = forward_logprobs(
                self.family, self.model, batch, self.temperature, with_entropy=True
            )
            assert entropy_T is not None
            loss, statistics = objective(logprobs_T, entropy_T)
            loss.backward()
        self._statistics.add({"loss_sum": loss, **statistics})
        return logprobs_T.detach()

    def logprobs(self, batch: SampleBatch) -> Tensor:
        """What ``train`` would give for a microbatch, without a backward: for checks, not for training."""
        with self._training():
            return forward_logprobs(self.family, self.model, batch, self.temperature, with_entropy=True)[0].detach()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Train mode for a forward and its backward (which may forward again), where it makes a difference."""
        if not self._train_mode:
            yield
            return
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def finish(self, normaliser: int) -> StepStats:
        """Reduce, divide by ``normaliser`` (the same number on every rank), clip, step.

        The update is skipped on all ranks alike where the loss or the gradient norm is not finite, or where there is
        nothing to divide by (no valid sample holds a response token).
        """
        reduce_sum(self.master.flat_grad, self.group, "the sum of gradients")
        totals = self._statistics.reduce(self.group)
        lr = self.lr(self.optimizer_step)
        loss, norm, reason = math.nan, math.nan, ""
        if normaliser <= 0:
            reason = "no valid sample has a response token"
        else:
            self.master.flat_grad.div_(normaliser)
            loss = totals["loss_sum"] / normaliser
            norm = l2_norm(self.master.flat_grad)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                reason = f"loss {loss} or gradient norm {norm} is not finite"
        if reason:
            self.skipped += 1
        else:
            self._step(norm, lr)
        return StepStats(not reason, reason, loss, norm, lr, normaliser, totals)

    def _step(self, norm: float, lr: float) -> None:
        if norm > self.grad_clip:
            self.master.flat_grad.mul_(self.grad_clip / norm)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        self.optimizer.step()
        self.master.cast_back()
        self.optimizer_step += 1

    # State ---------------------------------------------------------------------------------------------------------

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state by ``<parameter>.<name>``, not copied, of the parameters that this rank owns; empty before the
        first applied update.
        """
        return {
            f"{name}.{key}": value
            for name, master in self.master.masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
        }

    def restore(
        self,
        masters: Iterable[Mapping[str, Tensor]],
        optimizer: Mapping[str, Tensor],
        optimizer_step: int,
        skipped: int,
    ) -> None:
        """Set everything that an update depends on: ``masters`` of all ranks (see ``MasterWeights.load``), and
        ``optimizer`` in the form of this rank's ``optimizer_tensors``.
        """
        self.master.load(masters)
        self.optimizer.state.clear()
        for name, master in self.master.masters.items():
            keys = [key for key in STATE_KEYS if f"{name}.{key}" in optimizer]
            if keys:
                self.optimizer.state[master] = {key: optimizer[f"{name}.{key}"].to(master.device) for key in keys}
        self.optimizer_step, self.skipped = optimizer_step, skipped


def l2_norm(flat: Tensor, piece: int = 2**26) -> float:
    """The norm of a flat float32 tensor, summed in float64.

    ``piece`` elements at a time, because torch's norm first makes a float64 copy of all it is given.
    """
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(piece)]
    return math.hypot(*torch.stack(norms).tolist())
