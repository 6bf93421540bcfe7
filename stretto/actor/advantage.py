"""GRPO advantages: pure functions of rewards, validity and group ids.

Source: DeepSeekMath (arXiv:2402.03300), equation for outcome supervision, with the unbiased standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.types import StrettoError


@dataclass(frozen=True)
class Advantages:
    """advantages_B float32 [B]; ``zero_signal_groups`` of ``groups`` have only zeros (all valid rewards equal, fewer
    than two valid samples); ``mean_reward`` is over valid samples, NaN without any.
    """

    advantages_B: Tensor
    groups: int
    zero_signal_groups: int
    mean_reward: float


@dataclass(frozen=True)
class GroupRelative:
    """(R - group mean) / (unbiased group std + eps), over the valid samples of each group.

    Exactly 0 where all valid rewards of a group are equal (by value: the float std of equal rewards need not be 0),
    for a group with one valid sample, and for samples that are not valid. Groups are told apart by id, so their
    rows may come in any order and number.
    """

    eps: float
    domain: ClassVar[Literal["group", "batch"]] = "group"

    def __call__(self, rewards_B: Tensor, valid_B: Tensor, groups_B: Tensor) -> Advantages:
        """``rewards_B`` float [B], ``valid_B`` bool [B], ``groups_B`` int [B]; float64 inside, float32 out.

        Raises StrettoError when a valid reward is not finite.
        """
        rewards = rewards_B.to(torch.float64)
        if not bool(torch.isfinite(rewards[valid_B]).all()):
            row = int((valid_B & ~torch.isfinite(rewards)).nonzero()[0, 0])
            raise StrettoError(
                f"the reward of row {row} (group {int(groups_B[row])}) is {float(rewards[row])} but marked valid: "
                "a reward that is not finite must be returned as failed (Score.valid = False)"
            )
        ids, inverse = torch.unique(groups_B, return_inverse=True)
        groups = len(ids)
        members = inverse[valid_B]
        values = rewards[valid_B]
        zeros = torch.zeros(groups, dtype=torch.float64)
        count = zeros.index_add(0, members, torch.ones_like(values))
        mean = zeros.index_add(0, members, values) / count
        deviation = values - mean[members]
        std = (zeros.index_add(0, members, deviation.square()) / (count - 1)).sqrt()
        low = torch.full_like(zeros, torch.inf).scatter_reduce(0, members, values, "amin")
        high = torch.full_like(zeros, -torch.inf).scatter_reduce(0, members, values, "amax")
        signal = high > low  # False for empty groups, too

        advantages = torch.zeros_like(rewards)
        advantages[valid_B] = torch.where(signal[members], deviation / (std[members] + self.eps), 0.0)
        return Advantages(
            advantages_B=advantages.to(torch.float32),
            groups=groups,
            zero_signal_groups=int((~signal).sum()),
            mean_reward=float(values.mean()),
        )
