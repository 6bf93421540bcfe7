"""Log-probs of a few responses without a model: what a loss sees of a batch, and the same for ``reference_grpo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import reference_grpo
import torch
from torch import Tensor

from stretto.actor.objective import MicrobatchRows, policy_objective
from stretto.config import Config
from stretto.models.batch import ModelInputs, SampleBatch

MAX_RESPONSE_TOKENS = 8


def laid_out(lengths: Sequence[int]) -> SampleBatch:
    """Rows of these lengths; no loss looks at what the model was given."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    return SampleBatch(cast(ModelInputs, None), nothing, nothing, rows, tuple(lengths))


@dataclass
class Responses:
    """Log-probs float32 [R] of each response under each policy; ``new`` is a leaf with gradient."""

    new: list[Tensor]
    old: list[Tensor]
    rollout: list[Tensor]
    ref: list[Tensor]
    teacher: list[Tensor]
    advantages: list[float]
    trained: list[bool]

    @property
    def lengths(self) -> list[int]:
        return [len(t) for t in self.new]

    def run(self, config: Config, rows: Sequence[int], entropy: float = 1.0) -> tuple[float, dict[str, float]]:
        """One microbatch of these responses: the loss sum and its statistics; gradients add up in ``new``."""
        batch = laid_out([self.lengths[i] for i in rows])
        old = torch.cat([self.old[i] for i in rows])
        inputs = MicrobatchRows(
            advantages_B=torch.tensor([self.advantages[i] for i in rows]),
            trained_B=torch.tensor([self.trained[i] for i in rows]),
            rollout_T=torch.cat([self.rollout[i] for i in rows]),
            old=lambda _: old,
            ref_T=torch.cat([self.ref[i] for i in rows]),
            teacher_T=torch.cat([self.teacher[i] for i in rows]),
        )
        new = torch.cat([self.new[i] for i in rows])
        loss, statistics = policy_objective(config, batch, inputs)(new, torch.full_like(new, entropy))
        loss.backward()
        assert not any(value.requires_grad for value in statistics.values())
        return float(loss.detach()), {name: float(value) for name, value in statistics.items()}

    def gradient(self) -> Tensor:
        """Float32 [T] over all responses, and back to zero."""
        found = torch.cat([torch.zeros_like(t) if t.grad is None else t.grad for t in self.new])
        for t in self.new:
            t.grad = None
        return found

    def reference(self, config: Config) -> tuple[float, Tensor]:
        """Mean loss and gradient [T] of ``reference_grpo`` in float64."""
        new = [t.detach().double().requires_grad_() for t in self.new]
        samples = [
            {"rollout": r.tolist(), "ref": f.tolist(), "teacher": t.tolist(), "valid": v}
            for r, f, t, v in zip(self.rollout, self.ref, self.teacher, self.trained, strict=True)
        ]
        old = [t.tolist() for t in self.old]
        tokens = [list(t.unbind()) for t in new]
        loss = reference_grpo.mean_loss(tokens, samples, old, self.advantages, reference_options(config))
        loss.backward()
        return float(loss.detach()), torch.cat([torch.zeros_like(t) if t.grad is None else t.grad for t in new])


def reference_options(config: Config) -> dict[str, Any]:
    a = config.algorithm
    low, high = a.clip_range
    return {
        "policy_loss": a.policy_loss,
        "clip_low": low,
        "clip_high": high,
        "aggregation": a.aggregation,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "correction": config.importance_correction,
        "level": a.importance_level,
        "tis_cap": a.tis_cap,
        "mis_low": a.mis_low,
        "mis_high": a.mis_high,
        "kl_coef": a.kl_loss_coef,
        "kl": "k3" if a.kl_estimator == "auto" else a.kl_estimator,
        "teacher_coef": a.teacher_coef if a.teacher else 0.0,
    }


def config(**algorithm: Any) -> Config:
    return Config.model_validate(
        {"algorithm": algorithm, "rollout": {"max_response_tokens": MAX_RESPONSE_TOKENS}, "staleness": {"max": 1}}
    )


def responses(
    seed: int, lengths: Sequence[int], trained: Sequence[bool] | None = None, spread: float = 0.4
) -> Responses:
    """Random log-probs of about -2, the policies ``spread`` apart."""
    rng = np.random.default_rng(seed)

    def near(base: np.ndarray) -> np.ndarray:
        return np.minimum(base + rng.normal(0, spread, len(base)), -1e-3).astype(np.float32)

    old = [rng.uniform(-4, -0.5, n).astype(np.float32) for n in lengths]
    new, rollout, ref, teacher = ([torch.from_numpy(near(o)) for o in old] for _ in range(4))
    return Responses(
        [t.requires_grad_() for t in new],
        [torch.from_numpy(o) for o in old],
        rollout,
        ref,
        teacher,
        rng.normal(size=len(lengths)).astype(np.float32).tolist(),
        list(trained) if trained is not None else [True] * len(lengths),
    )
