"""The contract of the data plane: every implementation passes this suite.

A new implementation adds a harness: a plane, and a way to put from a producer that runs elsewhere.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from plane_case import assert_same_group, make_group

from stretto.plane.payload import logical_bytes, pack_group, payload_bytes
from stretto.plane.protocol import (
    CapacityDeadlock,
    Duplicate,
    FetchTimeout,
    LeaseExpired,
    Missing,
    Overfilled,
    PartitionClosed,
    PartitionFailed,
    PlaneDied,
    ProducerDied,
    Unconsumed,
    Underfilled,
    UnknownField,
    WrongDtype,
)

pytestmark = pytest.mark.timeout(60)

SMALL = payload_bytes(pack_group(make_group(0, 0)[1]))


class RayHarness:
    """RayPlane with an async rollout actor that puts what it is sent."""

    def __init__(self, capacity_bytes: int = 64 * 2**20, lease_s: float = 600.0):
        import ray

        from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer

        class Rollout(PayloadProducer):  # local, so that Ray sends the class itself
            def __init__(self, plane):
                self.producer = RayProducer(plane, "rollout", self)

            async def put(self, record, fields):
                await self.producer.put(record, fields)

            async def fail(self, partition, cause):
                await self.producer.fail(partition, cause)

        self._ray = ray
        self._next = 0
        self.plane = RayPlane.start(capacity_bytes=capacity_bytes, lease_s=lease_s)
        self.rollout = ray.remote(num_cpus=0)(Rollout).remote(self.plane)
        self.plane.attach(self.rollout, "rollout")

    def open(self, groups: int = 4, chunks_per_mini: int = 2) -> int:
        """Opens the next partition, of groups with three samples."""
        self._next += 1
        self.plane.open(self._next, groups, 3, chunks_per_mini=chunks_per_mini)
        return self._next

    def put_later(self, record, fields):
        """Starts a put in the producer's process; ``wait`` ends it."""
        return self.rollout.put.remote(record, fields)

    def wait(self, put, timeout_s: float = 20):
        from ray.exceptions import RayTaskError

        try:
            self._ray.get(put, timeout=timeout_s)
        except RayTaskError as error:
            raise error.cause from None

    def done(self, put, timeout_s: float) -> bool:
        return bool(self._ray.wait([put], timeout=timeout_s)[0])

    def put(self, partition: int, group: int, **kwargs):
        """Puts a whole group and returns its fields."""
        record, fields = make_group(partition, group, **kwargs)
        self.wait(self.put_later(record, fields))
        return fields

    def fail(self, partition, cause):
        self._ray.get(self.rollout.fail.remote(partition, cause))

    def kill_producer(self):
        self._ray.kill(self.rollout)

    def kill_plane(self):
        self.plane.stop()

    def stop(self):
        self._ray.kill(self.rollout)
        self.plane.stop()


HARNESSES = {"ray": RayHarness}


@pytest.fixture(scope="module", params=sorted(HARNESSES))
def make(request, ray_session):
    return HARNESSES[request.param]


@pytest.fixture(scope="module")
def shared(make):
    """A roomy plane that the tests share: processes take seconds to start."""
    harness = make()
    yield harness
    harness.stop()


@pytest.fixture
def harness(shared):
    yield shared
    for partition in shared.plane.stats().partitions:
        shared.plane.close(partition, discard=True)


@pytest.fixture
def start(make):
    """Starts a plane of the test's own, with the given capacity and lease."""
    started = []

    def start(**kwargs):
        started.append(make(**kwargs))
        return started[-1]

    yield start
    for harness in started:
        harness.stop()


