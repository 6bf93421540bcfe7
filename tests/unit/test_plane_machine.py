"""Random histories of the ledger, against a model that keeps no queue, no cache and no running sum."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plane_case import make_record

from stretto.plane.ledger import Ledger
from stretto.plane.protocol import (
    AlreadyConsumed,
    Duplicate,
    FetchTimeout,
    LeaseExpired,
    Missing,
    Overfilled,
    PartitionFailed,
    Unconsumed,
    Underfilled,
)

CAPACITY, LEASE_S, GROUPS, SAMPLES = 100, 50.0, 4, 2
CONSUMERS = ("actor", "reference")
pick = st.integers(0, 10**6)


class Part:
    """What the model knows of an open partition."""

    def __init__(self):
        self.puts = {}  # group -> (ticket, bytes), let in or not
        self.ready = []  # groups in order of arrival
        self.column = {}  # sample -> value
        self.acked = {name: set() for name in CONSUMERS}
        self.failed = False


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger(capacity_bytes=CAPACITY, lease_s=LEASE_S, clock=lambda: self.now)
        self.parts = {}
        self.next = 0
        self.leases = []  # (lease, time it was given); active, unless in self.ended
        self.ended = set()
        self.claims = []  # (ticket, deadline)
        self.moved = 0

    def active(self, consumer=None, partition=None):
        return [
            lease
            for lease, given in self.leases
            if lease.id not in self.ended
            and self.now < given + LEASE_S
            and lease.partition in self.parts
            and consumer in (None, lease.consumer)
            and partition in (None, lease.partition)
        ]

    def free(self, k, consumer):
        held = {group for lease in self.active(consumer, k) for group in lease.groups}
        return [group for group in self.parts[k].ready if group not in held | self.parts[k].acked[consumer]]

    def choose(self, items, index):
        return items[index % len(items)]

    def some_partition(self, index):
        if not self.parts:
            self.open_partition()
        return self.choose(sorted(self.parts), index)

    def waiting(self):
        """Puts that were not let in, in the order in which they will be."""
        puts = [ticket for part in self.parts.values() for ticket, _ in part.puts.values() if not ticket.admitted]
        return sorted(puts, key=lambda ticket: (ticket.partition, ticket.sequence))

    def note_failures(self):
        """Takes over which partitions the ledger failed, and checks that they were stuck: a claim waits, and the first
        put in line has no room even when all that can be closed before it is closed.
        """
        failed = {k for k in self.parts if self.ledger._partitions[k].failure and not self.parts[k].failed}
        if not failed:
            return
        head = self.waiting()[0]
        waited_for = {claim.partition for claim, _ in self.claims}
        assert waited_for & failed
        assert head.partition in failed
        held = sum(self.bytes(part) for part in self.parts.values())
        freeable = sum(self.bytes(part) for k, part in self.parts.items() if k < head.partition)
        assert held - freeable + head.nbytes > CAPACITY
        for k in failed:
            part = self.parts[k]
            part.failed = True
            part.puts = {g: (t, n) for g, (t, n) in part.puts.items() if t.admitted}

    def bytes(self, part):
        groups = sum(nbytes for ticket, nbytes in part.puts.values() if ticket.admitted)
        return groups + sum(value.nbytes for value in part.column.values())

    @initialize()
    def two_partitions(self):
        self.open_partition()
        self.open_partition()

    @precondition(lambda self: len(self.parts) < 3)
    @rule()
    def open_partition(self):
        self.ledger.open(self.next, GROUPS, SAMPLES, chunks_per_mini=2)
        self.parts[self.next] = Part()
        self.next += 1

    @rule(which=pick, group=st.integers(0, GROUPS), nbytes=st.integers(5, 30))
    def begin_put(self, which, group, nbytes):
        k = self.some_partition(which)
        part = self.parts[k]
        record = make_record(k, group, response_tokens=(2, 3))
        expected = None
        if group == GROUPS:
            expected = Overfilled
        elif group in part.puts:
            expected = Duplicate
        elif part.failed:
            expected = (PartitionFailed, Duplicate)
        if expected:
            try:
                self.ledger.begin_put(record, nbytes, 2 * nbytes)
            except expected:
                return
            raise AssertionError(f"a put that had to be refused with {expected} was taken")
        part.puts[group] = (self.ledger.begin_put(record, nbytes, 2 * nbytes), nbytes)
        self.note_failures()

    @rule(which=pick)
    def commit_put(self, which):
        tickets = [
            ticket
            for part in self.parts.values()
            for group, (ticket, _) in part.puts.items()
            if ticket.admitted and group not in part.ready and not part.failed
        ]
        if tickets:
            ticket = self.choose(tickets, which)
            self.ledger.commit_put(ticket, ("payload", ticket.partition, ticket.group))
            self.parts[ticket.partition].ready.append(ticket.group)
            self.moved += ticket.nbytes

    @rule(which=pick, nbytes=st.integers(5, 12))
    def put_the_rest(self, which, nbytes):
        """Most histories would never fill a partition by chance."""
        k = self.some_partition(which)
        index = sorted(self.parts).index(k)
        for group in range(GROUPS):
            if group not in self.parts[k].puts:
                self.begin_put(index, group, nbytes)
        for i in range(GROUPS):
            self.commit_put(i)

    @rule(which=pick, consumer=st.sampled_from(CONSUMERS), count=st.integers(1, GROUPS))
    def claim_what_is_free(self, which, consumer, count):
        k = self.some_partition(which)
        free = self.free(k, consumer)[:count]
        if not free:
            self.put_the_rest(which, 6)
            free = self.free(k, consumer)[:count]
        if free:
            self.begin_claim(which, consumer, sorted(free), "index", 0.0)

    @rule()
    def ack_everything(self):
        for lease in self.active():
            if not self.parts[lease.partition].failed:
                self.acknowledge([lease])

    @rule(which=pick, consumer=st.sampled_from(CONSUMERS))
    def consume_the_rest(self, which, consumer):
        k = self.some_partition(which)
        free = self.free(k, consumer)
        if free and not self.parts[k].failed:
            lease = self.ledger.poll_claim(self.ledger.begin_claim(k, consumer, free, 0.0))
            self.leases.append((lease, self.now))
            self.ledger.ack(lease)
            self.ended.add(lease.id)
            self.parts[k].acked[consumer].update(free)

    @rule(which=pick)
    def cancel_put(self, which):
        tickets = [
            ticket
            for part in self.parts.values()
            for group, (ticket, _) in part.puts.items()
            if group not in part.ready
        ]
        if tickets:
            ticket = self.choose(tickets, which)
            self.ledger.cancel_put(ticket)
            del self.parts[ticket.partition].puts[ticket.group]

    @rule(
        which=pick,
        consumer=st.sampled_from(CONSUMERS),
        groups=st.one_of(st.integers(1, GROUPS), st.sets(st.integers(0, GROUPS), min_size=1).map(sorted)),
        order=st.sampled_from(("index", "arrival")),
        timeout_s=st.sampled_from((0.0, 10.0, 100.0)),
    )
    def begin_claim(self, which, consumer, groups, order, timeout_s):
        k = self.some_partition(which)
        acked = self.parts[k].acked[consumer]
        try:
            claim = self.ledger.begin_claim(k, consumer, groups, timeout_s, order=order)
        except Missing:
            assert GROUPS in groups
        except AlreadyConsumed:
            assert acked & set(groups)
        except Overfilled:
            assert isinstance(groups, int)
            assert groups > GROUPS - len(acked)
        else:
            self.claims.append((claim, self.now + timeout_s))
            self.note_failures()
            self.poll_claim(len(self.claims) - 1)

    @rule(which=pick)
    def poll_claim(self, which):
        if not self.claims:
            return
        claim, deadline = self.choose(self.claims, which)
        k, consumer, groups = claim.partition, claim.consumer, claim.groups
        part = self.parts[k]
        free = self.free(k, consumer)
        try:
            lease = self.ledger.poll_claim(claim)
        except PartitionFailed:
            assert part.failed
        except FetchTimeout:
            assert self.now >= deadline
            assert not self.meets(part, free, claim)
        except (AlreadyConsumed, Overfilled):
            wanted = set(range(GROUPS)) if isinstance(groups, int) else set(groups)
            assert part.acked[consumer] & wanted
        else:
            assert not part.failed
            if lease is None:
                assert self.now < deadline
                assert not self.meets(part, free, claim)
                return
            self.check_lease(lease, claim, free, part)
            self.leases.append((lease, self.now))
        self.claims = [(other, end) for other, end in self.claims if other is not claim]

    def meets(self, part, free, claim):
        """Whether a claim can be met now, told from scratch."""
        if not isinstance(claim.groups, int):
            return set(claim.groups) <= set(free)
        if claim.order == "arrival":
            return len(free) >= claim.groups
        held = {g for lease in self.active(claim.consumer, claim.partition) for g in lease.groups}
        lowest = [g for g in range(GROUPS) if g not in held | part.acked[claim.consumer]][: claim.groups]
        return len(lowest) == claim.groups and set(lowest) <= set(free)

    def check_lease(self, lease, claim, free, part):
        assert self.meets(part, free, claim)
        assert set(lease.groups) <= set(free), "given out while it was held, consumed or absent"
        assert [record.group for record in lease.records] == list(lease.groups)
        assert all(record.n == SAMPLES for record in lease.records), "groups are whole"
        assert lease.refs == {group: ("payload", claim.partition, group) for group in lease.groups}
        by_arrival = [group for group in part.ready if group in lease.groups]
        assert list(lease.groups) == (by_arrival if claim.order == "arrival" else sorted(by_arrival))
        if isinstance(claim.groups, int):
            assert len(lease.groups) == claim.groups
            if claim.order == "arrival":
                assert list(lease.groups) == free[: claim.groups]
        else:
            assert set(lease.groups) == set(claim.groups)

    @rule(which=st.lists(pick, min_size=1, max_size=2))
    def ack(self, which):
        open_leases = [lease for lease, _ in self.leases if lease.partition in self.parts]
        if not open_leases:
            return
        leases = list({lease.id: lease for lease in (self.choose(open_leases, i) for i in which)}.values())
        self.acknowledge(leases)

    def acknowledge(self, leases):
        active = {lease.id for lease in self.active()}
        try:
            self.ledger.ack(*leases)
        except LeaseExpired:
            assert any(lease.id not in active for lease in leases)
        except PartitionFailed:
            assert any(self.parts[lease.partition].failed for lease in leases)
        else:
            for lease in leases:
                assert lease.id in active, "acknowledged late"
                acked = self.parts[lease.partition].acked[lease.consumer]
                assert not acked & set(lease.groups), "consumed twice"
                acked.update(lease.groups)
                self.ended.add(lease.id)

    @rule(which=pick)
    def release(self, which):
        if not self.leases:
            return
        lease, _ = self.choose(self.leases, which)
        self.ledger.release(lease)
        self.ended.add(lease.id)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def consumer_dies(self, consumer):
        lost = self.active(consumer)
        assert self.ledger.consumer_died(consumer) == len(lost)
        self.ended.update(lease.id for lease in lost)

    @rule(seconds=st.sampled_from((0.0, 1.0, 9.0, 25.0, 60.0)))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(which=pick, sample=st.integers(0, GROUPS * SAMPLES - 1), overwrite=st.booleans())
    def write_back(self, which, sample, overwrite):
        k = self.some_partition(which)
        part = self.parts[k]
        value = np.full((2, 3)[sample % SAMPLES], self.now, np.float32)
        try:
            self.ledger.write_back(k, "old_logprobs", {sample: value}, overwrite=overwrite)
        except Missing:
            assert sample // SAMPLES not in part.ready
        except Duplicate:
            assert sample in part.column
            assert not overwrite
        else:
            assert sample // SAMPLES in part.ready
            part.column[sample] = value

    @rule(which=pick, discard=st.integers(0, 5).map(lambda i: i == 5))
    def close(self, which, discard):
        k = self.some_partition(which)
        part = self.parts[k]
        touched = {c: part.acked[c] for c in CONSUMERS if part.acked[c] or self.active(c, k)}
        whole = len(part.ready) == GROUPS
        consumed = bool(touched) and all(len(acked) == GROUPS for acked in touched.values())
        try:
            self.ledger.close(k, discard=discard)
        except PartitionFailed:
            assert part.failed
        except Underfilled:
            assert not whole
        except Unconsumed:
            assert whole
            assert not consumed
        else:
            assert discard or (whole and consumed)
            del self.parts[k]
            self.claims = [(claim, end) for claim, end in self.claims if claim.partition != k]

    @invariant()
    def bytes_add_up(self):
        stats = self.ledger.stats()
        assert stats.held_bytes == sum(self.bytes(part) for part in self.parts.values())
        columns = sum(value.nbytes for part in self.parts.values() for value in part.column.values())
        assert stats.held_bytes - columns <= CAPACITY
        assert stats.put.bytes == self.moved
        assert stats.put.logical_bytes == 2 * self.moved
        assert stats.waiting_bytes == sum(ticket.nbytes for ticket in self.waiting())

    @invariant()
    def room_goes_to_the_first_in_line(self):
        waiting = self.waiting()
        if waiting:
            held = sum(self.bytes(part) for part in self.parts.values())
            assert held + waiting[0].nbytes > CAPACITY, "a put waits though there is room for it"

    @invariant()
    def nothing_is_lost(self):
        stats = self.ledger.stats()
        assert stats.partitions == tuple(sorted(self.parts))
        assert stats.groups == sum(len(part.ready) for part in self.parts.values())
        assert stats.leases == len(self.active())
        for k, part in self.parts.items():
            for sample, value in part.column.items():
                found = self.ledger.read_back(k, "old_logprobs", [sample])[sample]
                np.testing.assert_array_equal(found, value)


LedgerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestRandomHistories = LedgerMachine.TestCase
