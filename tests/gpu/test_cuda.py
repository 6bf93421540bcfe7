"""What only a CUDA device can show: the same bits twice, agreement with the CPU, and a run with a GPU for each side."""

from __future__ import annotations

from collections.abc import Iterator

import actor_case
import numpy as np
import pytest
import running
import tiny
import torch

from stretto import machine
from stretto.actor.rank import ActorRankCore
from stretto.models.batch import SampleInput
from stretto.models.logprobs import token_logprobs
from stretto.models.parts import prepare, seed_dropout
from stretto.models.weights_io import load_buckets
from stretto.observe.fingerprint import fingerprint
from stretto.observe.trace import Tracer
from stretto.rollout.engine import GroupRequest, Sampling
from stretto.rollout.hf import HfEngine
from stretto.rollout.noise import gumbel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device can be seen here"),
    pytest.mark.timeout(240),
]

LAYOUTS = [((32, 64),), (), ((64, 32), (32, 32)), ((32, 64),)]
SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=10, seed=3)


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """The settings of ``run.determinism = "exact"``, made before this process first uses the device."""
    machine.settle((), "exact")
    yield
    torch.use_deterministic_algorithms(False)


def actor(dtype: str, device: str, lora: dict | None = None, **options: object) -> ActorRankCore:
    """A rank that has trained two partitions."""
    cfg = actor_case.config(dtype=dtype, actor=dict(options), lora=lora or {})
    payloads: dict = {}
    model = tiny.model(0, dtype).to(device)
    prepare(model, tiny.family(), cfg)
    seed_dropout(cfg.run.seed)
    rank = ActorRankCore(
        cfg,
        tiny.family(),
        model,
        lambda _refs, groups: {g: payloads[g] for g in groups},
        Tracer(None, "actor0"),
    )
    for k in range(2):
        records, fields = actor_case.partition(k)
        payloads.update(fields)
        rank.end_partition()
        (metrics,) = actor_case.run_step(rank, records)
        assert metrics["update_skipped"] == 0
        assert metrics["ratio_deviation_max"] == 0 or cfg.lora.dropout > 0
    return rank


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_updates_are_the_same_bits_twice_and_the_ratio_is_one(dtype, checkpointing):
    first, second = (actor(dtype, "cuda", gradient_checkpointing=checkpointing) for _ in range(2))
    assert actor_case.fingerprints(first) == actor_case.fingerprints(second)
    actor_case.assert_equal_bits(actor_case.parameters(first), actor_case.parameters(second))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_train_to_the_same_bits_twice_and_arrive_bit_for_bit(dtype, dropout, checkpointing):
    lora = {"rank": 4, "dropout": dropout, "publish": "adapter"}
    options = {"gradient_checkpointing": checkpointing, "layout": "padded"}
    first, second = (actor(dtype, "cuda", lora, **options) for _ in range(2))
    actor_case.assert_equal_bits(actor_case.parameters(first), actor_case.parameters(second))
    assert len(actor_case.parameters(first)) == 28
    receiver = tiny.model(0, dtype).to("cuda")
    prepare(receiver, tiny.family(), first.config)
    fresh = {name: p.detach().cpu() for name, p in receiver.named_parameters()}
    on_cpu = tiny.model(0, dtype)
    prepare(on_cpu, tiny.family(), first.config)
    actor_case.assert_equal_bits(fresh, {name: p.detach() for name, p in on_cpu.named_parameters()})
    assert load_buckets(receiver, first.publisher.buckets(3)) == 3
    actor_case.assert_equal_bits(first.model.state_dict(), receiver.state_dict())


def test_two_float32_updates_agree_with_the_cpu():
    gpu, cpu = actor("float32", "cuda"), actor("float32", "cpu")
    expected = actor_case.parameters(cpu)
    for name, value in actor_case.parameters(gpu).items():
        torch.testing.assert_close(value.cpu(), expected[name], atol=2e-5, rtol=1e-4)


def test_decoding_is_the_same_bits_twice_and_reports_the_training_forwards_log_probs():
    family, model = tiny.family(), tiny.model().to("cuda")
    engine = HfEngine(family, lambda: model, "cuda")
    requests = [
        GroupRequest(partition=0, group=g, prompt=family.process(tiny.prompt(g, images)))
        for g, images in enumerate(LAYOUTS)
    ]
    groups, again = (engine.decode(requests, SAMPLING) for _ in range(2))
    got, repeated = (np.concatenate([r.logprobs for group in g for r in group]) for g in (groups, again))
    assert got.tobytes() == repeated.tobytes()
    samples = [SampleInput(q.prompt, r.token_ids) for q, group in zip(requests, groups, strict=True) for r in group]
    batch = family.collate(samples, "cuda")
    with torch.no_grad():
        logits = family.response_logits(model, batch)
    expected = token_logprobs(logits, batch.response_ids_T, engine.suppressed_V, 1.0)
    np.testing.assert_allclose(got, expected.cpu().numpy(), atol=5e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_arrive_bit_for_bit(dtype):
    sender = actor(dtype, "cuda")
    receiver = tiny.model(1, dtype).to("cuda")
    assert load_buckets(receiver, sender.publisher.buckets(3)) == 3
    actor_case.assert_equal_bits(sender.model.state_dict(), receiver.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_fingerprints_do_not_depend_on_the_device(dtype):
    values = (torch.randn(3, 70001, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    assert fingerprint({"t": values.cuda()}) == fingerprint({"t": values})


def test_sampling_noise_is_that_of_the_cpu_up_to_the_rounding_of_two_logarithms():
    keys = [3, 2**63 + 5, 2**64 - 1]
    torch.testing.assert_close(gumbel(keys, 7, 5000, "cuda").cpu(), gumbel(keys, 7, 5000), atol=2e-6, rtol=2e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="actor and rollout need a GPU each")
def test_a_run_with_a_gpu_for_each_side_is_bit_identical_to_a_second_one(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        running.train(running.recipe(tmp_path / name, run={"updates": 3}, cluster={"device": "cuda"}))
    one, other = (tmp_path / name / "run" for name in ("one", "other"))
    prints = running.jsonl(one, "fingerprints.jsonl")
    assert len(prints) == 3 and prints == running.jsonl(other, "fingerprints.jsonl")
    assert running.numbers(one) == running.numbers(other)
    assert all(row["ratio_deviation_max"] == 0 for row in running.numbers(one))
