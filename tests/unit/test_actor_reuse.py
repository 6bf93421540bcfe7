"""R: the training forward as the old policy. The same bits as a forward of its own, and the right ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import actor_case
import numpy as np
import pytest
import tiny

from stretto.actor.old_policy import DedicatedForward, TrainingForward
from stretto.models import parts
from stretto.types import StrettoError

FAST = {"lr": 0.05, "warmup_updates": 0, "eps": 1e-3}


def updates(source: Any, updates: int = 2, **options: Any) -> tuple[list[dict[str, str]], list[dict[str, float]]]:
    """Fingerprints and metrics of each update with one source of old-policy log-probs."""
    cfg = actor_case.config(**options)
    model = tiny.model(0, cfg.model.dtype)
    parts.prepare(model, tiny.family(), cfg)
    payloads: dict[int, Any] = {}
    actor = actor_case.core(cfg, payloads, model=model, old_policy=source)
    prints, metrics = [], []
    for k in range(updates):
        records, fields = actor_case.partition(k)
        payloads.update(fields)
        metrics += actor_case.run_step(actor, records)
        prints.append(actor_case.fingerprints(actor))
        actor.end_partition()
    return prints, metrics


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"staleness": 0},
        {"algorithm": {"importance_correction": "mis", "mis_low": 0.1, "importance_level": "sequence"}},
        {"algorithm": {"policy_loss": "gspo", "aggregation": "sequence_mean"}},
        {"actor": FAST | {"max_tokens_per_microbatch": 28}},
        {"actor": FAST | {"gradient_checkpointing": True}},
        {"actor": FAST | {"layout": "padded"}, "rollout": {"temperature": 0.7}},
        {"lora": {"rank": 4}},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_reuse_gives_the_bits_of_a_dedicated_forward(options):
    options = {"actor": FAST} | options
    prints, metrics = updates(DedicatedForward, **options)
    reused, again = updates(TrainingForward, **options)
    assert prints == reused
    assert metrics == again
    assert len({p["parameters"] for p in prints}) == 2
    assert all(m["ratio_deviation_max"] == 0.0 for m in again)


def test_the_loss_with_truncated_importance_weights_by_hand():
    """Of a policy that is what it was, the ratio is 1: the loss is -mean of min(exp(train - rollout), cap) * A."""
    cfg = actor_case.config(algorithm={"tis_cap": 1.5})
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads, old_policy=TrainingForward)
    (metrics,) = actor_case.run_step(actor, records)
    raw = actor.samples.raw()
    valid = np.repeat(raw["valid"], raw["lengths"])
    weights = np.minimum(np.exp(raw["train_logprobs"].astype(np.float64) - raw["rollout_logprobs"]), 1.5)[valid]
    advantages = np.repeat(raw["advantages"], raw["lengths"])[valid]
    assert metrics["loss"] == pytest.approx(-(weights * advantages).sum() / valid.sum(), rel=1e-5)
    assert 0.1 < metrics["is_clipped_fraction"] < 0.9  # both sides of the cap
    assert metrics["is_weight_mean"] == pytest.approx(weights.mean(), rel=1e-6)
    assert np.array_equal(raw["old_logprobs"], raw["train_logprobs"])


def test_no_forward_runs_before_training_and_every_sample_is_counted(monkeypatch):
    cfg = actor_case.config()
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads, old_policy=TrainingForward)
    forwards = 0
    logits = actor.family.response_logits

    def counted(*args: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return logits(*args)

    monkeypatch.setattr(actor.family, "response_logits", counted)
    (mini,) = actor_case.minis(cfg, records)
    actor_case.run_step(actor, records)
    assert forwards == len(mini.microbatches(0))
    assert actor.old_policy.reused == len(actor.samples.owned) == 12


@pytest.mark.parametrize("change", ["missing", "too many", "nan"])
def test_a_rollout_log_prob_that_is_missing_or_misaligned_stops_the_step_and_names_the_sample(change):
    cfg = actor_case.config()
    records, payloads = actor_case.partition()
    values = payloads[1]["rollout_logprobs"][0]
    payloads[1]["rollout_logprobs"][0] = {
        "missing": values[:-1],
        "too many": np.append(values, values[-1:]),
        "nan": np.where(np.arange(len(values)) == 2, np.nan, values).astype(np.float32),
    }[change]
    actor = actor_case.core(cfg, payloads, old_policy=TrainingForward)
    with pytest.raises(StrettoError, match=r"partition 0, sample 3 \(row 'row-1'\): "):
        actor_case.run_step(actor, records)


def test_a_failed_sample_may_lack_them():
    cfg = actor_case.config()
    records, payloads = actor_case.partition()
    records[2] = dataclasses.replace(records[2], valid=(True, False, True))
    payloads[2]["rollout_logprobs"][1] = np.full(4, np.nan, np.float32)
    actor = actor_case.core(cfg, payloads, old_policy=TrainingForward)
    (metrics,) = actor_case.run_step(actor, records)
    assert np.isfinite(metrics["loss"])