def test_a_partition_goes_through_whole_and_in_order(harness):
    k = harness.open()
    put = {group: harness.put(k, group) for group in (2, 0, 3, 1)}
    leases = []
    for chunk in range(2):
        lease = harness.plane.claim(k, "actor", range(2 * chunk, 2 * chunk + 2), timeout_s=10, chunk=chunk)
        assert lease.groups == (2 * chunk, 2 * chunk + 1)
        assert [record.row_id for record in lease.records] == [f"row-{group}" for group in lease.groups]
        for group, fields in harness.plane.fetch(lease).items():
            assert_same_group(fields, put[group])
        leases.append(lease)
    harness.plane.ack(*leases)
    harness.plane.close(k)
    stats = harness.plane.stats()
    assert (stats.held_bytes, stats.partitions, stats.leases) == (0, (), 0)


def test_arrival_order_gives_what_came_first(harness):
    k = harness.open()
    for group in (2, 0, 3):
        harness.put(k, group)
    assert harness.plane.claim(k, "actor", 2, timeout_s=10, order="arrival").groups == (2, 0)


def test_a_claim_waits_for_groups_that_come_later(harness):
    k = harness.open()
    harness.put(k, 0)
    timer = threading.Timer(0.4, lambda: harness.put(k, 1))
    timer.start()
    begun = time.monotonic()
    lease = harness.plane.claim(k, "actor", range(2), timeout_s=20)
    timer.join()
    assert lease.groups == (0, 1)
    assert 0.3 < time.monotonic() - begun < 10


def test_only_the_wanted_groups_of_a_lease_are_fetched(harness):
    k = harness.open()
    put = [harness.put(k, group) for group in range(2)]
    lease = harness.plane.claim(k, "actor", range(2), timeout_s=10)
    found = harness.plane.fetch(lease, [1])
    assert list(found) == [1]
    assert_same_group(found[1], put[1])
    with pytest.raises(Missing, match=rf"partition {k}, mini 0, chunk 0: groups 3 are not in the lease"):
        harness.plane.fetch(lease, [3])


def test_fetched_arrays_are_read_only_views(harness):
    k = harness.open()
    harness.put(k, 0, response_tokens=(20_000, 10, 5))
    fields = harness.plane.fetch(harness.plane.claim(k, "actor", [0], timeout_s=10))[0]
    for array in (fields["pixel_values"], *fields["response_ids"]):
        assert not array.flags.writeable
        assert not array.flags.owndata


def test_a_claim_that_is_not_met_in_time_names_its_place(harness):
    k = harness.open()
    harness.put(k, 2)
    begun = time.monotonic()
    with pytest.raises(
        FetchTimeout, match=rf"partition {k}, mini 0, chunk 1: consumer 'actor' waited .* have not arrived \(3\)"
    ):
        harness.plane.claim(k, "actor", range(2, 4), timeout_s=0.5, chunk=1)
    assert time.monotonic() - begun < 5


def test_what_does_not_fit_its_partition_is_refused_at_the_producer(harness):
    k = harness.open()
    harness.put(k, 3)
    with pytest.raises(Duplicate, match=rf"partition {k}, mini 0, chunk 1, group 3"):
        harness.put(k, 3)
    with pytest.raises(Overfilled, match=r"group 4"):
        harness.put(k, 4)
    with pytest.raises(Underfilled, match=r"group 2: response_tokens has 2 samples"):
        harness.put(k, 2, response_tokens=(1, 1))
    with pytest.raises(PartitionClosed, match=r"partition 99, group 0"):
        harness.put(99, 0)
    record, fields = make_group(k, 1)
    with pytest.raises(UnknownField, match=r"did you mean 'pixel_values'"):
        harness.wait(harness.put_later(record, fields | {"pixel_value": fields["pixel_values"]}))
    with pytest.raises(WrongDtype, match=rf"partition {k}, group 1, field 'prompt_ids': dtype int64"):
        harness.wait(harness.put_later(record, fields | {"prompt_ids": fields["prompt_ids"].astype(np.int64)}))
    assert harness.plane.stats().groups == 1


def test_consumers_are_tracked_by_name(harness):
    k = harness.open()
    for group in range(4):
        harness.put(k, group)
    harness.plane.ack(harness.plane.claim(k, "actor", 4, timeout_s=10))
    second = harness.plane.claim(k, "reference", 4, timeout_s=10)
    with pytest.raises(Unconsumed, match="'reference'"):
        harness.plane.close(k)
    harness.plane.release(second)
    harness.plane.close(k)


