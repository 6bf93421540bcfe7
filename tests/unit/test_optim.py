"""Learning-rate shapes at points worked out by hand, and AdamW's decay against its equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from stretto.actor.optim import build_adamw, warmup_constant_decay


def test_a_cosine_falls_by_half_a_wave():
    lr = warmup_constant_decay(peak=2.0, warmup=2, updates=10, decay_fraction=0.6, decay_to=0.1, shape="cosine")
    # Progress 1/6, 1/3, 1/2, 2/3, 5/6, 1 over updates 5 to 10: 0.2 + 1.8 * (1 + cos(pi * progress)) / 2.
    half, three = 0.5, 3**0.5 / 2
    falling = [0.2 + 0.9 * (1 + c) for c in (three, half, 0.0, -half, -three, -1.0)]
    assert [lr(t) for t in range(10)] == pytest.approx([1.0, 2.0, 2.0, 2.0, *falling])
    assert lr(9) == pytest.approx(0.2) == lr(50)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_both_shapes_begin_and_end_alike(shape):
    lr = warmup_constant_decay(peak=1.0, warmup=0, updates=8, decay_fraction=0.5, decay_to=0.0, shape=shape)
    assert [lr(t) for t in (0, 3)] == [1.0, 1.0]
    assert lr(5) == pytest.approx(0.5), "half-way both have fallen by half"
    assert lr(7) == pytest.approx(0.0, abs=1e-12)
    falling = [lr(t) for t in range(3, 8)]
    assert falling == sorted(falling, reverse=True)
    steady = warmup_constant_decay(peak=1.0, warmup=0, updates=8, decay_fraction=0.0, decay_to=0.0, shape=shape)
    assert {steady(t) for t in range(20)} == {1.0}


def test_a_line_falls_by_equal_steps():
    lr = warmup_constant_decay(peak=1.0, warmup=0, updates=10, decay_fraction=0.4, decay_to=0.2)
    assert [lr(t) for t in range(5, 10)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_weight_decay_takes_a_share_of_matrices_and_nothing_of_norms_and_biases():
    """Algorithm 2 of arXiv:1711.05101 in float64, two updates."""
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "kernel": (2, 3, 2, 2, 2), "norm": (5,), "bias": (3,), "scalar": ()}
    start = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    masters = {name: nn.Parameter(torch.tensor(value, dtype=torch.float32)) for name, value in start.items()}
    lr, (one, two), eps, decay = 0.1, (0.9, 0.99), 1e-8, 0.5
    optimizer = build_adamw(list(masters.values()), betas=(one, two), eps=eps, weight_decay=decay)
    for group in optimizer.param_groups:
        group["lr"] = lr
    expected = {name: value.copy() for name, value in start.items()}
    first = {name: np.zeros(shape) for name, shape in shapes.items()}
    second = {name: np.zeros(shape) for name, shape in shapes.items()}
    for t in (1, 2):
        for name, shape in shapes.items():
            g = rng.normal(size=shape)
            masters[name].grad = torch.tensor(g, dtype=torch.float32)
            first[name] = one * first[name] + (1 - one) * g
            second[name] = two * second[name] + (1 - two) * g**2
            if name in ("matrix", "kernel"):
                expected[name] = expected[name] * (1 - lr * decay)
            update = first[name] / (1 - one**t) / (np.sqrt(second[name] / (1 - two**t)) + eps)
            expected[name] = expected[name] - lr * update
        optimizer.step()
    for name, value in expected.items():
        np.testing.assert_allclose(masters[name].detach().numpy(), value, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("shapes", [[(3,)], [(2, 2)]])
def test_a_rank_may_own_matrices_alone_or_none(shapes):
    masters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = build_adamw(masters, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert [p for group in optimizer.param_groups for p in group["params"]] == masters
