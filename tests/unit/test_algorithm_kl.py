"""Estimators of the KL: their values and gradients over a whole distribution, and where they overflow."""

from __future__ import annotations

import math

import algorithm_case
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from stretto.actor.kl import kl_estimate, resolve

KINDS = ("k1", "k2", "k3")


def test_estimates_by_hand():
    new, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0 + math.log(2)])
    assert kl_estimate("k1", new, ref).tolist() == pytest.approx([0.0, -math.log(2)])
    assert kl_estimate("k2", new, ref).tolist() == pytest.approx([0.0, math.log(2) ** 2 / 2])
    assert kl_estimate("k3", new, ref).tolist() == pytest.approx([0.0, 2 - 1 - math.log(2)])
    assert kl_estimate("k3", new, ref).dtype == torch.float32


def test_means_and_gradients_over_all_tokens_are_those_of_the_two_divergences():
    """By enumeration: k1 and k3 have the mean KL(new || ref); as losses k2 has the gradient of KL(new || ref), k3 that
    of KL(ref || new) and k1 none.
    """
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=6)).requires_grad_()
    ref = torch.log_softmax(torch.from_numpy(rng.normal(size=6)), 0)

    def gradient(value) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    new = torch.log_softmax(logits, 0)
    p = new.exp().detach()
    means = {kind: (p * kl_estimate(kind, new, ref)).sum() for kind in KINDS}
    divergence = entropy(p.numpy(), ref.exp().numpy())
    assert float(means["k1"].detach()) == pytest.approx(divergence, rel=1e-6)
    assert float(means["k3"].detach()) == pytest.approx(divergence, rel=1e-6)
    reverse, forward = (new.exp() * (new - ref)).sum(), (ref.exp() * (ref - new)).sum()
    torch.testing.assert_close(gradient(means["k2"]), gradient(reverse), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient(means["k3"]), gradient(forward), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient(means["k1"]), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-7)
    assert float(gradient(reverse).abs().max()) > 0.01


@pytest.mark.parametrize("distance", [1e-6, 1e-4, 1e-2])
def test_k3_of_close_policies_keeps_its_digits(distance):
    # exp(d) - 1 - d = d^2 / 2 + d^3 / 6 + ...; in float32 throughout it would be rounding errors, some negative
    new = torch.tensor([-1.0], dtype=torch.float64)
    value = float(kl_estimate("k3", new, new + distance))
    assert value == pytest.approx(distance**2 / 2 + distance**3 / 6 + distance**4 / 24, rel=1e-6)


@pytest.mark.case("D5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("new", "ref"), [(-120.0, -1.0), (-1.0, -120.0)])
def test_policies_far_apart_have_a_finite_kl_with_a_finite_gradient(kind, new, ref):
    """(1): exp(119) is infinite in float32; cut at 10 afterwards its value is 10 and its gradient NaN."""
    leaf = torch.tensor([new], requires_grad=True)
    late = (torch.exp(torch.tensor([ref]) - leaf) - 1 - (torch.tensor([ref]) - leaf)).clamp(max=10)
    late.sum().backward()
    assert math.isfinite(late.detach()) and (math.isnan(leaf.grad) or new > ref)
    leaf.grad = None
    value = kl_estimate(kind, leaf, torch.tensor([ref]))
    value.sum().backward()
    assert math.isfinite(value.detach()) and math.isfinite(leaf.grad)


@pytest.mark.case("D5")
def test_the_update_of_a_token_far_from_the_reference_is_finite():
    config = algorithm_case.config(kl_loss_coef=0.1)
    case = algorithm_case.responses(0, [3])
    with torch.no_grad():
        case.new[0][1], case.ref[0][1] = -120.0, -1.0
    loss, statistics = case.run(config, [0])
    assert math.isfinite(loss) and math.isfinite(statistics["ref_kl_sum"])
    assert bool(torch.isfinite(case.gradient()).all())


LOG_PROBS = st.floats(float(np.float32(-1e15)), 0, width=32)


@given(kind=st.sampled_from(KINDS), new=LOG_PROBS, ref=LOG_PROBS)
def test_any_log_probs_give_a_finite_value_and_gradient(kind, new, ref):
    leaf = torch.tensor([new], requires_grad=True)
    value = kl_estimate(kind, leaf, torch.tensor([ref]))
    value.sum().backward()
    assert math.isfinite(value.detach()) and math.isfinite(leaf.grad)
    assert kind == "k1" or float(value.detach()) >= -1e-30


def test_auto_is_k3_in_the_loss_and_k1_in_the_reward():
    assert (resolve("auto", "loss"), resolve("auto", "reward")) == ("k3", "k1")
    assert {resolve(kind, where) for kind in ("k2",) for where in ("loss", "reward")} == {"k2"}
