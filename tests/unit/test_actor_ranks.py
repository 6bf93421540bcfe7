"""Several actor ranks as real processes: loss and gradients of one, the same bits on all, and nothing hangs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import actor_case
import numpy as np
import psutil
import pytest
import rank_pool
import ranks_case
import reference_grpo
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.actor.evidence import merged, require_alike
from stretto.actor.parallel import owners
from stretto.actor.rendezvous import interface_of
from stretto.observe.dump import dump_path, read_dump
from stretto.observe.fingerprint import element_sum, fingerprint
from stretto.parity.reference import float64_throughout
from stretto.schedule import schedule_chunk
from stretto.types import Prompt, StrettoError

REL = 1e-6
FLOOR = 0.3
"""A tensor whose gradient is less than this share of the whole gradient's norm is held against that share, so against
3e-7 of the whole: small ones are differences of large numbers (a softmax's gradient, a norm's), of which float32 leaves
a relative 2e-6 on one rank as on four.
"""
UNCLIPPED = {"grad_clip": 1e9}


@pytest.fixture(scope="module")
def pool() -> Iterator[rank_pool.RankPool]:
    made = rank_pool.RankPool()
    yield made
    made.close()


def assert_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert not different, f"{len(different)} of {len(a)} differ, the first is {different[0]}"


def norm(grads: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rel: float = REL) -> None:
    """Norm-wise over all tensors, and tensor by tensor with the floor."""
    assert found.keys() == expected.keys()
    gap = {name: found[name].astype(np.float64) - expected[name] for name in found}
    whole = norm(expected)
    assert norm(gap) <= rel * whole, norm(gap) / whole
    for name, g in gap.items():
        assert norm({name: g}) <= rel * max(norm({name: expected[name]}), FLOOR * whole), name


def union(states: list[dict[str, Any]], what: str) -> dict[str, np.ndarray]:
    """What ranks own, put together; nothing is owned twice."""
    total = sum(len(s[what]) for s in states)
    merged = {name: value for s in states for name, value in s[what].items()}
    assert len(merged) == total
    return merged


# Against float64 -----------------------------------------------------------------------------------------------------


@functools.cache
def reference(aggregation: str, change: str = "") -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the partition by ``reference_grpo``, one sample at a time, in float64 throughout."""
    cfg = ranks_case.config({"algorithm": {"aggregation": aggregation}})
    records, payloads = ranks_case.partition(change)
    samples = actor_case.reference_samples(records, payloads)
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
        "aggregation": aggregation,
    }
    model = ranks_case.model(cfg).double()
    with float64_throughout():
        with torch.no_grad():
            old = [[float(v) for v in reference_grpo.logprobs(model, s, suppressed, 1.0)] for s in samples]
        advantages = reference_grpo.advantages(samples, algorithm.advantage_eps)
        loss = reference_grpo.batch_loss(model, samples, old, advantages, options)
        loss.backward()
    assert loss.dtype == torch.float64
    grads = {n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in model.named_parameters()}
    return float(loss.detach()), grads


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("budget", "chunks", "layout"), [(64, 2, "auto"), (30, 4, "padded"), (4096, 1, "shared")])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients_are_those_of_a_float64_reference(pool, world, budget, chunks, layout, aggregation):
    actor = UNCLIPPED | {"max_tokens_per_microbatch": budget, "chunks_per_mini": chunks, "layout": layout}
    ranks = pool.call(world, "ranks_case:one_update", {"actor": actor, "algorithm": {"aggregation": aggregation}})
    loss, grads = reference(aggregation)
    assert ranks[0]["metrics"]["loss"] == pytest.approx(loss, rel=REL)
    assert ranks[0]["metrics"]["grad_norm"] == pytest.approx(norm(grads), rel=REL)
    assert_close(ranks[0]["grads"], grads)
    for rank in ranks[1:]:
        assert rank["metrics"] == ranks[0]["metrics"]
        assert_bits(rank["grads"], ranks[0]["grads"])
        assert_bits(rank["model"], ranks[0]["model"])
    assert len({len(rank["microbatches"]) for rank in ranks}) == 1