def test_closing_an_underfilled_partition_names_what_is_missing(harness):
    k = harness.open()
    for group in (0, 1, 3):
        harness.put(k, group)
    with pytest.raises(Underfilled, match=r"9 of 12 samples; absent are samples 6-8 \(mini 0, chunk 1: groups 2\)"):
        harness.plane.close(k)


def test_a_lease_that_timed_out_is_given_out_again_and_its_late_ack_refused(start):
    harness = start(lease_s=0.6)
    k = harness.open(groups=2)
    harness.put(k, 0)
    late = harness.plane.claim(k, "actor", [0], timeout_s=10)
    again = harness.plane.claim(k, "actor", [0], timeout_s=10)
    assert (again.groups, again.id == late.id) == (late.groups, False)
    with pytest.raises(LeaseExpired, match=rf"partition {k}, mini 0, chunk 0: .*timed out"):
        harness.plane.ack(late)


def test_the_leases_of_a_dead_consumer_are_given_out_again(harness):
    k = harness.open()
    harness.put(k, 0)
    dead = harness.plane.claim(k, "actor", [0], timeout_s=10)
    assert harness.plane.consumer_died("actor") == 1
    harness.plane.ack(harness.plane.claim(k, "actor", [0], timeout_s=10))
    with pytest.raises(LeaseExpired):
        harness.plane.ack(dead)


def test_written_back_fields_are_read_back(harness):
    k = harness.open()
    harness.put(k, 1)
    values = {3: np.array([-1, -2, -3], np.float32), 4: np.zeros(0, np.float32), 5: np.ones(5, np.float32)}
    harness.plane.write_back(k, "old_logprobs", values)
    harness.plane.write_back(k, "advantages", {5: np.float32(0.25)})
    found = harness.plane.read_back(k, "old_logprobs", [5, 3, 4])
    assert {sample: array.tolist() for sample, array in found.items()} == {3: [-1, -2, -3], 4: [], 5: [1] * 5}
    assert harness.plane.read_back(k, "advantages")[5] == np.float32(0.25)
    with pytest.raises(Missing, match="sample 0 is not there"):
        harness.plane.write_back(k, "advantages", {0: np.float32(0)})
    with pytest.raises(WrongDtype, match="sample 3: dtype float64"):
        harness.plane.write_back(k, "advantages", {3: np.float64(0)})
    with pytest.raises(Duplicate, match="sample 5"):
        harness.plane.write_back(k, "advantages", {5: np.float32(0)})


