"""The GRPO objective of one microbatch, put together from correction and loss; and the metrics of an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.actor.correction import correction_statistics, effective_sample_share, tis_weights
from stretto.actor.loss import policy_loss, token_weights
from stretto.actor.trainer import Objective, StepStats
from stretto.config import AlgorithmConfig
from stretto.models.batch import SampleBatch


@dataclass(frozen=True)
class MicrobatchRows:
    """What the loss needs beside the batch.

    advantages_B  float32 [B]
    trained_B     bool    [B]  False for samples that failed and for the rows of an inert microbatch
    rollout_T     float32 [T]  the rollout engine's log-probs
    old           from the training forward's log-probs [T], detached, to the old-policy log-probs [T]
    """

    advantages_B: Tensor
    trained_B: Tensor
    rollout_T: Tensor
    old: Callable[[Tensor], Tensor]


def grpo_objective(
    algorithm: AlgorithmConfig, correction: Literal["none", "tis"], batch: SampleBatch, rows: MicrobatchRows
) -> Objective:
    """PPO-clip over the response tokens of ``batch``, each weighted by its truncated importance weight."""

    def objective(new_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        old_T = rows.old(new_T.detach())
        mask_T = rows.trained_B[batch.row_T]
        is_weights_T = torch.ones_like(old_T)
        if correction == "tis":
            is_weights_T = tis_weights(old_T, rows.rollout_T, algorithm.tis_cap)
        loss, statistics = policy_loss(
            new_T,
            old_T,
            rows.advantages_B[batch.row_T],
            is_weights_T,
            token_weights(batch.lengths, algorithm.aggregation, new_T.device),
            mask_T,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        statistics |= correction_statistics(old_T, rows.rollout_T, is_weights_T, mask_T, algorithm.tis_cap)
        statistics["entropy_sum"] = torch.where(mask_T, entropy_T, 0.0).to(torch.float64).sum()
        return loss, statistics

    return objective


def step_metrics(stats: StepStats, correction: Literal["none", "tis"]) -> dict[str, float]:
    """Metrics of one update, by name; means are over the tokens that carry loss, on all ranks."""
    totals = stats.totals
    tokens = totals["tokens_sum"]
    metrics = {"lr": stats.lr, "loss_tokens": tokens, "update_skipped": 0.0 if stats.applied else 1.0}
    if stats.normaliser <= 0:
        return metrics
    metrics |= {"loss": stats.loss, "grad_norm": stats.grad_norm}
    for name, key in (
        ("entropy", "entropy_sum"),
        ("clip_low_fraction", "clip_low_sum"),
        ("clip_high_fraction", "clip_high_sum"),
        ("ppo_kl_k1", "ppo_kl_k1_sum"),
        ("ppo_kl_k3", "ppo_kl_k3_sum"),
        ("ratio_mean", "ratio_sum"),
        ("rollout_kl_k1", "rollout_kl_k1_sum"),
        ("rollout_kl_k3", "rollout_kl_k3_sum"),
    ):
        metrics[name] = totals[key] / tokens
    metrics |= {"ratio_deviation_max": totals["ratio_deviation_max"], "rollout_gap_max": totals["rollout_gap_max"]}
    if correction == "tis":
        metrics["is_weight_mean"] = totals["is_weight_sum"] / tokens
        metrics["is_weight_max"] = totals["is_weight_max"]
        metrics["is_clipped_fraction"] = totals["is_clipped_sum"] / tokens
        metrics["is_effective_sample_share"] = effective_sample_share(
            totals["is_weight_sum"], totals["is_weight_square_sum"], tokens
        )
    return metrics