@pytest.mark.parametrize(
    "algorithm",
    [
        {"policy_loss": "gspo", "aggregation": "sequence_mean", "kl_loss_coef": 0.1, "kl_estimator": "k2"},
        {"policy_loss": "cispo", "aggregation": "constant_length", "advantage": "reinforce_pp_baseline"},
        {"kl_reward_coef": 0.2, "advantage": "rloo", "importance_correction": "mis", "importance_level": "sequence"},
    ],
    ids=str,
)
def test_other_algorithms_are_the_same_on_one_rank_and_on_several(pool, algorithm):
    """Two updates, so that old policy, reference and rollout differ in the second."""
    actor = UNCLIPPED | {"lr": 5e-3, "warmup_updates": 0, "eps": 1e-3}
    options = {"actor": actor, "algorithm": algorithm}
    results = {}
    for world in (1, 2, 4):
        ranks = pool.call(world, "ranks_case:updates", f"algorithms-{world}", options, 0, 2)
        results[world] = ranks[0][-1]
        for rank in ranks[1:]:
            assert rank[-1]["metrics"] == ranks[0][-1]["metrics"]
        pool.call(world, "ranks_case:forget")
    for world in (2, 4):
        assert results[world]["metrics"]["loss"] == pytest.approx(results[1]["metrics"]["loss"], rel=1e-4)
        assert_close(results[world]["grads"], results[1]["grads"], rel=2e-5)
    if "kl_reward_coef" in algorithm:
        assert abs(results[1]["metrics"]["reward_kl_mean"]) > 1e-3


