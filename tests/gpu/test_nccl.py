"""Two actor ranks on two GPUs: the same bits from run to run and on both, and the gradients of a float64 reference.

Also a script, which prints what it measures: ``python tests/gpu/test_nccl.py [--device cpu]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import psutil
import pytest
import rank_pool
import test_actor_ranks as cpu
import torch

from stretto.actor.evidence import merged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need a GPU each"),
    pytest.mark.timeout(300),
]
GPU_REL = 2e-6
"""A GPU's float32 kernels round differently: measured against float64, norm-wise."""
SPLITS = [(64, 2, "padded"), (4096, 1, "shared")]


def options(split: tuple[int, int, str] = SPLITS[0], dtype: str = "float32") -> dict[str, Any]:
    budget, chunks, layout = split
    actor = {"max_tokens_per_microbatch": budget, "chunks_per_mini": chunks, "layout": layout}
    found: dict[str, Any] = {"actor": cpu.UNCLIPPED | actor}
    if dtype != "float32":
        found |= {"dtype": dtype, "model": {"config": cpu.tiny.BLOCK, "dtype": dtype}}
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[rank_pool.RankPool]:
    made = rank_pool.RankPool(2, "cuda")
    yield made
    made.close()


def repeated(pool: rank_pool.RankPool, dtype: str) -> tuple[list[list[dict[str, Any]]], list[list[dict[str, Any]]]]:
    """Three updates of two ranks, twice, from the same weights."""
    pool.call(2, "ranks_case:forget")
    first, second = (pool.call(2, "ranks_case:updates", name, options(dtype=dtype), 0, 3) for name in ("one", "two"))
    return first, second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_of_two_ranks_end_with_the_same_bits(pool, dtype):
    first, second = repeated(pool, dtype)
    for rank in range(2):
        for a, b in zip(first[rank], second[rank], strict=True):
            assert a["metrics"] == b["metrics"] and a["metrics"]["ratio_deviation_max"] == 0
            for what in ("grads", "model", "masters", "optimizer"):
                cpu.assert_bits(a[what], b[what])
    cpu.assert_bits(first[0][-1]["model"], first[1][-1]["model"])
    for step in range(3):
        prints = [merged([run[rank][step]["evidence"] for rank in range(2)]).fingerprints for run in (first, second)]
        assert prints[0] == prints[1]


@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradients_are_those_of_a_float64_reference(pool, split):
    ranks = pool.call(2, "ranks_case:one_update", options(split))
    loss, grads = cpu.reference("token_mean")
    assert ranks[0]["metrics"]["loss"] == pytest.approx(loss, rel=GPU_REL)
    cpu.assert_close(ranks[0]["grads"], grads, GPU_REL)
    cpu.assert_bits(ranks[0]["grads"], ranks[1]["grads"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_update_has_the_bits_of_an_unsharded_one(pool, dtype):
    cpu.test_a_sharded_update_has_the_bits_of_an_unsharded_one(pool, 2, dtype)


def test_a_nan_on_one_rank_skips_the_update_on_both(pool):
    cpu.test_a_nan_on_one_rank_skips_the_update_on_all_and_the_next_ones_are_normal(pool, "float32")


def test_stop_and_resume_changes_no_bit(pool, tmp_path):
    cpu.assert_resume_changes_no_bit(pool, tmp_path, 2, "bfloat16", 2)


def test_ranks_listen_on_loopback_alone(pool):
    cpu.test_ranks_listen_on_loopback_alone(pool)


def table(device: str) -> None:
    """The figures behind the tests."""
    begun = time.monotonic()
    pool = rank_pool.RankPool(2, device)
    print(f"torch {torch.__version__}, {device}; two processes up in {time.monotonic() - begun:.1f} s")
    loss, grads = cpu.reference("token_mean")
    whole = cpu.norm(grads)
    for split in SPLITS:
        for world in (1, 2):
            found = pool.call(world, "ranks_case:one_update", options(split))[0]
            gap = cpu.norm({name: found["grads"][name] - grads[name] for name in grads}) / whole
            off = abs(found["metrics"]["loss"] / loss - 1)
            print(
                f"{split[2]:>7}, budget {split[0]:>4}, {world} rank(s): loss off by {off:.1e}, gradients by {gap:.1e}"
            )
    for dtype in ("float32", "bfloat16"):
        first, second = repeated(pool, dtype)
        same = all(
            a[what][name].tobytes() == b[what][name].tobytes()
            for rank in range(2)
            for a, b in zip(first[rank], second[rank], strict=True)
            for what in ("grads", "model", "masters", "optimizer")
            for name in a[what]
        )
        print(f"{dtype}: three updates of two ranks, twice: {'the same bits' if same else 'DIFFERENT BITS'}")
    for rank, process in enumerate(pool.processes):
        listening = {c.laddr.ip for c in psutil.Process(process.pid).net_connections() if c.status == "LISTEN"}
        print(f"rank {rank} listens on {', '.join(sorted(listening)) or 'nothing'}")
    pool.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    table(parser.parse_args().device)
