"""What only the Ray implementation promises: memory of the object store, signals, spans, processes that die early."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import plane_case
import pytest
import ray

from stretto.observe.trace import read_events
from stretto.plane.payload import pack_group, payload_bytes
from stretto.plane.protocol import ProducerDied
from stretto.plane.ray_ledger import INLINED_BYTES
from stretto.plane.ray_plane import PayloadProducer, RayPlane, RayProducer

pytestmark = pytest.mark.timeout(90)


def rollout_class():
    # By value, since the tests' modules are not on the workers' path.
    ray.cloudpickle.register_pickle_by_value(plane_case)

    class Rollout(PayloadProducer):
        def __init__(self, plane, events=None, broken=False):
            if broken:
                raise ValueError("no such model")
            from stretto.observe.trace import Tracer

            self.tracer = Tracer(events, "rollout")
            self.producer = RayProducer(plane, "rollout", self, self.tracer)

        async def put(self, partition, groups, **kwargs):
            import asyncio

            made = [plane_case.make_group(partition, group, **kwargs) for group in groups]
            await asyncio.gather(*(self.producer.put(record, fields) for record, fields in made))
            self.tracer.flush()

        async def stashed(self):
            return len(self.__dict__.get("_payloads", {}))

    return ray.remote(num_cpus=0)(Rollout)


@pytest.fixture(scope="module")
def shared(ray_session, tmp_path_factory):
    events = tmp_path_factory.mktemp("plane") / "events.jsonl"
    plane = RayPlane.start(capacity_bytes=40 * 2**20, lease_s=600)
    rollout = rollout_class().remote(plane, str(events))
    yield plane, rollout, events
    ray.kill(rollout)
    plane.stop()


@pytest.fixture
def plane(shared):
    yield shared[0]
    for partition in shared[0].stats().partitions:
        shared[0].close(partition, discard=True)


@pytest.fixture
def rollout(shared):
    return shared[1]


@pytest.fixture(scope="module")
def partitions():
    return itertools.count()


def store_bytes():
    from ray._private.internal_api import memory_summary

    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    (line,) = [line for line in summary.splitlines() if line.startswith("Plasma memory usage")]
    return int(line.split()[3]) * 2**20


def test_the_object_store_stays_flat_over_thirty_partitions(plane, rollout, partitions):
    shape = {"values": 1536, "response_tokens": (8,) * 4, "grid": ((1, 24, 32),)}
    nbytes = payload_bytes(pack_group(plane_case.make_group(0, 0, **shape)[1]))
    assert 30 * 4 * nbytes > 500 * 2**20  # all of it would not fit into the store of 300 MiB
    before = store_bytes()
    for k in itertools.islice(partitions, 30):
        plane.open(k, 4, 4)
        ray.get(rollout.put.remote(k, range(4), **shape))
        lease = plane.claim(k, "actor", 4, timeout_s=20)
        assert plane.fetch(lease)[3]["pixel_values"][0, 0] == 3.5
        plane.ack(lease)
        plane.close(k)
        del lease
    assert plane.stats().held_bytes == 0
    assert plane.stats().peak_bytes == 4 * nbytes
    # Ray frees what is no longer referenced once a second.
    limit = time.monotonic() + 10
    while store_bytes() > before and time.monotonic() < limit:
        time.sleep(0.2)
    assert store_bytes() <= before
    assert ray.get(rollout.stashed.remote()) == 0


def test_an_interrupt_ends_a_waiting_claim_at_once(plane, partitions):
    k = next(partitions)
    plane.open(k, 1, 3)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        plane.claim(k, "actor", 1, timeout_s=60)
    assert time.monotonic() - begun < 2
    timer.join()
    assert plane.stats().leases == 0


def test_hundreds_of_puts_at_once_all_arrive(plane, rollout, partitions):
    k = next(partitions)
    plane.open(k, 400, 1)
    ray.get(rollout.put.remote(k, range(400), response_tokens=(1,), prompt_tokens=2, values=4), timeout=60)
    assert plane.claim(k, "actor", 400, timeout_s=10).groups == tuple(range(400))


@pytest.mark.parametrize("values", [3_000, 3_190, 3_210, 4_000])
def test_payloads_sent_with_the_put_and_payloads_pulled_arrive_alike(plane, rollout, partitions, values):
    """8 patches of so many float32: 96 kB to 128 kB, on both sides of the limit."""
    k = next(partitions)
    _, fields = plane_case.make_group(k, 1, values=values)
    assert (payload_bytes(pack_group(fields)) <= INLINED_BYTES) == (values < 3_200)
    plane.open(k, 2, 3)
    ray.get(rollout.put.remote(k, range(2), values=values))
    lease = plane.claim(k, "actor", 2, timeout_s=20)
    plane_case.assert_same_group(plane.fetch(lease)[1], fields)
    assert not plane.fetch(lease)[1]["pixel_values"].flags.writeable  # a view of the store


def test_a_rank_in_another_process_fetches_with_the_drivers_lease(plane, rollout, partitions):
    k = next(partitions)
    plane.open(k, 2, 3)
    ray.get(rollout.put.remote(k, range(2)))

    @ray.remote(num_cpus=0)
    def rank(plane, lease):
        fields = plane.fetch(lease, [1])[1]
        plane.write_back(lease.partition, "old_logprobs", dict(zip([3, 4, 5], fields["rollout_logprobs"], strict=True)))
        return float(fields["pixel_values"].sum())

    lease = plane.claim(k, "actor", 2, timeout_s=10)
    assert ray.get(rank.remote(plane, lease)) == 1.5 * 8 * 12
    assert plane.read_back(k, "old_logprobs", [3])[3].tolist() == [-3000, -3001, -3002]


def test_puts_and_back_pressure_are_spans(plane, rollout, partitions, shared):
    first, second = next(partitions), next(partitions)
    for k in (first, second):
        plane.open(k, 1, 3)
    big = {"values": 1536, "grid": ((1, 64, 64),)}
    ray.get(rollout.put.remote(first, [0], **big))
    later = rollout.put.remote(second, [0], **big)
    assert not ray.wait([later], timeout=0.5)[0]
    plane.ack(plane.claim(first, "actor", 1, timeout_s=10))
    plane.close(first)
    ray.get(later)
    events = [e for e in read_events(shared[2]) if e.get("partition") in (first, second)]
    spans = [(e["name"], e["partition"], e["bytes"] // 2**20) for e in events]
    assert spans == [("plane.put", first, 24), ("plane.backpressure", second, 24), ("plane.put", second, 24)]
    assert events[1]["end_ns"] - events[1]["start_ns"] > 4e8


def test_a_producer_that_dies_while_it_starts_is_noticed_and_may_be_replaced(ray_session):
    plane = RayPlane.start(capacity_bytes=2**20, lease_s=600)
    plane.open(0, 1, 3)
    plane.attach(rollout_class().remote(plane, broken=True), "rollout")
    begun = time.monotonic()
    with pytest.raises(ProducerDied, match="ValueError: no such model"):
        plane.claim(0, "actor", 1, timeout_s=60)
    assert time.monotonic() - begun < 20
    with pytest.raises(ProducerDied, match="partition 1: nobody is left"):
        plane.open(1, 1, 3)
    successor = rollout_class().remote(plane)
    plane.attach(successor, "rollout")
    plane.open(1, 1, 3)
    ray.get(successor.put.remote(1, [0]))
    assert plane.claim(1, "actor", 1, timeout_s=10).groups == (0,)
    ray.kill(successor)
    plane.stop()
