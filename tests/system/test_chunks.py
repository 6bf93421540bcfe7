"""Phase 1 chunk by chunk (switch S) against the real data plane, with a producer that is slow on purpose."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from plane_case import make_group
from test_plane_contract import RayHarness

from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.phase1 import ByChunk, Phase1Batch, WholePartition, _Claim, exposed_wait
from stretto.plane.protocol import Duplicate, FetchTimeout, LeaseExpired, Overfilled, PartitionFailed, Underfilled
from stretto.types import ForwardReport

pytestmark = pytest.mark.timeout(60)
GROUPS = 4


@pytest.fixture(scope="module")
def harness(ray_session):
    made = RayHarness()
    yield made
    made.stop()


class Actor:
    """Notes when it was handed each chunk; a forward takes ``seconds``."""

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds
        self.begun: list[float] = []
        self.groups: list[tuple[int, ...]] = []

    def forward(self, chunk: Any, lease: Any) -> Any:
        self.begun.append(time.time())
        self.groups.append(chunk.groups)
        return lambda: [ForwardReport(self.begun[chunk.chunk], self.begun[chunk.chunk] + self.seconds, 10)]


def phase1(harness: RayHarness, kind: Any, actor: Actor, timeout_s: float = 20.0, chunks: int = 2) -> Any:
    config = Config.model_validate(
        {
            "model": {"path": "org/model"},
            "rollout": {"prompts_per_partition": GROUPS, "n_samples_per_prompt": 3},
            "actor": {"chunks_per_mini": chunks},
            "plane": {"fetch_timeout_s": timeout_s},
            "staleness": {"max": 100, "mode": "bounded"},
            "run": {"determinism": "fast"},
        }
    )
    return kind(config, harness.plane, actor.forward, Tracer(None, "driver"), "cpu")


def slowly(harness: RayHarness, k: int, groups: Any, pause_s: float) -> list[float]:
    """Put groups one after the other; when each was handed over (it may be claimed before the put returns)."""
    times = []
    for group in groups:
        time.sleep(pause_s)
        times.append(time.time())
        harness.put(k, group)
    return times


def test_the_first_forward_starts_before_the_last_group_is_put(harness):
    """The producer makes the groups of chunk 1 only once the forward of chunk 0 has begun."""
    k, actor = harness.open(GROUPS), Actor()

    def produce() -> float:
        slowly(harness, k, (1, 0), 0.1)
        while not actor.begun:
            time.sleep(0.01)
        return slowly(harness, k, (3, 2), 0.1)[-1]

    with ThreadPoolExecutor(1) as pool:
        last_put = pool.submit(produce)
        batch: Phase1Batch = phase1(harness, ByChunk, actor)(k)
        assert actor.begun[0] < last_put.result() <= actor.begun[1]
    assert actor.groups == [(0, 1), (2, 3)]
    assert [record.group for record in batch.records] == [0, 1, 2, 3]
    assert len(batch.leases) == 2 and batch.fetched_bytes == 20
    assert batch.exposed_wait_s >= 0.2  # the pauses before chunk 0, in which the actor had nothing
    assert batch.overlap(last_put.result()) > 0
    harness.plane.ack(*batch.leases)
    harness.plane.close(k)


def test_overlap_and_exposed_wait_by_hand():
    """Chunk 0 had at 0.8, forwarded to 1.1; chunk 1 asked for at 0.8, had at 1.6; the last group was put at 1.5."""
    claims = [_Claim(None, 0.0, 0.8), _Claim(None, 0.8, 1.6)]
    reports = [[ForwardReport(0.8, 1.0, 5), ForwardReport(0.8, 1.1, 5)], [ForwardReport(1.6, 1.9, 5)]]
    assert exposed_wait(claims, reports) == pytest.approx(0.8 + 0.5)
    batch = Phase1Batch(
        minis=(), records=(), leases=(), exposed_wait_s=0, forwards=((0.8, 1.1), (1.6, 1.9)), fetched_bytes=0
    )
    assert batch.overlap(1.5) == pytest.approx(0.5)
    assert batch.overlap(1.0) == pytest.approx(0.2 / 0.6)
    assert (batch.overlap(0.5), batch.overlap(2.0)) == (0.0, pytest.approx(1.0))


def test_both_ways_schedule_the_same(harness):
    minis = []
    for kind in (WholePartition, ByChunk):
        k, actor = harness.open(GROUPS), Actor(0.0)
        slowly(harness, k, range(GROUPS), 0.0)
        batch = phase1(harness, kind, actor)(k)
        minis.append(batch.minis)
        harness.plane.ack(*batch.leases)
        harness.plane.close(k)
    assert [mini.chunks for mini in minis[0]] == [mini.chunks for mini in minis[1]]


def test_a_chunk_that_does_not_fill_in_time_names_partition_mini_and_chunk(harness):
    k, actor = harness.open(GROUPS), Actor()
    slowly(harness, k, (0, 1, 2), 0.0)
    with pytest.raises(FetchTimeout, match=rf"partition {k}, mini 0, chunk 1") as caught:
        phase1(harness, ByChunk, actor, timeout_s=0.5)(k)
    assert "3" in str(caught.value)  # the group that is missing
    assert actor.groups == [(0, 1)]
    harness.plane.close(k, discard=True)


def test_a_group_that_comes_twice_or_too_many_stops_with_its_name(harness):
    k = harness.open(GROUPS)
    slowly(harness, k, range(GROUPS), 0.0)
    with pytest.raises(Duplicate, match=rf"partition {k}, mini 0, chunk 1, group 2"):
        harness.put(k, 2)
    with pytest.raises(Overfilled, match=rf"partition {k}"):
        harness.put(k, GROUPS)
    harness.plane.close(k, discard=True)


def test_a_group_with_too_few_samples_stops(harness):
    k = harness.open(GROUPS)
    record, fields = make_group(k, 0, response_tokens=(3, 5))
    with pytest.raises(Underfilled, match=rf"partition {k}, mini 0, chunk 0, group 0"):
        harness.wait(harness.put_later(record, fields))
    harness.plane.close(k, discard=True)


def test_a_producer_that_fails_between_two_chunks_stops_with_its_cause(harness):
    k, actor = harness.open(GROUPS), Actor()
    slowly(harness, k, (0, 1), 0.0)
    harness.fail(k, "the grader is down")
    with pytest.raises(PartitionFailed, match="the grader is down"):
        phase1(harness, ByChunk, actor)(k)
    harness.plane.close(k, discard=True)


def test_a_chunk_whose_lease_ran_out_is_not_trained(ray_session):
    """It was given out again; the late acknowledgement stops before the update, and nothing is trained twice."""
    harness = RayHarness(lease_s=1.0)
    k, actor = harness.open(GROUPS), Actor()
    slowly(harness, k, range(GROUPS), 0.0)
    batch = phase1(harness, ByChunk, actor)(k)
    time.sleep(1.5)
    again = phase1(harness, ByChunk, actor)(k)
    with pytest.raises(LeaseExpired):
        harness.plane.ack(*batch.leases)
    harness.plane.ack(*again.leases)
    harness.stop()
