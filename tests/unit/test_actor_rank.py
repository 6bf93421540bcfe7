"""One actor rank over whole steps: bit-identity, splits, skipped updates, bfloat16, resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import actor_case
import numpy as np
import pytest
import tiny
import torch

from stretto.actor.checkpoint import latest_valid, read_published
from stretto.actor.forward import forward_logprobs
from stretto.actor.parallel import RankGroup, Statistics
from stretto.models.batch import SampleInput
from stretto.models.weights_io import load_buckets
from stretto.types import StrettoError


def steps(actor, count, start=0):
    """``count`` partitions from ``start``; returns the metrics of each."""
    result = []
    for k in range(start, start + count):
        records, payloads = actor_case.partition(k)
        actor.fetch = lambda _refs, groups, payloads=payloads: {g: payloads[g] for g in groups}
        result.append(actor_case.run_step(actor, records)[0])
        actor.end_partition()
    return result


def grads(actor):
    return {name: g.clone() for name, g in actor.trainer.master.named_grads().items()}


def test_two_runs_of_one_schedule_end_with_the_same_bits():
    a, b = (actor_case.core(actor_case.config(), {}) for _ in range(2))
    assert steps(a, 3) == steps(b, 3)
    actor_case.assert_equal_bits(actor_case.parameters(a), actor_case.parameters(b))
    actor_case.assert_equal_bits(a.trainer.optimizer_tensors(), b.trainer.optimizer_tensors())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_without_gradient_are_those_of_training_bit_for_bit(dtype):
    cfg = actor_case.config(dtype=dtype)
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads)
    metrics = actor_case.run_step(actor, records)
    raw = actor.samples.raw()
    assert metrics[0]["ratio_deviation_max"] == 0.0
    np.testing.assert_array_equal(raw["old_logprobs"], raw["train_logprobs"])
    assert raw["global_index"].tolist() == list(range(12))
    assert raw["lengths"].sum() == len(raw["old_logprobs"]) == 42


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_are_the_same_in_every_split(aggregation):
    results = []
    for budget, chunks in ((64, 2), (26, 4), (4096, 1)):
        cfg = actor_case.config(
            actor={"max_tokens_per_microbatch": budget, "chunks_per_mini": chunks, "grad_clip": 1e9},
            algorithm={"aggregation": aggregation},
        )
        records, payloads = actor_case.partition()
        actor = actor_case.core(cfg, payloads)
        metrics = actor_case.run_step(actor, records)[0]
        results.append((metrics, grads(actor)))
    (reference, expected), *others = results
    scale = max(float(g.abs().max()) for g in expected.values())
    for metrics, found in others:
        assert metrics["loss"] == pytest.approx(reference["loss"], abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
        assert metrics["entropy"] == pytest.approx(reference["entropy"], rel=1e-6)
        for name, g in found.items():  # sums in another order: 3e-6 on one make of CPU, less on others
            torch.testing.assert_close(g / scale, expected[name] / scale, rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient():
    records, payloads = actor_case.partition()
    results, calls = [], []
    for on in (False, True):
        options = {"gradient_checkpointing": on, "layout": "padded"}
        actor = actor_case.core(actor_case.config(actor=options), payloads)
        calls.append(0)

        def count(*_):
            calls[-1] += 1

        actor.model.model.language_model.layers[1].mlp.register_forward_pre_hook(count)
        actor_case.run_step(actor, records)
        results.append(grads(actor))
    assert (calls[0], calls[1]) == (10, 15), "5 microbatches: old-policy, training, and once more in the backward"
    actor_case.assert_equal_bits(*results)


def test_text_only_steps_leave_the_vision_tower_a_zero_gradient_and_its_bits():
    records, payloads = actor_case.partition()
    actor = actor_case.core(actor_case.config(), payloads)
    before = actor_case.parameters(actor)
    text = [dataclasses.replace(records[1], group=g) for g in range(4)]
    payloads.update({g: payloads[1] for g in range(4)})
    metrics = actor_case.run_step(actor, text)[0]
    assert metrics["update_skipped"] == 0
    assert metrics["grad_norm"] > 0
    after = actor_case.parameters(actor)
    for name, g in actor.trainer.master.named_grads().items():
        if ".visual." in name:
            assert not g.any()
            assert torch.equal(before[name], after[name])


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_the_next_ones_are_normal():
    """D5: an advantage is NaN in the second of four steps."""
    actor = actor_case.core(actor_case.config(), {})
    steps(actor, 1)
    before, state = actor_case.parameters(actor), {k: v.clone() for k, v in actor.trainer.optimizer_tensors().items()}

    records, payloads = actor_case.partition(1)
    actor.fetch = lambda _refs, groups: {g: payloads[g] for g in groups}
    estimate = actor.estimator
    actor.estimator = lambda *args: spoil(estimate(*args))
    metrics = actor_case.run_step(actor, records)[0]
    actor.estimator = estimate
    actor.end_partition()
    assert metrics["update_skipped"] == 1
    assert metrics["skipped_updates"] == 1
    assert metrics["optimizer_step"] == 1
    actor_case.assert_equal_bits(before, actor_case.parameters(actor))
    actor_case.assert_equal_bits(state, actor.trainer.optimizer_tensors())
    later = steps(actor, 2, start=2)
    assert [m["update_skipped"] for m in later] == [0, 0]
    assert later[0]["lr"] == actor.trainer.lr(1)
    assert all(torch.isfinite(p).all() for p in actor_case.parameters(actor).values())

    never = actor_case.core(actor_case.config(), {})
    steps(never, 1)
    steps(never, 2, start=2)
    actor_case.assert_equal_bits(actor_case.parameters(never), actor_case.parameters(actor))


def spoil(result):
    result.advantages_B[0] = float("nan")
    return result


def test_a_mini_without_loss_tokens_is_skipped_with_its_reason():
    records, payloads = actor_case.partition()
    failed = [dataclasses.replace(r, valid=(False,) * r.n) for r in records]
    actor = actor_case.core(actor_case.config(), payloads)
    before = actor_case.parameters(actor)
    metrics = actor_case.run_step(actor, failed)[0]
    assert metrics["update_skipped"] == 1
    assert "loss" not in metrics
    assert metrics["failed_samples"] == 12
    assert all(np.isfinite(v) for v in metrics.values())
    actor_case.assert_equal_bits(before, actor_case.parameters(actor))


def test_a_failed_sample_with_an_image_token_in_its_response_is_masked_and_changes_nothing_else():
    records, payloads = actor_case.partition()
    reference = actor_case.core(actor_case.config(), payloads)
    actor_case.run_step(reference, records)
    family = tiny.family()
    bad = payloads[2]["response_ids"][1].copy()  # the failed sample
    bad[1] = family.config.image_token_id
    payloads[2]["response_ids"][1] = bad
    actor = actor_case.core(actor_case.config(), payloads)
    assert actor_case.run_step(actor, records)[0]["update_skipped"] == 0
    actor_case.assert_equal_bits(actor_case.parameters(reference), actor_case.parameters(actor))

    marked_valid = [dataclasses.replace(r, valid=(True,) * r.n) for r in records]
    with pytest.raises(StrettoError, match=r"sample 7 .*no response may hold"):
        actor_case.run_step(actor_case.core(actor_case.config(), payloads), marked_valid)


def test_a_missing_rollout_log_prob_stops_the_step_and_names_the_sample():
    records, payloads = actor_case.partition()
    payloads[3]["rollout_logprobs"][2] = payloads[3]["rollout_logprobs"][2][:-1]
    with pytest.raises(StrettoError, match=r"partition 0, sample 11 .*3 response ids and 2 rollout log-probs"):
        actor_case.run_step(actor_case.core(actor_case.config(), payloads), records)


# bfloat16 ------------------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_masters_gradients_and_optimizer_in_float32():
    cfg = actor_case.config(dtype="bfloat16", actor={"lr": 1e-5, "eps": 1e-8, "warmup_updates": 0})
    actor = actor_case.core(cfg, {})
    before = actor_case.parameters(actor)
    bits = {n: p.detach().clone() for n, p in actor.model.named_parameters()}
    steps(actor, 2)
    assert {p.dtype for p in actor.model.parameters()} == {torch.bfloat16}
    tensors = [*actor.trainer.master.named().values(), *actor.trainer.master.named_grads().values()]
    assert {t.dtype for t in [*tensors, *actor.trainer.optimizer_tensors().values()]} == {torch.float32}
    after = actor_case.parameters(actor)
    for name, p in actor.model.named_parameters():
        assert torch.equal(p, after[name].to(torch.bfloat16)), "parameters are the rounded masters"
    name = "lm_head.weight" if "lm_head.weight" in before else "model.language_model.embed_tokens.weight"
    unmoved = (bits[name] == dict(actor.model.named_parameters())[name]) & (before[name] != after[name])
    assert unmoved.float().mean() > 0.5, "steps below bfloat16's resolution are kept in the masters"


def test_bfloat16_gradients_of_microbatches_add_up_in_float32():
    """Against the sum in float64 of the gradients of each microbatch alone."""
    records, payloads = actor_case.partition()
    cfg = actor_case.config(dtype="bfloat16", actor={"grad_clip": 1e9, "max_tokens_per_microbatch": 28})
    actor = actor_case.core(cfg, payloads)
    singles = []
    train = actor.trainer.train

    def spy(batch, objective):
        before = actor.trainer.master.flat_grad.clone()
        result = train(batch, objective)
        alone = actor_case.core(cfg, payloads)
        alone.trainer.begin()
        alone.trainer.train(batch, objective)
        singles.append(alone.trainer.master.flat_grad.clone())
        torch.testing.assert_close(actor.trainer.master.flat_grad, before + singles[-1], rtol=0, atol=0)
        return result

    actor.trainer.train = spy
    metrics = actor_case.run_step(actor, records)[0]
    assert len(singles) >= 5
    total = torch.stack(singles).double().sum(0) / metrics["loss_tokens"]
    torch.testing.assert_close(actor.trainer.master.flat_grad.double(), total, rtol=1e-5, atol=1e-8)
    rounded = torch.stack(singles).to(torch.bfloat16)
    assert torch.equal(rounded.float(), torch.stack(singles)), "each microbatch's own gradient is bfloat16"


# Resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stop_and_resume_equals_a_straight_run_bit_for_bit(tmp_path: Path, dtype):
    cfg = actor_case.config(dtype=dtype, run_dir=str(tmp_path))
    straight = actor_case.core(cfg, {})
    expected = steps(straight, 4)

    first = actor_case.core(cfg, {})
    assert steps(first, 2) == expected[:2]
    published = list(first.publisher.buckets(1))
    path = actor_case.save(first, 2, published={1: lambda: published}, extra={"note": "x"})

    resumed = actor_case.core(cfg, {}, seed=99)
    found = latest_valid(tmp_path / "checkpoints")
    assert found.path == path
    assert found.state["extra"] == {"note": "x"}
    assert found.state["cursor"] == 2
    torch.manual_seed(5)
    resumed.saving.load(found.path, found.state)
    assert steps(resumed, 2, start=2) == expected[2:]
    actor_case.assert_equal_bits(actor_case.parameters(straight), actor_case.parameters(resumed))
    actor_case.assert_equal_bits(straight.trainer.optimizer_tensors(), resumed.trainer.optimizer_tensors())
    engine = tiny.model(3, dtype)
    assert load_buckets(engine, read_published(path)[1]) == 1
    actor_case.assert_equal_bits(
        {m.name: torch.from_numpy(a) for b in published for m, a in zip(b.metas, b.data, strict=True)},
        {m.name: torch.from_numpy(a) for b in read_published(path)[1] for m, a in zip(b.metas, b.data, strict=True)},
    )


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path):
    cfg = actor_case.config(run_dir=str(tmp_path))
    actor = actor_case.core(cfg, {})
    path = actor_case.save(actor, 0)
    names = actor.trainer.master.named_parameters()
    actor.trainer.master.named_parameters = lambda: names | {"model.another": torch.zeros(1)}
    with pytest.raises(StrettoError, match="does not fit the model: 'model"):
        actor.saving.load(path, latest_valid(path.parent).state)


# Evidence ------------------------------------------------------------------------------------------------------------


def test_fingerprints_repeat_and_each_quantity_moves_its_own():
    cfg = actor_case.config()

    def prints(change=None):
        records, payloads = actor_case.partition()
        if change:
            records = change(records, payloads) or records
        actor = actor_case.core(cfg, payloads)
        actor_case.run_step(actor, records)
        return actor_case.fingerprints(actor)

    def pixel(_records, payloads):
        payloads[0]["pixel_values"] = payloads[0]["pixel_values"].copy()
        payloads[0]["pixel_values"][3, 7] += 1e-3

    def reward(records, _payloads):
        return [dataclasses.replace(records[0], rewards=(1.0, 0.5, 0.0)), *records[1:]]

    base = prints()
    assert prints() == base
    assert {"parameters", "gradients", "optimizer", "advantages", "schedule", "inputs.pixel_values"} <= base.keys()
    changed = {key for key, value in prints(pixel).items() if value != base[key]}
    assert changed == {"inputs.pixel_values", "parameters", "gradients", "optimizer"}
    changed = {key for key, value in prints(reward).items() if value != base[key]}
    assert changed == {"inputs.rewards", "advantages", "parameters", "gradients", "optimizer"}


def test_statistics_add_up_over_microbatches_in_any_split():
    whole, parts = Statistics(), Statistics()
    whole.add({"a_sum": torch.tensor(6.0), "b_max": torch.tensor(3.0)})
    for a, b in ((1.0, 3.0), (5.0, 2.0)):
        parts.add({"a_sum": torch.tensor(a), "b_max": torch.tensor(b)})
    assert parts.reduce(RankGroup()) == whole.reduce(RankGroup()) == {"a_sum": 6.0, "b_max": 3.0}


def test_a_forward_of_only_empty_responses_gives_no_log_probs():
    family = tiny.family()
    batch = family.collate([SampleInput(family.process(tiny.prompt(1)), np.zeros(0, np.int32))])
    logprobs, entropy = forward_logprobs(family, tiny.model(), batch, 1.0, with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
