"""Full updates against a plain single-file PyTorch GRPO (``reference_grpo.py``)."""

from __future__ import annotations

import actor_case
import pytest
import reference_grpo
import tiny
import torch


@pytest.mark.parametrize(
    ("aggregation", "temperature", "staleness", "layout"),
    [
        ("token_mean", 1.0, 1, "shared"),
        ("sequence_mean", 0.7, 1, "shared"),
        ("token_mean", 1.3, 0, "padded"),
        ("sequence_mean", 1.0, 1, "padded"),
    ],
)
def test_two_updates_of_one_partition_equal_the_plain_reference(aggregation, temperature, staleness, layout):
    """Several microbatches, images shared in a group, text, a failed sample, an empty response, a group without signal;
    the second mini trains against old-policy log-probs that are one update old, so that ratios differ from one.
    """
    cfg = actor_case.config(
        staleness=staleness,
        actor={"grad_clip": 0.5, "lr": 5e-3, "warmup_updates": 1, "layout": layout, "max_tokens_per_microbatch": 28},
        algorithm={"aggregation": aggregation, "clip_low": 0.1, "clip_high": 0.15},
        rollout={"temperature": temperature},
    )
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads)
    assert sum(len(c.ranks[0]) for m in actor_case.minis(cfg, records, groups_per_mini=2) for c in m.chunks) >= 5

    model = tiny.model()
    samples = actor_case.reference_samples(records, payloads)
    opts = {
        "suppressed": tiny.family().suppressed_V.nonzero()[:, 0].tolist(),
        "temperature": temperature,
        "clip_low": 0.1,
        "clip_high": 0.15,
        "correction": "tis" if staleness > 0 else "none",
        "tis_cap": 2.0,
        "aggregation": aggregation,
        "grad_clip": 0.5,
        "betas": cfg.actor.betas,
        "eps": cfg.actor.eps,
    }
    with torch.no_grad():
        old = [[float(v) for v in reference_grpo.logprobs(model, s, opts["suppressed"], temperature)] for s in samples]
    advantage = reference_grpo.advantages(samples, cfg.algorithm.advantage_eps)
    state: dict = {}
    losses = []
    for half in (slice(0, 6), slice(6, 12)):
        loss, norm, grads = reference_grpo.update(
            model, samples[half], old[half], advantage[half], state, cfg.actor.lr, opts
        )
        losses.append((loss, norm))

    metrics = actor_case.run_step(actor, records, groups_per_mini=2)
    for ours, (loss, norm) in zip(metrics, losses, strict=True):
        assert ours["loss"] == pytest.approx(loss, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert metrics[0]["ratio_deviation_max"] == 0.0
    assert metrics[1]["ratio_deviation_max"] > 0.1
    assert metrics[1]["clip_low_fraction"] + metrics[1]["clip_high_fraction"] > 0
    parameters = actor_case.parameters(actor)
    moved = 0.0
    for name, expected in model.named_parameters():
        torch.testing.assert_close(parameters[name], expected.detach(), rtol=0, atol=1e-6)
    for name, before in tiny.model().named_parameters():
        moved = max(moved, float((parameters[name] - before.detach()).abs().max()))
    assert moved > 1e-3
    scale = min(1.0, 0.5 / losses[1][1])
    for name, grad in actor.trainer.master.named_grads().items():
        torch.testing.assert_close(grad, grads[name] * scale, rtol=0, atol=1e-6)
