"""Sampling noise against an independent big-integer implementation, Gumbel-max against the distribution it samples."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy import stats

from stretto.rollout.noise import gumbel, sample_key

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014, figure 16 (finaliser), written out for the test."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_splitmix64_gives_its_published_sequence():
    # The first outputs of SplitMix64 seeded with 1234567, as published with the reference C code.
    assert [splitmix64(1234567 + GAMMA * i) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_noise_equals_the_formula_in_big_integers():
    keys = [sample_key(7, 3, 11, i) for i in range(3)]
    got = gumbel(keys, 5, 50)
    for row, key in enumerate(keys):
        base = splitmix64(key + GAMMA * 6)
        for token in range(50):
            bits = splitmix64(base + GAMMA * (token + 1)) >> 32
            u = min((bits + 0.5) / 2**32, 1 - 2**-24)
            assert math.isclose(got[row, token].item(), -math.log(-math.log1p(-u)), rel_tol=2e-5, abs_tol=2e-5)


def test_noise_does_not_depend_on_the_rest_of_the_batch():
    keys = [sample_key(0, 1, g, i) for g in range(4) for i in range(4)]
    whole = gumbel(keys, 2, 300)
    for row in (0, 7, 15):
        assert torch.equal(whole[row : row + 1], gumbel([keys[row]], 2, 300))


def test_every_part_of_the_key_changes_the_noise():
    base = sample_key(1, 2, 3, 4)
    others = [
        sample_key(*k) for k in [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0), (1, 3, 2, 4), (2, 1, 3, 4)]
    ]
    assert len({base, *others}) == 7
    assert not torch.equal(gumbel([base], 0, 20), gumbel([base], 1, 20))


def test_gumbel_max_samples_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -30.0])
    keys = [sample_key(3, 0, g, 0) for g in range(40_000)]
    tokens = (torch.log_softmax(logits, -1) + gumbel(keys, 0, 5)).argmax(-1)
    observed = np.bincount(tokens.numpy(), minlength=5)
    expected = torch.softmax(logits.double(), -1).numpy() * len(keys)
    assert observed[4] == 0
    assert stats.chisquare(observed[:4], expected[:4] * observed.sum() / expected[:4].sum()).pvalue > 1e-3


def test_the_noise_is_standard_gumbel_and_independent_between_positions():
    keys = [sample_key(0, 0, g, 0) for g in range(200)]
    first, second = gumbel(keys, 0, 200).double().flatten(), gumbel(keys, 1, 200).double().flatten()
    assert stats.kstest(first.numpy(), "gumbel_r").pvalue > 1e-3
    assert abs(np.corrcoef(first.numpy(), second.numpy())[0, 1]) < 0.02
