"""Bounded staleness and lockstep with a real rollout side, engines of 10 ms a sample and a trainer that sleeps."""

from __future__ import annotations

import asyncio

import pytest
from rollout_case import read, rollout
from stub_engine import StubEngine, weights

from stretto.config import StalenessConfig
from stretto.observe.trace import Tracer
from stretto.rollout.router import Offer
from stretto.rollout.worker import RolloutWorker
from stretto.staleness import check_versions
from stretto.types import GroupRecord, PartitionPlan, StrettoError

GROUPS = 4
STEPS = 10


class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, row):
        return read(row)


async def train(bound, mode, *, replicas=2, train_s=0.05, steps=STEPS):
    """``loop.train`` in small: partition j starts once version j - s is published; each update sleeps. The records of
    all partitions, each checked just before it was trained.
    """
    async with rollout(lambda _: StubEngine(per_sample_s=0.01), replicas, m=1) as case:
        worker = RolloutWorker(
            router=case.router,
            scheduler=case.scheduler,
            mode=mode,
            train=Rows(),
            evaluation=lambda split: Rows(),
            fail=lambda k, why: asyncio.sleep(0),
            closing=(),
            tracer=Tracer(None, "test"),
        )
        runs = {}

        def start(j):
            version = max(0, j - bound)
            plan = PartitionPlan(
                partition=j, version=version, epochs=(0,) * GROUPS, rows=tuple(range(j * GROUPS, (j + 1) * GROUPS))
            )
            runs[j] = asyncio.create_task(worker.run(plan, weights(version)))

        worker.offer(0, weights(0))
        for j in range(min(bound + 1, steps)):
            start(j)
        for k in range(steps):
            await runs[k]
            records = [record for record, _ in case.arrived if record.partition == k]
            check_versions(records, StalenessConfig(mode=mode, max=bound))
            await asyncio.sleep(train_s)
            worker.offer(k + 1, weights(k + 1))
            if (j := k + 1 + bound) < steps:
                start(j)
        assert case.router.outstanding() == {i: (0, 0) for i in range(replicas)}
        return sorted((record for record, _ in case.arrived), key=lambda r: (r.partition, r.group))


@pytest.mark.case("E1")
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
def test_bounded_never_exceeds_the_bound_and_nothing_is_lost_or_starved(bound, replicas):
    records = asyncio.run(train(bound, "bounded", replicas=replicas, train_s=0.15))  # the rollout side waits for it
    assert [r.row_id for r in records] == [f"row-{row}" for row in range(STEPS * GROUPS)]
    lags = [r.partition - v for r in records for v in r.version_start]
    assert min(lags) >= 0 and max(lags) == bound
    assert all(r.version_start == r.version_end for r in records)


@pytest.mark.case("E1")
def test_bounded_takes_weights_at_group_boundaries_where_lockstep_keeps_to_the_partition():
    bounded, lockstep = (asyncio.run(train(2, mode, replicas=1)) for mode in ("bounded", "lockstep"))
    assert all(set(r.version_start) == {max(0, r.partition - 2)} for r in lockstep)

    def versions_within(records, k):
        return [r.version_start[0] for r in records if r.partition == k]

    for k in range(STEPS):
        assert versions_within(bounded, k) == sorted(versions_within(bounded, k))  # never an older one again
    assert any(len(set(versions_within(bounded, k))) > 1 for k in range(STEPS))
    fresher = sum(b.version_start[0] - a.version_start[0] for a, b in zip(lockstep, bounded, strict=True))
    assert fresher > 0
    assert all(b.version_start[0] >= a.version_start[0] for a, b in zip(lockstep, bounded, strict=True))


def test_an_evaluation_in_bounded_mode_is_of_exactly_its_version():
    async def body():
        async with rollout(lambda _: StubEngine(per_sample_s=0.005), 2, m=1) as case:
            case.router.offer(7, weights(7))
            plan = PartitionPlan(partition=8, version=7, epochs=(0,) * 6, rows=tuple(range(6)))
            running = asyncio.create_task(case.scheduler.run(plan, read, None))
            first = await case.scheduler.evaluate(6, read, "validation", Offer(5, weights(5)))
            await running
            assert first.version == 5 and first.total == 6
            assert {v for record, _ in case.arrived for v in record.version_start} == {7}

    asyncio.run(body())


def record(k, start, end=None, mode="bounded"):
    n = len(start)
    return GroupRecord(
        partition=k,
        group=3,
        row_id="row-9",
        prompt_tokens=4,
        patches=0,
        images=0,
        response_tokens=(1,) * n,
        rewards=(0.0,) * n,
        valid=(True,) * n,
        truncated=(False,) * n,
        version_start=tuple(start),
        version_end=tuple(start if end is None else end),
    )


@pytest.mark.case("E1")
@pytest.mark.parametrize("s", [0, 1, 2])
def test_the_bound_is_accepted_and_one_more_is_refused_with_partition_sample_and_versions(s):
    bounded = StalenessConfig(mode="bounded", max=s)
    check_versions([record(6, [6 - s, 6])], bounded)
    with pytest.raises(
        StrettoError, match=rf"partition 6, sample 7 .*row-9.* by version {5 - s} to {5 - s}, .*max = {s}"
    ):
        check_versions([record(6, [6, 5 - s])], bounded)
    check_versions([record(6, [6 - s], [6])], bounded)  # mixed, within the bound
    for start, end in (([6], [7]), ([6], [5])):  # from the future; ended before it began
        with pytest.raises(StrettoError, match="partition 6, sample 3"):
            check_versions([record(6, start, end)], bounded)


@pytest.mark.parametrize("s", [0, 1, 2])
def test_in_lockstep_every_stamp_is_exactly_k_minus_s(s):
    lockstep = StalenessConfig(max=s)
    for k in range(5):
        check_versions([record(k, [max(0, k - s)] * 2)], lockstep)
    for start, end in (([5 - s], [5 - s]), ([7 - s], [7 - s]), ([6 - s], [7 - s])):
        with pytest.raises(StrettoError, match=f"allows version {6 - s} only"):
            check_versions([record(6, start, end)], lockstep)