def test_a_full_plane_makes_puts_wait_and_never_deadlocks(start):
    harness = start(capacity_bytes=5 * SMALL // 2)
    first, second = harness.open(groups=2), harness.open(groups=2)
    for group in range(2):
        harness.put(first, group)
    waiting = harness.put_later(*make_group(second, 0))
    assert not harness.done(waiting, 0.7)
    assert harness.plane.stats().waiting_bytes == SMALL
    harness.plane.ack(harness.plane.claim(first, "actor", 2, timeout_s=10))
    assert not harness.done(waiting, 0.1)
    harness.plane.close(first)
    harness.wait(waiting)
    stats = harness.plane.stats()
    assert (stats.held_bytes, stats.waiting_puts) == (SMALL, 0)
    assert stats.backpressure_s > 0.7

    # Too small for a partition that somebody waits for: an error on both sides, with both byte counts.
    harness.plane.close(second, discard=True)
    third = harness.open(groups=4)
    harness.put(third, 3)
    harness.put(third, 0)
    waiting = [harness.put_later(*make_group(third, group)) for group in (1, 2)]
    while harness.plane.stats().waiting_puts < 2:
        time.sleep(0.05)
    begun = time.monotonic()
    with pytest.raises(CapacityDeadlock) as caught:
        harness.plane.claim(third, "actor", range(2, 4), timeout_s=10, mini=0, chunk=1)
    assert time.monotonic() - begun < 5
    for words in (
        f"partition {third}, mini 0, chunk 1",
        f"{2 * SMALL:,} bytes of {5 * SMALL // 2:,} bytes",
        f"puts of {2 * SMALL:,} bytes",
    ):
        assert words in str(caught.value)
    for put in waiting:
        with pytest.raises(CapacityDeadlock):
            harness.wait(put)


def test_a_producers_error_reaches_a_waiting_claim_at_once(harness):
    k = harness.open()
    harness.put(k, 0)
    timer = threading.Timer(0.4, lambda: harness.fail(k, "ValueError: row-1 has no image"))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(PartitionFailed, match=rf"partition {k}, mini 0, chunk 0: ValueError: row-1 has no image"):
        harness.plane.claim(k, "actor", range(2), timeout_s=30)
    assert time.monotonic() - begun < 5
    timer.join()


def test_the_producers_death_ends_waits_with_its_cause_and_loses_nothing_that_was_put(start):
    harness = start()
    whole, torn = harness.open(), harness.open()
    put = [harness.put(whole, group, values=1536, response_tokens=(20_000, 1, 1)) for group in range(4)]
    harness.put(torn, 0)
    timer = threading.Timer(0.4, harness.kill_producer)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(
        ProducerDied, match=rf"partition {torn}, mini 0, chunk 0: the producer 'rollout' died: .*killed"
    ):
        harness.plane.claim(torn, "actor", range(2), timeout_s=30)
    assert time.monotonic() - begun < 5
    timer.join()
    lease = harness.plane.claim(whole, "actor", range(4), timeout_s=10)
    for group, fields in harness.plane.fetch(lease).items():
        assert_same_group(fields, put[group])
    harness.plane.ack(lease)
    harness.plane.close(whole)


def test_the_planes_death_reaches_everybody_within_seconds(start):
    harness = start()
    k = harness.open()
    harness.put(k, 0, values=1536, grid=((1, 16, 16),))
    lease = harness.plane.claim(k, "actor", [0], timeout_s=30)
    timer = threading.Timer(0.4, harness.kill_plane)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(PlaneDied, match=r"ledger died: .*killed"):
        harness.plane.claim(k, "actor", range(2), timeout_s=30)
    with pytest.raises(PlaneDied, match="ledger died"):
        harness.put(k, 1)

    def fetch():
        while True:  # a copy that is still at hand may be read for a moment
            harness.plane.fetch(lease)
            time.sleep(0.1)

    with pytest.raises(PlaneDied, match=rf"partition {k}, mini 0, chunk 0: the payloads of groups 0 are lost"):
        fetch()
    assert time.monotonic() - begun < 10
    timer.join()


def test_samples_that_share_an_image_move_it_once(harness):
    k = harness.open()
    image = {"response_tokens": (4,) * 3, "grid": ((1, 4, 4),), "values": 1536}
    before = harness.plane.stats()
    harness.put(k, 0, **image)
    harness.plane.fetch(harness.plane.claim(k, "actor", [0], timeout_s=10))
    payload = pack_group(make_group(k, 0, **image)[1])
    assert payload_bytes(payload) < 16 * 1536 * 4 + 500 < logical_bytes(payload, 3) / 2.9
    stats = harness.plane.stats()
    for old, new in ((before.put, stats.put), (before.fetch, stats.fetch)):
        assert new == old.plus(payload_bytes(payload), logical_bytes(payload, 3))
    assert stats.held_bytes == payload_bytes(payload)


def test_a_discarded_partition_frees_its_memory(harness):
    k = harness.open()
    harness.put(k, 0)
    harness.plane.close(k, discard=True)
    assert harness.plane.stats().held_bytes == 0
    with pytest.raises(PartitionClosed):
        harness.plane.claim(k, "actor", [0], timeout_s=1)
