import gc

import numpy as np
import pytest
from plane_case import make_record

from stretto.plane.ledger import Ledger
from stretto.plane.protocol import (
    AlreadyConsumed,
    CapacityDeadlock,
    Duplicate,
    FetchTimeout,
    LeaseExpired,
    Missing,
    Overfilled,
    PartitionClosed,
    PartitionFailed,
    PlaneError,
    ProducerDied,
    Unconsumed,
    Underfilled,
    UnknownField,
    WrongDtype,
    WrongShape,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Plane:
    """A ledger with a clock, where a put is one call and a claim is asked once."""

    def __init__(self, capacity=1000, lease_s=60.0):
        self.clock = Clock()
        self.ledger = Ledger(capacity_bytes=capacity, lease_s=lease_s, clock=self.clock)

    def begin(self, partition, group, nbytes=10, response_tokens=(3, 0, 5)):
        return self.ledger.begin_put(make_record(partition, group, response_tokens), nbytes, 2 * nbytes)

    def put(self, partition, group, nbytes=10):
        ticket = self.begin(partition, group, nbytes)
        assert self.ledger.poll_put(ticket)
        self.ledger.commit_put(ticket, f"payload-{partition}-{group}")

    def claim(self, partition, groups, consumer="actor", timeout_s=5.0, **kwargs):
        claim = self.ledger.begin_claim(partition, consumer, groups, timeout_s, **kwargs)
        return claim, self.ledger.poll_claim(claim)

    def lease(self, *args, **kwargs):
        _, lease = self.claim(*args, **kwargs)
        assert lease is not None
        return lease

    @property
    def held(self):
        return self.ledger.stats().held_bytes


@pytest.fixture
def plane():
    plane = Plane()
    plane.ledger.open(0, 4, 3, chunks_per_mini=2)
    return plane


def filled(plane, groups=(0, 1, 2, 3), partition=0):
    for group in groups:
        plane.put(partition, group)
    return plane


def test_a_claim_waits_for_all_of_its_groups_and_gives_them_in_group_order(plane):
    plane.put(0, 1)
    claim, lease = plane.claim(0, range(2), mini=0, chunk=0)
    assert lease is None
    plane.put(0, 0)
    lease = plane.ledger.poll_claim(claim)
    assert lease.groups == (0, 1)
    assert [record.group for record in lease.records] == [0, 1]
    assert lease.refs == {0: "payload-0-0", 1: "payload-0-1"}


def test_a_group_is_readable_only_after_its_payload_has_arrived(plane):
    ticket = plane.begin(0, 0)
    claim, lease = plane.claim(0, [0])
    assert lease is None
    plane.ledger.commit_put(ticket, "payload")
    assert plane.ledger.poll_claim(claim).refs == {0: "payload"}


def test_claims_by_number_take_the_lowest_groups_or_those_that_arrived_first(plane):
    filled(plane, (3, 1, 0, 2))
    assert plane.lease(0, 3, "by-index").groups == (0, 1, 2)
    assert plane.lease(0, 3, "by-arrival", order="arrival").groups == (3, 1, 0)
    assert plane.lease(0, 1, "by-arrival", order="arrival").groups == (2,)


def test_named_groups_can_be_given_in_order_of_arrival(plane):
    filled(plane, (3, 1, 0, 2))
    assert plane.lease(0, [0, 1, 3], order="arrival").groups == (3, 1, 0)


def test_an_arrival_claim_does_not_wait_for_the_slowest_group(plane):
    filled(plane, (3, 1))
    assert plane.lease(0, 2, order="arrival").groups == (3, 1)
    _, lease = plane.claim(0, 1, order="arrival")
    assert lease is None


def test_consumers_do_not_disturb_one_another(plane):
    filled(plane)
    plane.ledger.ack(plane.lease(0, range(4), "actor"))
    assert plane.lease(0, range(4), "reference").groups == (0, 1, 2, 3)


def test_two_claims_of_one_consumer_share_no_group(plane):
    filled(plane)
    assert plane.lease(0, 2).groups == (0, 1)
    assert plane.lease(0, 2).groups == (2, 3)


def test_consumed_groups_cannot_be_claimed_again(plane):
    filled(plane)
    plane.ledger.ack(plane.lease(0, range(2), chunk=0))
    with pytest.raises(AlreadyConsumed, match=r"partition 0, mini 0, chunk 0: consumer 'actor' .* groups 1 before"):
        plane.claim(0, [1, 2])
    with pytest.raises(Overfilled, match="claims 3 groups, 2 of 4 are left"):
        plane.claim(0, 3)


def test_a_claim_of_groups_that_do_not_exist_is_refused(plane):
    with pytest.raises(Missing, match=r"groups 4-5, the partition has groups 0-3"):
        plane.claim(0, range(2, 6))
    with pytest.raises(Overfilled):
        plane.claim(0, [])
    with pytest.raises(Overfilled):
        plane.claim(0, [1, 1])


def test_a_timed_out_claim_names_partition_mini_chunk_groups_and_bytes(plane):
    plane.put(0, 2)
    claim, _ = plane.claim(0, range(2, 4), mini=0, chunk=1, timeout_s=5)
    plane.clock.now += 4.9
    assert plane.ledger.poll_claim(claim) is None
    plane.clock.now += 0.1
    with pytest.raises(FetchTimeout) as caught:
        plane.ledger.poll_claim(claim)
    assert str(caught.value).startswith(
        "partition 0, mini 0, chunk 1: consumer 'actor' waited 5.0 s for groups 2-3, of which 1 have not arrived (3); "
        "the plane holds 10 bytes of 1,000 bytes, no put waits for room"
    )
    assert "plane.fetch_timeout_s" in str(caught.value)


def test_a_lease_that_times_out_is_given_out_again_and_its_late_ack_refused(plane):
    filled(plane)
    late = plane.lease(0, range(2))
    plane.clock.now += 60
    again = plane.lease(0, range(2))
    assert again.groups == late.groups
    assert again.id != late.id
    with pytest.raises(LeaseExpired, match=r"partition 0, mini 0, chunk 0: .* groups 0-1 timed out after 60 s"):
        plane.ledger.ack(late)
    plane.ledger.ack(again)


def test_the_late_ack_of_a_timed_out_lease_is_refused_though_nobody_took_it(plane):
    filled(plane)
    late = plane.lease(0, range(2))
    plane.clock.now += 60
    with pytest.raises(LeaseExpired, match="timed out"):
        plane.ledger.ack(late)


def test_a_claim_waits_for_a_lease_of_its_groups_to_end(plane):
    filled(plane)
    plane.lease(0, range(2))
    claim, lease = plane.claim(0, range(2), timeout_s=1000)
    assert lease is None
    plane.clock.now += 60
    assert plane.ledger.poll_claim(claim).groups == (0, 1)


def test_the_leases_of_a_dead_consumer_are_given_out_again(plane):
    filled(plane)
    dead = plane.lease(0, range(2))
    other = plane.lease(0, range(2), "reference")
    assert plane.ledger.consumer_died("actor") == 1
    plane.lease(0, range(2))
    plane.ledger.ack(other)
    with pytest.raises(LeaseExpired, match="its consumer died"):
        plane.ledger.ack(dead)


def test_a_released_lease_is_free_again_and_releasing_twice_does_nothing(plane):
    filled(plane)
    lease = plane.lease(0, range(2))
    plane.ledger.release(lease)
    plane.ledger.release(lease)
    with pytest.raises(LeaseExpired, match="was given back"):
        plane.ledger.ack(lease)
    plane.ledger.ack(plane.lease(0, range(2)))


def test_a_lease_is_acknowledged_once(plane):
    filled(plane)
    lease = plane.lease(0, range(2))
    plane.ledger.ack(lease)
    with pytest.raises(LeaseExpired, match="acknowledged before"):
        plane.ledger.ack(lease)


def test_acks_of_several_leases_happen_together_or_not_at_all(plane):
    filled(plane)
    late = plane.lease(0, range(2))
    plane.clock.now += 30
    good = plane.lease(0, range(2, 4))
    plane.clock.now += 30
    with pytest.raises(LeaseExpired):
        plane.ledger.ack(good, late)
    again = plane.lease(0, range(2))
    with pytest.raises(PlaneError, match="twice"):
        plane.ledger.ack(good, good)
    plane.ledger.ack(good, again)
    plane.ledger.close(0)


def test_duplicate_overfilled_and_misshapen_groups_are_refused_with_their_place(plane):
    plane.put(0, 3)
    with pytest.raises(Duplicate, match=r"partition 0, mini 0, chunk 1, group 3"):
        plane.begin(0, 3)
    with pytest.raises(Overfilled, match=r"partition 0, group 4: .* groups 0-3"):
        plane.begin(0, 4)
    with pytest.raises(Underfilled, match=r"partition 0, mini 0, chunk 0, group 1: response_tokens has 2 samples"):
        plane.begin(0, 1, response_tokens=(1, 1))
    with pytest.raises(Overfilled, match="has 4 samples"):
        plane.begin(0, 1, response_tokens=(1, 1, 1, 1))
    assert plane.held == 10


def test_a_group_whose_put_waits_is_a_duplicate_too():
    plane = Plane(capacity=15)
    plane.ledger.open(0, 4, 3)
    plane.put(0, 0)
    plane.begin(0, 1)
    with pytest.raises(Duplicate):
        plane.begin(0, 1)


def test_closing_an_underfilled_partition_names_the_missing_samples(plane):
    filled(plane, (0, 2))
    with pytest.raises(Underfilled) as caught:
        plane.ledger.close(0)
    assert (
        "partition 0: closed with 6 of 12 samples; absent are samples 3-5, 9-11 "
        "(mini 0, chunk 0: groups 1; mini 0, chunk 1: groups 3)"
    ) in str(caught.value)


def test_closing_an_unconsumed_partition_is_refused(plane):
    filled(plane)
    with pytest.raises(Unconsumed, match="nobody has claimed it"):
        plane.ledger.close(0)
    first, second = plane.lease(0, range(2)), plane.lease(0, range(2, 4))
    plane.ledger.ack(first)
    with pytest.raises(Unconsumed, match=r"'actor' has not acknowledged mini 0, chunk 1: groups 2-3"):
        plane.ledger.close(0)
    plane.ledger.ack(second)
    plane.ledger.close(0)
    assert plane.held == 0


def test_discarding_a_partition_needs_no_checks_and_frees_it(plane):
    plane.put(0, 0)
    plane.begin(0, 1)
    plane.ledger.close(0, discard=True)
    assert plane.held == 0


def test_partitions_open_once_and_in_order(plane):
    plane.ledger.open(5, 4, 3)
    with pytest.raises(Duplicate, match="partition 0"):
        plane.ledger.open(0, 4, 3)
    with pytest.raises(Duplicate, match="partition 3"):
        plane.ledger.open(3, 4, 3)


def test_groups_that_do_not_divide_into_chunks_are_refused():
    with pytest.raises(PlaneError, match="5 groups do not divide into 1 minis of 2 chunks"):
        Plane().ledger.open(0, 5, 3, chunks_per_mini=2)


def test_closed_and_unopened_partitions_are_told_apart(plane):
    plane.ledger.open(1, 4, 3)
    plane.ledger.close(0, discard=True)
    with pytest.raises(PartitionClosed, match="partition 0, group 0: the partition has been closed"):
        plane.begin(0, 0)
    with pytest.raises(PartitionClosed, match=r"partition 7, mini 0, chunk 0: the partition has not been opened"):
        plane.claim(7, [0])


def test_a_failed_partition_gives_everybody_its_first_cause(plane):
    claim, _ = plane.claim(0, range(2), mini=0, chunk=0)
    ticket = plane.begin(0, 0)
    plane.ledger.fail(0, "ValueError: bad image in row 7")
    plane.ledger.fail(0, "a later error")
    with pytest.raises(PartitionFailed, match="partition 0, mini 0, chunk 0: ValueError: bad image in row 7"):
        plane.ledger.poll_claim(claim)
    with pytest.raises(PartitionFailed, match="bad image"):
        plane.ledger.commit_put(ticket, "payload")
    with pytest.raises(PartitionFailed, match=r"group 1: .*bad image"):
        plane.begin(0, 1)
    with pytest.raises(PartitionFailed, match="bad image"):
        plane.ledger.close(0)


def test_a_failed_partition_cannot_be_acknowledged(plane):
    filled(plane)
    lease = plane.lease(0, range(4))
    plane.ledger.fail(0, "cause")
    with pytest.raises(PartitionFailed):
        plane.ledger.ack(lease)


def test_the_death_of_a_producer_fails_what_is_not_complete_and_nothing_else(plane):
    plane.ledger.producer_joined("rollout")
    filled(plane)
    plane.ledger.open(1, 4, 3)
    claim, _ = plane.claim(1, range(4))
    plane.ledger.producer_died("rollout", "killed")
    with pytest.raises(ProducerDied, match=r"partition 1, mini 0, chunk 0: the producer 'rollout' died: killed"):
        plane.ledger.poll_claim(claim)
    assert plane.lease(0, range(4)).groups == (0, 1, 2, 3)
    with pytest.raises(ProducerDied, match="partition 2: nobody is left"):
        plane.ledger.open(2, 4, 3)
    plane.ledger.producer_joined("rollout")
    plane.ledger.open(2, 4, 3)


def test_a_put_waits_while_the_plane_is_full_and_enters_when_a_partition_closes():
    plane = Plane(capacity=40)
    plane.ledger.open(0, 2, 3)
    plane.ledger.open(1, 2, 3)
    for group in range(2):
        plane.put(0, group, 15)
    ticket = plane.begin(1, 0, 15)
    assert not plane.ledger.poll_put(ticket)
    stats = plane.ledger.stats()
    assert (stats.held_bytes, stats.waiting_puts, stats.waiting_bytes) == (30, 1, 15)
    lease = plane.lease(0, range(2))
    plane.clock.now += 7
    plane.ledger.ack(lease)
    assert not plane.ledger.poll_put(ticket)
    plane.ledger.close(0)
    assert plane.ledger.poll_put(ticket)
    stats = plane.ledger.stats()
    assert (stats.held_bytes, stats.peak_bytes, stats.waiting_puts, stats.backpressure_s) == (15, 30, 0, 7)


def test_an_earlier_partition_is_let_in_before_a_later_one():
    plane = Plane(capacity=30)
    for partition in range(3):
        plane.ledger.open(partition, 2, 3)
    plane.put(0, 0, 15)
    plane.put(0, 1, 15)
    later, first, second = plane.begin(2, 0, 15), plane.begin(1, 0, 15), plane.begin(1, 1, 15)
    plane.ledger.ack(plane.lease(0, range(2)))
    plane.ledger.close(0)
    assert [plane.ledger.poll_put(t) for t in (later, first, second)] == [False, True, True]


def test_a_cancelled_put_frees_its_room_and_may_be_put_again():
    plane = Plane(capacity=20)
    plane.ledger.open(0, 2, 3)
    first, second = plane.begin(0, 0, 15), plane.begin(0, 1, 15)
    assert not plane.ledger.poll_put(second)
    plane.ledger.cancel_put(first)
    assert plane.ledger.poll_put(second)
    assert plane.held == 15
    again = plane.begin(0, 0, 5)
    plane.ledger.cancel_put(first)
    assert plane.ledger.poll_put(again)
    assert plane.held == 20


def test_a_group_larger_than_the_plane_is_an_error_at_once():
    plane = Plane(capacity=1000)
    plane.ledger.open(0, 1, 3)
    with pytest.raises(CapacityDeadlock, match=r"group 0: a group of 1,001 bytes .* plane of 1,000 bytes"):
        plane.begin(0, 0, 1001)


@pytest.mark.parametrize("claim_first", [True, False])
def test_a_full_plane_that_a_consumer_waits_for_is_an_error_with_both_byte_counts(claim_first):
    plane = Plane(capacity=25)
    plane.ledger.open(0, 4, 3, chunks_per_mini=2)
    plane.put(0, 0)
    plane.put(0, 1)
    if claim_first:
        claim = plane.ledger.begin_claim(0, "actor", range(2, 4), 600, chunk=1)
    ticket = plane.begin(0, 2)
    if not claim_first:
        assert not plane.ledger.poll_put(ticket)
        claim = plane.ledger.begin_claim(0, "actor", range(2, 4), 600, chunk=1)
    with pytest.raises(CapacityDeadlock) as caught:
        plane.ledger.poll_claim(claim)
    assert "partition 0, mini 0, chunk 1" in str(caught.value)
    assert "the plane holds 20 bytes of 25 bytes, 1 puts of 10 bytes wait for room" in str(caught.value)
    assert "plane.capacity_mib" in str(caught.value)
    with pytest.raises(CapacityDeadlock):
        plane.ledger.poll_put(ticket)


def test_discarding_a_partition_ends_its_waiting_puts_and_lets_others_in():
    plane = Plane(capacity=30)
    for partition in range(2):
        plane.ledger.open(partition, 2, 3)
    plane.put(0, 0, 20)
    dropped, later = plane.begin(0, 1, 20), plane.begin(1, 0, 20)
    plane.ledger.close(0, discard=True)
    with pytest.raises(PartitionClosed, match="partition 0, group 1"):
        plane.ledger.poll_put(dropped)
    assert plane.ledger.poll_put(later)
    assert plane.held == 20


def test_a_claim_whose_groups_are_on_their_way_is_no_deadlock():
    plane = Plane(capacity=25)
    plane.ledger.open(0, 4, 3, chunks_per_mini=2)
    moving = [plane.begin(0, group) for group in range(2)]
    plane.begin(0, 2)
    claim, lease = plane.claim(0, range(2))
    assert lease is None
    for ticket in moving:
        plane.ledger.commit_put(ticket, "payload")
    assert plane.ledger.poll_claim(claim).groups == (0, 1)


def test_a_number_of_groups_waits_for_groups_on_another_lease(plane):
    filled(plane)
    first = plane.lease(0, 3)
    claim, lease = plane.claim(0, 2)
    assert lease is None
    plane.ledger.release(first)
    assert plane.ledger.poll_claim(claim).groups == (0, 1)


def test_an_earlier_partition_that_is_still_being_filled_is_no_deadlock():
    plane = Plane(capacity=30)
    for partition in range(2):
        plane.ledger.open(partition, 2, 3)
    plane.put(0, 0, 10)
    plane.put(1, 0, 10)
    first, _ = plane.claim(0, range(2), "reference", timeout_s=100)
    blocked = plane.begin(1, 1, 15)
    second, _ = plane.claim(1, range(2))
    plane.put(0, 1, 5)
    plane.ledger.ack(plane.ledger.poll_claim(first))
    plane.ledger.close(0)
    plane.ledger.commit_put(blocked, "payload")
    assert plane.ledger.poll_claim(second).groups == (0, 1)


def test_an_earlier_partition_that_cannot_be_filled_is_a_deadlock_for_later_ones_too():
    plane = Plane(capacity=30)
    for partition in range(2):
        plane.ledger.open(partition, 2, 3)
    plane.put(0, 0, 20)
    blocked = plane.begin(0, 1, 20)
    with pytest.raises(CapacityDeadlock, match=r"partition 1, mini 0, chunk 0: .* the put of partition 0, .* group 1"):
        plane.claim(1, range(2))
    with pytest.raises(CapacityDeadlock):
        plane.ledger.poll_put(blocked)


def test_an_earlier_partition_that_will_be_closed_is_no_deadlock():
    plane = Plane(capacity=30)
    plane.ledger.open(0, 1, 3)
    plane.ledger.open(1, 2, 3)
    plane.put(0, 0, 20)
    plane.put(1, 0, 10)
    training = plane.lease(0, [0])
    ticket = plane.begin(1, 1, 10)
    claim, lease = plane.claim(1, range(2))
    assert lease is None
    plane.ledger.ack(training)
    plane.ledger.close(0)
    assert plane.ledger.poll_put(ticket)
    plane.ledger.commit_put(ticket, "payload")
    assert plane.ledger.poll_claim(claim).groups == (0, 1)


def test_a_later_partition_that_waits_for_room_is_back_pressure_and_no_deadlock():
    plane = Plane(capacity=30)
    plane.ledger.open(0, 2, 3)
    plane.ledger.open(1, 2, 3)
    plane.put(0, 0)
    plane.put(1, 0)
    blocked = plane.begin(1, 1, 20)
    claim, _ = plane.claim(0, range(2))
    assert not plane.ledger.poll_put(blocked)
    plane.put(0, 1)
    assert plane.ledger.poll_claim(claim).groups == (0, 1)


def test_later_partitions_that_fill_the_plane_are_a_deadlock_once_the_earlier_one_is_stuck():
    plane = Plane(capacity=30)
    plane.ledger.open(0, 2, 3)
    plane.ledger.open(1, 2, 3)
    plane.put(1, 0)
    plane.put(1, 1)
    plane.put(0, 0)
    claim, _ = plane.claim(0, range(2))
    plane.begin(0, 1)
    with pytest.raises(CapacityDeadlock):
        plane.ledger.poll_claim(claim)


def test_write_back_is_read_back_counted_and_freed(plane):
    filled(plane)
    values = {0: np.array([1, 2, 3], np.float32), 2: np.zeros(5, np.float32), 1: np.zeros(0, np.float32)}
    plane.ledger.write_back(0, "old_logprobs", values)
    plane.ledger.write_back(0, "advantages", {0: np.float32(0.5)})
    values[0][:] = 9
    found = plane.ledger.read_back(0, "old_logprobs", [0, 2])
    assert found[0].tolist() == [1, 2, 3]
    assert plane.ledger.read_back(0, "advantages") == {0: np.float32(0.5)}
    assert plane.held == 40 + 8 * 4 + 4
    plane.ledger.close(0, discard=True)
    assert plane.held == 0


def test_write_backs_are_refused_whole(plane):
    filled(plane, (0,))
    good = np.zeros(3, np.float32)
    for kind, field, values, words in (
        (UnknownField, "old_logprob", {0: good}, "did you mean 'old_logprobs'"),
        (Missing, "old_logprobs", {0: good, 3: good}, "mini 0, chunk 0, group 1: sample 3 is not there"),
        (Missing, "old_logprobs", {12: good}, "samples are 0-11"),
        (WrongDtype, "old_logprobs", {0: good.astype(np.float64)}, "sample 0: dtype float64"),
        (WrongDtype, "advantages", {0: 0.5}, "sample 0: is a float"),
        (WrongShape, "old_logprobs", {0: np.zeros(4, np.float32)}, "4 entries, the sample has 3 response tokens"),
        (WrongShape, "advantages", {0: good}, "shape [3], declared is []"),
    ):
        with pytest.raises(kind) as caught:
            plane.ledger.write_back(0, field, values)
        assert words in str(caught.value)
    assert plane.held == 10
    plane.ledger.write_back(0, "old_logprobs", {0: good})
    with pytest.raises(Duplicate, match="sample 0: was written back before"):
        plane.ledger.write_back(0, "old_logprobs", {0: good})
    plane.ledger.write_back(0, "old_logprobs", {0: good + 1}, overwrite=True)
    assert plane.ledger.read_back(0, "old_logprobs")[0].tolist() == [1, 1, 1]
    assert plane.held == 10 + 12
    with pytest.raises(Missing, match="'old_logprobs' has not been written for samples 1"):
        plane.ledger.read_back(0, "old_logprobs", [0, 1])


def test_bytes_moved_are_counted_at_each_boundary(plane):
    filled(plane, (0, 1))
    plane.ledger.count_fetch(10, 20)
    plane.ledger.write_back(0, "advantages", {0: np.float32(1), 1: np.float32(2)})
    stats = plane.ledger.stats()
    assert (stats.put.calls, stats.put.bytes, stats.put.logical_bytes) == (2, 20, 40)
    assert (stats.fetch.calls, stats.fetch.bytes, stats.fetch.logical_bytes) == (1, 10, 20)
    assert (stats.write_back.calls, stats.write_back.bytes) == (1, 8)


def test_memory_is_flat_over_many_partitions():
    plane = Plane(capacity=100)
    sizes = []
    for partition in range(200):
        plane.ledger.open(partition, 4, 3, chunks_per_mini=2)
        for group in range(4):
            plane.put(partition, group, 25)
        for consumer in ("actor", "reference"):
            plane.clock.now += 100
            plane.lease(partition, 2, consumer)
            plane.clock.now += 100
            plane.ledger.ack(*(plane.lease(partition, 2, consumer) for _ in range(2)))
        plane.ledger.write_back(partition, "advantages", {0: np.float32(1)})
        plane.ledger.close(partition)
        assert plane.held == 0
        if partition % 100 == 99:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 200  # one object left behind by each group would be 400
    assert plane.ledger.stats().peak_bytes == 104


@pytest.mark.timeout(20)
def test_waiting_for_many_groups_costs_a_step_for_each_and_not_a_scan():
    plane = Plane(capacity=10**9)
    plane.ledger.open(0, 20_000, 1)
    claim, _ = plane.claim(0, range(20_000))
    polls = 0
    for group in range(20_000):
        ticket = plane.begin(0, group, response_tokens=(1,))
        plane.ledger.commit_put(ticket, None)
        lease = plane.ledger.poll_claim(claim) if group < 19_999 else None
        polls += lease is None
    assert polls == 20_000
    assert len(plane.ledger.poll_claim(claim).groups) == 20_000