def test_two_runs_of_four_ranks_end_with_the_same_bits(pool):
    first, second = (pool.call(4, "ranks_case:one_update", {}) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a["metrics"] == b["metrics"]
        for what in ("grads", "model", "masters", "optimizer"):
            assert_bits(a[what], b[what])


# Rows of the public reports ------------------------------------------------------------------------------------------


ONE_LONG = ((100, 900), (-2.0, -0.5))
TEN_EQUAL = ((100,) * 10, (-2.0,) + (-0.5,) * 9)


@pytest.mark.case("D1")
@pytest.mark.parametrize(
    ("samples", "aggregation", "expected"),
    [
        (ONE_LONG, "token_mean", 0.65),
        (ONE_LONG, "sequence_mean", 1.25),
        (TEN_EQUAL, "token_mean", 0.65),
        (TEN_EQUAL, "sequence_mean", 0.65),
    ],
)
def test_a_token_weighs_the_same_in_every_microbatch_rank_and_split(pool, samples, aggregation, expected):
    """100 tokens of loss 2.0 and 900 of loss 0.5 are 0.65 a token. A loss of its own for each microbatch, averaged,
    gives 1.25: short ones weigh too much there. By sequences the two samples are (2.0 + 0.5) / 2.
    """
    lengths, advantages = samples
    last = len(lengths) - 1
    rest = list(range(1, last + 1))
    splits = [
        [[[0, *rest]]],
        [[[0], rest]],
        [[rest, [0]]],
        [[[0]], [rest]],
        [[rest], [[0]]],
        [[[0], [last]], [rest[:-1] or [-last], [-last]]],
    ]
    options = {"staleness": 0, "actor": UNCLIPPED, "algorithm": {"aggregation": aggregation}}
    found = [pool.call(len(ranks), "ranks_case:fixed", options, lengths, advantages, ranks)[0] for ranks in splits]
    for split in found:
        assert split["metrics"]["loss"] == pytest.approx(expected, rel=REL)
        assert split["metrics"]["loss_tokens"] == 1000
        assert split["metrics"]["ratio_deviation_max"] == 0
        assert_close(split["grads"], found[0]["grads"])


@pytest.mark.case("D2")
def test_a_rank_with_fewer_microbatches_is_filled_up_and_changes_nothing(pool):
    """Token cap 1000, lengths 900, 900, 900 on rank 0 and 10 on rank 1: 3 forwards each, in training and before."""
    lengths, advantages = (900, 900, 900, 10), (1.0, -1.0, 0.5, 2.0)
    options = {"staleness": 0, "actor": UNCLIPPED | {"layout": "padded"}}
    uneven = [[[0], [1], [2]], [[3], [-3], [-3]]]
    ranks = pool.call(2, "ranks_case:fixed", options, lengths, advantages, uneven)
    (one,) = pool.call(1, "ranks_case:fixed", options, lengths, advantages, [[[0], [1], [2], [3]]])
    assert [rank["forwards"] for rank in ranks] == [(3, 3), (3, 3)]
    assert one["forwards"] == (4, 4)
    assert ranks[0]["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=REL)
    assert ranks[0]["metrics"]["loss_tokens"] == one["metrics"]["loss_tokens"] == 2710
    assert_close(ranks[0]["grads"], one["grads"])
    assert_bits(ranks[0]["grads"], ranks[1]["grads"])


@pytest.mark.case("D2")
def test_the_scheduler_gives_every_rank_equally_many_microbatches_for_any_lengths():
    records = [ranks_case.record(g, 0, n) for g, n in enumerate((900, 900, 900, 10))]
    for layout in ("padded", "shared"):
        for world in (1, 2, 3, 4):
            chunk = schedule_chunk(0, records, world, 1000, 100, layout)
            assert len({len(rank) for rank in chunk.ranks}) == 1
            real = sorted(i for rank in chunk.ranks for m in rank if not m.inert for i in m.samples)
            assert real == [0, 1, 2, 3]


@pytest.mark.case("D3")
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("change", ["first", "text"])
def test_ranks_without_any_image_train_and_give_the_tower_zeros(pool, world, change):
    options = {"actor": UNCLIPPED | {"chunks_per_mini": 1}}
    ranks = pool.call(world, "ranks_case:one_update", options, change)
    loss, grads = reference("token_mean", change)
    if world > 1:  # samples 0 to 2 have an image in "first", none has one in "text"
        assert all(i > 2 for m in ranks[-1]["microbatches"] for i in m.samples)
    assert ranks[0]["metrics"]["loss"] == pytest.approx(loss, rel=REL)
    assert_close(ranks[0]["grads"], grads)
    before = ranks_case.arrays(dict(ranks_case.model(ranks_case.config(options)).named_parameters()))
    tower = [name for name in before if ".visual." in name]
    assert tower
    for rank in ranks:
        assert_bits(rank["model"], ranks[0]["model"])
        for name in tower:
            assert rank["grads"][name].any() == (change == "first"), name
            if change == "text":
                assert rank["model"][name].tobytes() == before[name].tobytes()


@pytest.mark.case("D3")
def test_a_frozen_tower_keeps_its_bits_and_the_rest_trains_as_on_one_rank(pool):
    options = {"actor": UNCLIPPED | {"freeze": ("vision_tower", "projector")}}
    before = ranks_case.arrays(dict(ranks_case.model(ranks_case.config(options)).named_parameters()))
    (one,) = pool.call(1, "ranks_case:one_update", options)
    ranks = pool.call(2, "ranks_case:one_update", options)
    for rank in ranks:
        assert not [name for name in rank["grads"] if ".visual." in name]
        assert_close(rank["grads"], one["grads"])
        for name, value in rank["model"].items():
            assert (value.tobytes() == before[name].tobytes()) == (".visual." in name), name


FEW = {"rank": 2, "targets": ("q_proj",)}
"""Two text layers, hence four trainable parameters: one for each of four ranks."""


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_adapters_as_one_does(pool, world):
    options = {
        "actor": UNCLIPPED | {"lr": 1e-2, "warmup_updates": 0},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.2},
        "lora": FEW,
    }
    (one,) = pool.call(1, "ranks_case:from_scratch", options, 2)
    ranks = pool.call(world, "ranks_case:from_scratch", options, 2)
    assert one["metrics"]["loss"] == pytest.approx(ranks[0]["metrics"]["loss"], rel=1e-5)
    assert len(one["grads"]) == 4 and all(g.any() for g in one["grads"].values())
    owned = union(ranks, "masters")
    assert owned.keys() == one["masters"].keys() and all(rank["masters"] for rank in ranks)
    for rank in ranks:
        assert_bits(rank["model"], ranks[0]["model"])
        assert_close(rank["grads"], one["grads"], 1e-5)
        assert {name.rpartition(".")[0] for name in rank["optimizer"]} == rank["masters"].keys()
        for name, value in one["model"].items():
            assert (value.tobytes() == rank["model"][name].tobytes()) or ".lora_" in name, name


def test_ranks_drop_out_differently_and_repeat_it(pool):
    options = {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}, "lora": FEW | {"dropout": 0.5}}
    first, second = (pool.call(2, "ranks_case:from_scratch", options, 2) for _ in range(2))
    for rank, again in zip(first, second, strict=True):
        assert_bits(rank["model"], again["model"])
        assert_bits(rank["model"], first[0]["model"])
    plain = pool.call(2, "ranks_case:from_scratch", options | {"lora": FEW}, 2)
    assert first[0]["metrics"]["loss"] != plain[0]["metrics"]["loss"]


def test_more_ranks_than_adapter_parameters_are_refused():
    names = {f"layer.lora_{half}": 8 for half in "AB"}
    with pytest.raises(StrettoError, match=r"actor.data_parallel = 4: the model has 2 trainable parameters"):
        owners(names, 4)


