"""The objective of one microbatch, put together from correction, loss, KL and teacher; and the metrics of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.actor.correction import correction_statistics, effective_sample_share, importance_weights
from stretto.actor.kl import kl_estimate, resolve
from stretto.actor.loss import policy_loss, token_weights
from stretto.actor.trainer import Objective, StepStats
from stretto.config import AlgorithmConfig, Config
from stretto.models.batch import SampleBatch
from stretto.types import StrettoError


@dataclass(frozen=True)
class MicrobatchRows:
    """What the loss needs beside the batch; all without gradient.

    advantages_B  float32 [B]
    trained_B     bool    [B]  False for samples that failed and for the rows of an inert microbatch
    rollout_T     float32 [T]  the rollout engine's log-probs
    old           from the training forward's log-probs [T], detached, to the old-policy log-probs [T]
    note_mask     told which tokens the loss takes in, bool [T]
    ref_T         float32 [T]  the reference's log-probs; None where there is none, or nothing is trained
    teacher_T     float32 [T]  the teacher's, likewise
    """

    advantages_B: Tensor
    trained_B: Tensor
    rollout_T: Tensor
    old: Callable[[Tensor], Tensor]
    note_mask: Callable[[Tensor], None] = lambda _: None
    ref_T: Tensor | None = None
    teacher_T: Tensor | None = None


def policy_objective(config: Config, batch: SampleBatch, rows: MicrobatchRows) -> Objective:
    """The policy loss over the response tokens of ``batch``, each weighted by its importance weight, plus the KL to the
    reference.

    A teacher adds teacher_coef * (teacher - old) to the advantage of each token: the sampled reverse KL, without
    gradient ("On-Policy Distillation", Thinking Machines, 2025; MiniLLM, arXiv:2306.08543). The KL has the weights of
    the aggregation and none of importance.
    """
    algorithm, correction = config.algorithm, config.importance_correction
    clip_low, clip_high = algorithm.clip_range

    def objective(new_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        old_T = rows.old(new_T.detach())
        mask_T = rows.trained_B[batch.row_T]
        rows.note_mask(mask_T)
        weights_T = token_weights(batch.lengths, algorithm.aggregation, new_T.device)
        advantages_T = rows.advantages_B[batch.row_T]
        beside: dict[str, Tensor] = {}
        if algorithm.teacher:
            gap_T = torch.where(mask_T, _of("teacher", rows.teacher_T, old_T, mask_T) - old_T, 0.0)
            advantages_T = advantages_T + algorithm.teacher_coef * gap_T
            beside["teacher_kl_sum"] = -gap_T.to(torch.float64).sum()
        is_weights_T = importance_weights(
            correction, algorithm.importance_level, old_T, rows.rollout_T, mask_T, batch, algorithm
        )
        loss, statistics = policy_loss(
            algorithm.policy_loss,
            new_T,
            old_T,
            advantages_T,
            is_weights_T,
            weights_T,
            mask_T,
            batch.lengths,
            clip_low=clip_low,
            clip_high=clip_high,
        )
        if _has_reference(algorithm):
            kl_T = _reference_kl(algorithm, new_T, _of("ref", rows.ref_T, old_T, mask_T), mask_T)
            beside["ref_kl_sum"] = kl_T.detach().to(torch.float64).sum()
            if algorithm.kl_loss_coef > 0:
                loss = loss + algorithm.kl_loss_coef * (weights_T * kl_T).sum()
        statistics |= correction_statistics(correction, old_T, rows.rollout_T, is_weights_T, mask_T, algorithm) | beside
        statistics["entropy_sum"] = torch.where(mask_T, entropy_T, 0.0).to(torch.float64).sum()
        return loss, statistics

    return objective


def _has_reference(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_loss_coef > 0 or algorithm.kl_reward_coef > 0


def _of(role: str, values_T: Tensor | None, own_T: Tensor, mask_T: Tensor) -> Tensor:
    """The log-probs of a role. Where nothing is trained they may be absent: the sample's own then stand in, so that
    every rank adds statistics of the same names.
    """
    if values_T is not None:
        return values_T
    if bool(mask_T.any()):
        raise StrettoError(f"no {role} log-probs for a microbatch that carries loss: phase 1 did not forward it")
    return own_T


def _reference_kl(algorithm: AlgorithmConfig, new_T: Tensor, ref_T: Tensor, mask_T: Tensor) -> Tensor:
    """The estimate that is used, float32 [T], 0 where masked out: in the loss, or else in the reward."""
    kind = resolve(algorithm.kl_estimator, "loss" if algorithm.kl_loss_coef > 0 else "reward")
    # Masked first: through what follows, a masked-out NaN would reach the gradient as 0 * NaN.
    return kl_estimate(kind, torch.where(mask_T, new_T, 0.0), torch.where(mask_T, ref_T, 0.0))


def step_metrics(stats: StepStats, config: Config) -> dict[str, float]:
    """Metrics of one update, by name; means are over the tokens that carry loss, on all ranks."""
    totals = stats.totals
    tokens = totals["tokens_sum"]
    metrics = {"lr": stats.lr, "loss_tokens": tokens, "update_skipped": 0.0 if stats.applied else 1.0}
    if stats.normaliser <= 0:
        return metrics
    metrics |= {"loss": stats.loss, "grad_norm": stats.grad_norm}
    means = [
        ("entropy", "entropy_sum"),
        ("clip_low_fraction", "clip_low_sum"),
        ("clip_high_fraction", "clip_high_sum"),
        ("ppo_kl_k1", "ppo_kl_k1_sum"),
        ("ppo_kl_k3", "ppo_kl_k3_sum"),
        ("ratio_mean", "ratio_sum"),
        ("rollout_kl_k1", "rollout_kl_k1_sum"),
        ("rollout_kl_k3", "rollout_kl_k3_sum"),
        ("rollout_gap_mean", "rollout_gap_sum"),
    ]
    metrics |= {"ratio_deviation_max": totals["ratio_deviation_max"], "rollout_gap_max": totals["rollout_gap_max"]}
    correction = config.importance_correction
    if correction != "none":
        means.append(("is_weight_mean", "is_weight_sum"))
        means.append(
            ("is_clipped_fraction", "is_clipped_sum")
            if correction == "tis"
            else ("is_masked_fraction", "is_masked_sum")
        )
        metrics["is_weight_max"] = totals["is_weight_max"]
        metrics["is_effective_sample_share"] = effective_sample_share(
            totals["is_weight_sum"], totals["is_weight_square_sum"], tokens
        )
    if _has_reference(config.algorithm):
        means.append(("ref_kl", "ref_kl_sum"))
    if config.algorithm.teacher:
        means.append(("teacher_kl", "teacher_kl_sum"))
    return metrics | {name: totals[key] / tokens for name, key in means}


LAST = ("lr", "optimizer_step", "skipped_updates")
SUMS = ("loss_tokens", "update_skipped")


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several updates of one partition as one line: counts add up, ``LAST`` and ``*_max`` are the last
    and the largest value, and all else is the mean over the updates that have it (a skipped one may have no loss).
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        if name in LAST:
            merged[name] = values[-1]
        elif name in SUMS:
            merged[name] = sum(values)
        elif name.endswith("_max"):
            merged[name] = float(np.max(values))  # NaN where one is
        else:
            merged[name] = sum(values) / len(values)
    return merged
