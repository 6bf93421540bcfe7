"""Gradients in float64: against a plain implementation in float64, and how far float32 lies from them."""

from __future__ import annotations

import math

import actor_case
import numpy as np
import pytest
import ranks_case
import reference_grpo
import tiny
import torch

from stretto.observe.dump import read_dump
from stretto.parity.reference import distance, float64_throughout, gradients
from stretto.types import StrettoError

LOOSE = {"grad_clip": 1e9}


def groups(k=0):
    records, payloads = actor_case.partition(k)
    return [(record, payloads[record.group]) for record in records]


def plain(cfg):
    """``reference_grpo``, one sample at a time, in float64 throughout."""
    samples = actor_case.reference_samples(*actor_case.partition())
    for sample in samples:
        sample["pixels"] = None if sample["pixels"] is None else sample["pixels"].double()
    suppressed = tiny.family().suppressed_V.nonzero()[:, 0].tolist()
    algorithm = cfg.algorithm
    options = {
        "suppressed": suppressed,
        "temperature": 1.0,
        "clip_low": algorithm.clip_range[0],
        "clip_high": algorithm.clip_range[1],
        "correction": "tis",
        "tis_cap": algorithm.tis_cap,
        "aggregation": algorithm.aggregation,
    }
    model = ranks_case.model(cfg).double()
    with float64_throughout():
        with torch.no_grad():
            old = [[float(v) for v in reference_grpo.logprobs(model, s, suppressed, 1.0)] for s in samples]
        advantages = reference_grpo.advantages(samples, algorithm.advantage_eps)
        reference_grpo.batch_loss(model, samples, old, advantages, options).backward()
    return {n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("layout", "chunks"), [("shared", 2), ("padded", 1)])
def test_the_reference_is_a_plain_float64_gradient_in_any_layout(layout, chunks):
    cfg = ranks_case.config({"actor": LOOSE | {"layout": layout, "chunks_per_mini": chunks}})
    found, expected = gradients(cfg, groups()), plain(cfg)
    assert found.keys() == expected.keys()
    assert {grad.dtype for grad in found.values()} == {np.dtype(np.float64)}
    scale = max(np.abs(grad).max() for grad in expected.values())
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-13 * scale, err_msg=name)
    assert torch.float32 is torch.zeros(1).dtype, "what was put aside is back"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_lies_within_rounding_of_its_reference(dtype, tmp_path):
    """Clipped, as the recipe says; what a rank dumps is what is compared."""
    plain_cfg = ranks_case.config({"run": {"dir": str(tmp_path)}, "actor": {"grad_clip": 1e-3}})
    cfg = plain_cfg.model_copy(update={"model": plain_cfg.model.model_copy(update={"dtype": dtype})})
    cfg = cfg.with_seams(dump_partition=0)
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads, model=ranks_case.model(cfg))
    actor_case.run_step(actor, records)
    actor.evidence()
    reference = {f"gradients.{name}": grad for name, grad in gradients(cfg, groups()).items()}
    assert math.sqrt(sum((grad**2).sum() for grad in reference.values())) == pytest.approx(1e-3, rel=1e-9)
    found = distance(read_dump(tmp_path, 0), reference)
    lowest, highest = {"float32": (1e-9, 1e-6), "bfloat16": (1e-3, 5e-2)}[dtype]
    assert lowest < found.l2 < highest and lowest < found.max < highest
    other = distance({f"gradients.{n}": g for n, g in gradients(cfg, groups(1)).items()}, reference)
    assert other.l2 > 0.1, "another partition is told apart"


def test_several_minis_and_epochs_end_with_the_last_update(tmp_path):
    options = {"minis_per_partition": 2, "epochs": 2, "chunks_per_mini": 1, "lr": 1e-2, "warmup_updates": 0}
    cfg = ranks_case.config({"run": {"dir": str(tmp_path)}, "actor": options})
    records, payloads = actor_case.partition()
    actor = actor_case.core(cfg, payloads, model=ranks_case.model(cfg))
    (first, second), normalisers = actor_case.minis(cfg, records, groups_per_mini=2), (20, 18)
    for mini in (first, second):
        actor.phase1(mini.chunks[0], records[2 * mini.index : 2 * mini.index + 2], None)
    actor.phase2(records)
    for mini in (first, second, first, second):
        actor.phase3(mini, normalisers[mini.index])
    found = {f"gradients.{name}": grad.numpy() for name, grad in actor.trainer.master.named_grads().items()}
    reference = {f"gradients.{name}": grad for name, grad in gradients(cfg, groups()).items()}
    assert distance(found, reference).l2 < 1e-3


def test_what_has_no_reference_is_refused():
    dropout = ranks_case.config({"lora": {"rank": 2, "dropout": 0.5}})
    with pytest.raises(StrettoError, match="dropout"):
        gradients(dropout, groups())
    failed = [(record.__class__(**{**vars(record), "valid": (False,) * 3}), fields) for record, fields in groups()]
    with pytest.raises(StrettoError, match="skipped"):
        gradients(ranks_case.config({}), failed)


def test_distances_by_hand():
    reference = {"gradients.a": np.array([3.0, -4.0]), "gradients.b": np.array([[0.5]]), "gradients.c": np.zeros(2)}
    found = {
        "gradients.a": np.array([3.0, -4.4], np.float32),
        "gradients.b": np.array([[0.4]]),
        "parameters.a": np.ones(1),
    }
    result = distance(found | {"gradients.c": np.zeros(2)}, reference)
    assert result.l2 == pytest.approx(math.sqrt(0.4**2 + 0.1**2) / math.sqrt(25.25), rel=1e-6)
    assert result.max == pytest.approx(0.4 / 4, rel=1e-6)
    assert (result.tensor, result.tensor_max) == ("b", pytest.approx(0.2))
    off = distance(found | {"gradients.c": np.array([0.0, 1e-30])}, reference)
    assert (off.tensor, off.tensor_max) == ("c", math.inf)
    same = distance(reference, reference)
    assert (same.l2, same.max, same.tensor_max) == (0.0, 0.0, 0.0)
    for change, message in (
        ({}, r"'gradients\.c' is absent here and \[2\] in the reference"),
        ({"gradients.c": np.zeros(3)}, r"'gradients\.c' is \[3\] here"),
        ({"gradients.c": np.array([0.0, np.nan])}, "not finite"),
    ):
        with pytest.raises(StrettoError, match=message):
            distance(found | change, reference)