@pytest.mark.case("D3")
def test_no_images_and_none_named_are_one_and_the_same_prompt():
    text = ({"role": "user", "content": "Sum?"},)
    parts = ({"role": "user", "content": [{"type": "text", "text": "Sum?"}]},)
    prompts = [Prompt(row_id="a", messages=text), Prompt(row_id="b", messages=parts, images=())]
    missing, empty = (tiny.family().process(prompt) for prompt in prompts)
    assert missing.pixel_values.shape == empty.pixel_values.shape == (0, 1536)
    assert missing.image_grid_thw.shape == empty.image_grid_thw.shape == (0, 3)
    assert missing.prompt_ids.tolist() == empty.prompt_ids.tolist()
    assert not missing.mm_token_type_ids.any() and not empty.mm_token_type_ids.any()


@pytest.mark.case("D5")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_on_one_rank_skips_the_update_on_all_and_the_next_ones_are_normal(pool, dtype):
    """An advantage is NaN at the second of four steps, on the last rank alone."""
    options = {"dtype": dtype, "model": {"config": tiny.BLOCK, "dtype": dtype}}
    pool.call(2, "ranks_case:forget")
    spoiled = pool.call(2, "ranks_case:updates", "spoiled", options, 0, 4, 0, 1)
    for rank in spoiled:
        assert [step["metrics"]["update_skipped"] for step in rank] == [0, 1, 0, 0]
        assert [step["metrics"]["skipped_updates"] for step in rank] == [0, 1, 1, 1]
        assert [step["metrics"]["optimizer_step"] for step in rank] == [1, 1, 2, 3]
        for what in ("model", "masters", "optimizer"):
            assert_bits(rank[0][what], rank[1][what])
        assert all(np.isfinite(value).all() for what in ("model", "optimizer") for value in rank[3][what].values())
        assert rank[1]["metrics"]["lr"] == rank[2]["metrics"]["lr"]
    pool.call(2, "ranks_case:updates", "never", options, 0, 1)
    never = pool.call(2, "ranks_case:updates", "never", options, 2, 2)
    for rank, other in zip(spoiled, never, strict=True):
        assert_bits(rank[3]["model"], other[-1]["model"])
        assert_bits(rank[3]["optimizer"], other[-1]["optimizer"])


# Sharded optimizer state ---------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 1000), min_size=4), st.integers(1, 4))
def test_owners_are_balanced_and_depend_on_names_and_sizes_alone(sizes, world):
    found = owners(sizes, world)
    assert found == owners(dict(sorted(sizes.items(), reverse=True)), world)
    assert found.keys() == sizes.keys() and set(found.values()) == set(range(world))
    weights = {name: max(size, 1) for name, size in sizes.items()}
    loads = [sum(weights[name] for name in sizes if found[name] == rank) for rank in range(world)]
    # Graham 1966: whoever is given work last had no more than the average then, and this was one piece of it.
    least = max(max(weights.values()), sum(weights.values()) / world)
    assert max(loads) <= (2 - 1 / world) * least


