"""Advantages: pure functions of rewards, of which samples count, and of group ids.

A formula gives the counted samples' advantages from the statistics of their groups; what all of them share stands in
``Estimator``: who counts, and that a group without signal is exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stretto.config import AlgorithmConfig
from stretto.types import StrettoError


@dataclass(frozen=True)
class Advantages:
    """advantages_B float32 [B]; in ``zero_signal_groups`` of ``groups`` rewards say nothing (all that count are equal,
    or fewer than two count); ``mean_reward`` is over counted samples, NaN without any.
    """

    advantages_B: Tensor
    groups: int
    zero_signal_groups: int
    mean_reward: float


@dataclass(frozen=True)
class Groups:
    """The M counted samples and their G groups, float64.

    members    int64 [M]  group of each sample
    deviation  [M]        reward minus the mean of its group; exactly 0 where the group has no signal
    count      [G]        counted samples
    """

    members: Tensor
    deviation: Tensor
    count: Tensor


def grpo(groups: Groups, eps: float) -> Tensor:
    """(R - group mean) / (unbiased group std + eps): DeepSeekMath (arXiv:2402.03300), section 4.1.2."""
    squares = torch.zeros_like(groups.count).index_add(0, groups.members, groups.deviation.square())
    std = (squares / (groups.count - 1)).sqrt()
    return groups.deviation / (std[groups.members] + eps)


def dr_grpo(groups: Groups) -> Tensor:
    """R - group mean: "Understanding R1-Zero-Like Training" (arXiv:2503.20783), equation of Dr. GRPO in section 3."""
    return groups.deviation


def rloo(groups: Groups) -> Tensor:
    """R_i - mean of the other samples of its group: "Back to Basics" (arXiv:2402.14740), section 3.

    Written as (R_i - group mean) * n / (n - 1), which is the same.
    """
    return groups.deviation * (groups.count / (groups.count - 1))[groups.members]


def reinforce_pp_baseline(groups: Groups, eps: float) -> Tensor:
    """(R - group mean) / (unbiased std of these differences over the full batch + eps): "REINFORCE++ w/ baseline"
    (arXiv:2501.03262v9).

    The paper subtracts the batch mean of the differences once more; per sample it is 0 by construction, and a rounded 0
    would give groups with equal rewards a signal. Trainers that whiten over *tokens* (verl, OpenRLHF) weigh each sample
    by its length in both moments, so that their mean is not 0 and their advantages depend on lengths; here each counted
    sample counts once, those of groups without signal included.
    """
    std = (groups.deviation.square().sum() / (len(groups.deviation) - 1)).sqrt()
    return groups.deviation / (std + eps)


def none(groups: Groups) -> Tensor:
    """Zeros: rewards are measured and not learnt from."""
    return torch.zeros_like(groups.deviation)


@dataclass(frozen=True)
class Estimator:
    """A formula over groups. ``domain`` says what an advantage depends on beside its sample: its group, or the batch.

    Exactly 0 where all counted rewards of a group are equal (by value: the float std of equal rewards need not be 0),
    for a group with one counted sample, and for samples that do not count. Groups are told apart by id, so their
    rows may come in any order and number.
    """

    domain: Literal["group", "batch"]
    formula: Callable[[Groups], Tensor]

    def __call__(self, rewards_B: Tensor, counted_B: Tensor, groups_B: Tensor) -> Advantages:
        """``rewards_B`` float [B], ``counted_B`` bool [B], ``groups_B`` int [B]; float64 inside, float32 out.

        Raises StrettoError when a counted reward is not finite.
        """
        rewards = rewards_B.to(torch.float64)
        if not bool(torch.isfinite(rewards[counted_B]).all()):
            row = int((counted_B & ~torch.isfinite(rewards)).nonzero()[0, 0])
            raise StrettoError(
                f"the reward of row {row} (group {int(groups_B[row])}) is {float(rewards[row])} but marked valid: "
                "a reward that is not finite must be returned as failed (Score.valid = False)"
            )
        ids, inverse = torch.unique(groups_B, return_inverse=True)
        members = inverse[counted_B]
        values = rewards[counted_B]
        zeros = torch.zeros(len(ids), dtype=torch.float64)
        count = zeros.index_add(0, members, torch.ones_like(values))
        mean = zeros.index_add(0, members, values) / count
        low = torch.full_like(zeros, torch.inf).scatter_reduce(0, members, values, "amin")
        high = torch.full_like(zeros, -torch.inf).scatter_reduce(0, members, values, "amax")
        signal = high > low  # False for empty groups, too

        has_signal = signal[members]
        deviation = torch.where(has_signal, values - mean[members], 0.0)
        advantages = torch.zeros_like(rewards)
        advantages[counted_B] = torch.where(has_signal, self.formula(Groups(members, deviation, count)), 0.0)
        return Advantages(
            advantages_B=advantages.to(torch.float32),
            groups=len(ids),
            zero_signal_groups=int((~signal).sum()),
            mean_reward=float(values.mean()),
        )


def estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator that ``algorithm.advantage`` names."""
    eps = algorithm.advantage_eps
    return {
        "grpo": Estimator("group", partial(grpo, eps=eps)),
        "dr_grpo": Estimator("group", dr_grpo),
        "rloo": Estimator("group", rloo),
        "reinforce_pp_baseline": Estimator("batch", partial(reinforce_pp_baseline, eps=eps)),
        "none": Estimator("group", none),
    }[algorithm.advantage]