def test_fewer_parameters_than_ranks_are_refused():
    with pytest.raises(StrettoError, match=r"actor\.data_parallel = 3: the model has 2 trainable parameters"):
        owners({"a": 1, "b": 2}, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_sharded_update_has_the_bits_of_an_unsharded_one(pool, world, dtype):
    for seed in range(12):
        (one,) = pool.call(1, "ranks_case:sharded_steps", seed, dtype, 3)
        ranks = pool.call(world, "ranks_case:sharded_steps", seed, dtype, 3)
        for rank in ranks:
            assert_bits(rank["model"], one["model"])
            assert 0 < len(rank["masters"]) < len(one["masters"])
        assert_bits(union(ranks, "masters"), one["masters"])
        assert_bits(union(ranks, "optimizer"), one["optimizer"])


# Evidence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_evidence_of_ranks_adds_up_to_that_of_the_whole(pool, world):
    (one,) = pool.call(1, "ranks_case:one_update", {})
    ranks = pool.call(world, "ranks_case:one_update", {})
    evidence = merged([rank["evidence"] for rank in ranks])
    whole, parts = merged([one["evidence"]]).fingerprints, evidence.fingerprints
    assert whole.keys() == parts.keys()
    same = {name for name in whole if whole[name] == parts[name]}
    assert same >= {"advantages", *(name for name in whole if name.startswith("inputs."))}
    for what, states in (("parameters", "masters"), ("optimizer", "optimizer")):
        assert parts[what] == fingerprint(union(ranks, states))
        named = {name: element_sum(tensor) for name, tensor in union(ranks, states).items()}
        assert evidence.hashes[what] == named and list(evidence.hashes[what]) == sorted(named)
    assert parts["gradients"] == fingerprint(ranks[-1]["grads"])
    assert evidence.hashes["gradients"] == {name: element_sum(g) for name, g in ranks[-1]["grads"].items()}
    index = [i for rank in ranks for i in rank["evidence"].raw["global_index"].tolist()]
    assert sorted(index) == list(range(12))
    for rank, part in enumerate(evidence.raw):
        placed = {}
        for at, *place in zip(
            *(part[name].tolist() for name in ("global_index", "chunk", "microbatch", "row")), strict=True
        ):
            placed[tuple(place)] = at
        assert placed == {
            (chunk.chunk, i, row): at
            for chunk in ranks[rank]["chunks"]
            for i, microbatch in enumerate(chunk.ranks[rank])
            for row, at in enumerate(microbatch.samples)
            if not microbatch.inert
        }
        assert set(part["rank"].tolist()) == {rank}


def test_each_rank_dumps_the_masters_that_it_owns_and_the_first_all_gradients(pool, tmp_path):
    ranks = pool.call(2, "ranks_case:one_update", {}, "", str(tmp_path))
    found = read_dump(tmp_path, 0)
    masters, grads = union(ranks, "masters"), ranks[0]["grads"]
    expected = {f"parameters.{n}": v for n, v in masters.items()} | {f"gradients.{n}": v for n, v in grads.items()}
    assert_bits(found, expected)
    dump_path(tmp_path, 0, 1, 2).rename(tmp_path / "elsewhere")
    with pytest.raises(StrettoError, match=r"no whole dump of update 0: found update_000000-rank-0-of-2\.safetensors"):
        read_dump(tmp_path, 0)


def test_ranks_that_have_parted_are_named_with_both_values(pool):
    ranks = [rank["evidence"] for rank in pool.call(2, "ranks_case:one_update", {})]
    object.__setattr__(ranks[1], "replica", "0" * 16)
    with pytest.raises(StrettoError, match=f"parameters of rank 1 is {'0' * 16}, of rank 0 {ranks[0].replica}"):
        merged(ranks)
    require_alike([math.nan, math.nan], "loss")


# Checkpoints ---------------------------------------------------------------------------------------------------------


def save(pool, world: int, name: str, step: int) -> str:
    pool.call(1, "ranks_case:begin_save", name, step)
    shards = pool.call(world, "ranks_case:write_shard", name, step)
    return pool.call(1, "ranks_case:commit", name, step, shards)[0]


def assert_resume_changes_no_bit(pool, tmp_path, world: int, dtype: str, stop: int) -> None:
    options = {"run_dir": str(tmp_path), "dtype": dtype, "model": {"config": tiny.BLOCK, "dtype": dtype}}
    pool.call(world, "ranks_case:forget")
    straight = pool.call(world, "ranks_case:updates", "straight", options, 0, 4)
    pool.call(world, "ranks_case:updates", "first", options, 0, stop)
    save(pool, world, "first", stop)
    pool.call(world, "ranks_case:resume", "second", options, 99)
    resumed = pool.call(world, "ranks_case:updates", "second", options, stop, 4 - stop)
    for rank, other in zip(straight, resumed, strict=True):
        for before, after in zip(rank[stop:], other, strict=True):
            assert before["metrics"] == after["metrics"]
            for what in ("grads", "model", "masters", "optimizer"):
                assert_bits(before[what], after[what])
            assert before["evidence"].parts == after["evidence"].parts


@pytest.mark.case("G1")
@pytest.mark.parametrize(("world", "dtype", "stop"), [(2, "float32", 2), (4, "bfloat16", 1)])
def test_stop_and_resume_of_several_ranks_changes_no_bit(pool, tmp_path, world, dtype, stop):
    assert_resume_changes_no_bit(pool, tmp_path, world, dtype, stop)


@pytest.mark.long
@pytest.mark.case("G1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_resume_at_any_update_of_any_world_changes_no_bit(pool, tmp_path, world, dtype, stop):
    assert_resume_changes_no_bit(pool, tmp_path, world, dtype, stop)


# The group itself ----------------------------------------------------------------------------------------------------


def test_ranks_listen_on_loopback_alone(pool):
    listening = [
        c.laddr.ip for p in pool.processes for c in psutil.Process(p.pid).net_connections() if c.status == "LISTEN"
    ]
    assert set(listening) == {"127.0.0.1"}
    assert len(listening) > len(pool.processes)


def test_an_address_belongs_to_an_interface_or_is_refused():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(StrettoError, match=r"no network interface of this machine has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")  # reserved for documentation


def test_a_rank_whose_sibling_stays_away_says_so_and_names_itself(pool):
    said, _ = pool.call("hasty", "ranks_case:lonely_reduction")
    assert said.startswith("CollectiveError: actor rank 0 of 2 could not finish the sum of gradients")
    assert "imed out" in said and ".cc" not in said
