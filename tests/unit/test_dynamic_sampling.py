"""Dynamic sampling: which prompts a partition takes, which groups it keeps under which numbers, how it ends short."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_case import SlowFor, hf, published, read, rollout
from stub_engine import StubEngine, response, weights

from stretto import build
from stretto.config import Config, RewardConfig
from stretto.data.cursor import rows_of_partition
from stretto.observe.names import METRICS
from stretto.observe.trace import Tracer
from stretto.phase1 import Phase1Batch
from stretto.records import Step
from stretto.rollout.refill import Refill, TooFewGroups
from stretto.rollout.reward import Rewarder
from stretto.rollout.router import Offer
from stretto.rollout.worker import RolloutWorker
from stretto.types import ChunkSchedule, GroupRecord, Mini, PartitionPlan, Score, StrettoError

ROWS = 10
SAYS_SOMETHING = {1, 2, 5, 6, 9}
"""Rows whose two samples get different rewards, of an epoch of 10 that is not shuffled.

Positions 0 … 25 by hand, partitions of 4 groups:

    partition 0   rounds 0 1 2 3 | 4 5 | 6                       kept 1 2 5 6    ends at  7
    partition 1   rounds 7 8 9 0 | 1 2 3 | 4 | 5                 kept 9 1 2 5    ends at 16
    partition 2   rounds 6 7 8 9 | 0 1 | 2                       kept 6 9 1 2    ends at 23
"""
KEPT = {0: [1, 2, 5, 6], 1: [9, 1, 2, 5], 2: [6, 9, 1, 2]}
CANDIDATES = {0: [1, 2, 5, 6], 1: [2, 4, 5, 8], 2: [0, 3, 5, 6]}
"""Numbers of the kept ones among the candidates of their partition."""
REPORTS = {
    0: {"rollout_dropped_groups": 3, "rollout_refill_rounds": 2, "next_position": 7, "samples": 14},
    1: {"rollout_dropped_groups": 5, "rollout_refill_rounds": 3, "next_position": 16, "samples": 18},
    2: {"rollout_dropped_groups": 3, "rollout_refill_rounds": 2, "next_position": 23, "samples": 14},
}


class ByRow(Rewarder):
    """Two samples of a row in ``SAYS_SOMETHING`` get 0 and 1, of another one 0.5 each; ``failed`` rows fail."""

    def __init__(self, failed=(), limit=0.5, slow=()):
        super().__init__(RewardConfig(max_failed_fraction=limit))
        self.failed, self.slow = failed, slow

    async def score(self, prompt, responses):
        row = int(prompt.row_id.removeprefix("row-"))
        await asyncio.sleep(0.1 if row in self.slow else 0)
        if row in self.failed:
            return [Score(value=0.0, valid=False, error="grader is down", failure="raised") for _ in responses]
        return [Score(value=float(i) if row in SAYS_SOMETHING else 0.5) for i in range(len(responses))]


def refill(groups=4, rounds=3, truncated="train"):
    return Refill(groups=groups, rounds=rounds, truncated=truncated, row_at=lambda position: position % ROWS)


def by_candidate(request, sample, version):
    """Its first token tells which candidate the noise was drawn for."""
    return response([5 + request.group, sample], version)


def stub(_replica=0, **options):
    return StubEngine(answer=by_candidate, **options)


def planned(partition, start=None):
    return PartitionPlan(partition=partition, version=0, start=start)


def taken(case):
    """Partition -> (row, candidate) of its groups in group order, as they were put."""
    found = {}
    for record, fields in sorted(case.arrived, key=lambda group: (group[0].partition, group[0].group)):
        groups = found.setdefault(record.partition, [])
        assert record.group == len(groups)
        candidate = {int(ids[0]) - 5 for ids in fields["response_ids"]}
        assert len(candidate) == 1
        groups.append((int(record.row_id.removeprefix("row-")), candidate.pop()))
    return found


def run(plans, make=stub, rewarder=None, refill=refill, **options):
    """All plans queued at once. Reports, and what was put."""

    async def body():
        async with rollout(make, refill=refill(), **options) as case:
            case.scheduler.rewarder = rewarder or ByRow()
            offer = Offer(0, weights(0))
            reports = await asyncio.gather(*(case.scheduler.run(plan, read, offer) for plan in plans))
            return reports, case

    return asyncio.run(body())


def expected(partitions):
    return {k: list(zip(KEPT[k], CANDIDATES[k], strict=True)) for k in partitions}


def counted(report):
    return {name: report[name] for name in REPORTS[0]}


# Which candidates are kept -------------------------------------------------------------------------------------------


def test_groups_without_signal_are_replaced_by_the_next_prompts_across_epochs():
    reports, case = run([planned(0, start=0), planned(1), planned(2)])
    assert taken(case) == expected((0, 1, 2))
    assert [counted(report) for report in reports] == [REPORTS[k] for k in (0, 1, 2)]


@pytest.mark.parametrize("slow", [(1, 4), (2, 7, 0), (0, 3, 5)])
def test_numbers_are_in_prompt_order_whatever_finishes_first(slow):
    """Rewards, processors and three engines take their time for some rows."""

    def make(replica):
        return stub(per_sample_s=(0.03, 0.001, 0.01)[replica])

    options = {"make": make, "replicas": 3, "m": 1, "processor": SlowFor, "rewarder": ByRow(slow=slow)}
    reports, case = run([planned(0, start=0), planned(1)], **options)
    assert taken(case) == expected((0, 1))
    assert [counted(report) for report in reports] == [REPORTS[0], REPORTS[1]]


def test_decode_batches_are_fixed_runs_of_the_candidates_of_a_round():
    class Noting(StubEngine):
        async def generate(self, requests, sampling):
            batches.append([request.group for request in requests])
            return await super().generate(requests, sampling)

    batches = []
    run([planned(0, start=0), planned(1)], make=lambda _: Noting(answer=by_candidate), m=3)
    assert batches == [[0, 1, 2], [3], [4, 5], [6], [0, 1, 2], [3], [4, 5, 6], [7], [8]]


def test_a_partition_begins_where_the_one_before_ended_and_an_evaluation_in_between_changes_nothing():
    """Staleness 1: both partitions are queued before the first is generated, each by a version of its own."""
    engines = []

    def make(replica):
        engines.append(stub(per_sample_s=0.01))
        return engines[-1]

    async def body():
        async with rollout(make, refill=refill(), m=2) as case:
            case.scheduler.rewarder = ByRow()
            offers = [Offer(version, weights(version)) for version in (0, 1)]
            first, evaluation, second = await asyncio.gather(
                case.scheduler.run(planned(0, start=0), read, offers[0]),
                case.scheduler.evaluate(6, read, "validation", offers[1]),
                case.scheduler.run(planned(1), read, offers[1]),
            )
            assert taken(case) == expected((0, 1))
            assert counted(first) == REPORTS[0] and counted(second) == REPORTS[1]
            assert {v for record, _ in case.arrived for v in record.version_start if record.partition == 1} == {1}
            # Greedy and of one sample each: every row counts, and none is replaced.
            assert evaluation.total == 6 and evaluation.version == 1 and len(evaluation.examples) == 6
            assert evaluation.reward_mean == (0.5 + 0 + 0 + 0.5 + 0.5 + 0) / 6
            return [version for kind, *_, version in engines[0].calls if kind == "generate"]

    versions = asyncio.run(body())
    assert versions == sorted(versions)


def test_a_run_that_resumes_at_a_saved_position_takes_what_a_straight_one_does():
    _, straight = run([planned(0, start=0), planned(1), planned(2)])
    for first in (1, 2):
        start = REPORTS[first - 1]["next_position"]
        reports, resumed = run([planned(k, start=start if k == first else None) for k in range(first, 3)])
        assert resumed.bits() == {at: bits for at, bits in straight.bits().items() if at[0] >= first}
        assert taken(resumed) == expected(range(first, 3))
        assert reports[-1]["next_position"] == 23


def test_what_is_kept_has_the_bits_of_a_plan_of_all_candidates():
    """With one group a decode batch, so that the batches are the same; the real engine."""

    async def body(plan, refilled):
        async with rollout(hf, m=1, refill=refilled) as case:
            case.scheduler.rewarder = ByRow()
            await case.scheduler.run(plan, read, published(0))
            return case.bits()

    everything = PartitionPlan(partition=1, version=0, epochs=(0,) * 9, rows=(7, 8, 9, 0, 1, 2, 3, 4, 5))
    whole = asyncio.run(body(everything, None))
    kept = asyncio.run(body(planned(1, start=7), refill()))
    assert kept == {(1, group): whole[1, candidate] for group, candidate in enumerate(CANDIDATES[1])}


def record(candidate, rewards=(0.0, 1.0), valid=(True, True), truncated=(False, False)):
    n = len(rewards)
    return GroupRecord(
        partition=0, group=candidate, row_id=f"{candidate}", prompt_tokens=1, patches=0, images=0,
        response_tokens=(1,) * n, rewards=rewards, valid=valid, truncated=truncated,
        version_start=(0,) * n, version_end=(0,) * n,
    )  # fmt: skip


@given(signals=st.lists(st.booleans(), min_size=1, max_size=40), groups=st.integers(1, 6), data=st.data())
def test_a_partition_is_the_next_prompts_that_say_something_in_whatever_order_they_settle(signals, groups, data):
    """The next ``groups`` of them, and the partition after it begins right behind the last."""
    endless = refill(groups=groups, rounds=10**6)
    signals = [*signals, True]  # at the least one an epoch
    said = [position for position in range(50 * len(signals)) if signals[position % len(signals)]]

    async def partition():
        selection, kept = endless.select(planned(0)), []
        while candidates := await selection.next_round():
            for candidate in data.draw(st.permutations(candidates)):
                position = selection.row(candidate)
                rewards = (0.0, 1.0) if signals[position % len(signals)] else (1.0, 1.0)
                kept += [(r.group, position_of[r.row_id]) for r, _ in settle(selection, candidate, position, rewards)]
        return kept, selection.report()

    position_of = {}

    def settle(selection, candidate, position, rewards):
        name = f"at {position}"
        position_of[name] = position
        return selection.settle(replace(record(candidate, rewards), row_id=name), {})

    endless.row_at = lambda position: position
    for number in range(2):
        kept, report = asyncio.run(partition())
        wanted = said[number * groups : (number + 1) * groups]
        assert kept == list(enumerate(wanted))
        assert report["next_position"] == endless.position == wanted[-1] + 1


@pytest.mark.parametrize(
    ("rewards", "valid", "cut", "policy", "kept"),
    [
        ((0.1, 0.1, 0.1), (True,) * 3, (False,) * 3, "train", False),
        ((0.0, -0.0, 0.0), (True,) * 3, (False,) * 3, "train", False),
        ((0.1, 0.1, 0.1 + 2**-56), (True,) * 3, (False,) * 3, "train", True),  # other bits: the sum is another float
        ((1.0, 0.0, 0.0), (False, True, True), (False,) * 3, "train", False),  # the failed one does not count
        ((1.0, 0.0, 0.0), (True, False, False), (False,) * 3, "train", False),  # one alone has nothing to differ from
        ((1.0, 0.0, 0.0), (False,) * 3, (False,) * 3, "train", False),
        ((1.0, 0.0, 0.0), (True,) * 3, (True, False, False), "train", True),
        ((1.0, 0.0, 0.0), (True,) * 3, (True, False, False), "mask", True),  # its reward counts, its tokens do not
        ((1.0, 0.0, 0.0), (True,) * 3, (True, False, False), "drop", False),
        ((1.0, 0.0, 0.0), (True,) * 3, (False, True, False), "drop", True),
    ],
)  # fmt: skip
def test_a_group_is_kept_where_rewards_that_count_differ(rewards, valid, cut, policy, kept):
    async def body():
        selection = refill(groups=1, truncated=policy).select(planned(0))
        await selection.next_round()
        return selection.settle(record(0, rewards, valid, cut), {})

    assert bool(asyncio.run(body())) == kept


# How it ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("C4")
def test_prompts_without_any_signal_end_the_run_with_a_clear_message():
    """Every reward is the same: 4 prompts, 2 refills of 4, and no more."""

    class Always(ByRow):
        async def score(self, prompt, responses):
            return [Score(value=0.9) for _ in responses]

    told = []

    async def fail(partition, cause):
        told.append((partition, cause))

    async def body():
        async with rollout(stub, m=2, refill=refill(rounds=2)) as case:
            case.scheduler.rewarder = Always()
            worker = RolloutWorker(
                router=case.router, scheduler=case.scheduler, mode="lockstep", train=Reads(), evaluation=None,
                fail=fail, closing=(), tracer=Tracer(None, "test"),
            )  # fmt: skip
            with pytest.raises(StrettoError) as error:
                await worker.run(planned(3, start=0), weights(0))
            assert case.arrived == [] and case.router.outstanding() == {0: (0, 0)}
            return str(error.value)

    class Reads:
        def __getitem__(self, row):
            rows.append(row)
            return read(row)

    rows = []
    message = asyncio.run(body())
    assert rows == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert message.startswith(
        "partition 3: rewards differ in 0 of the 4 prompt groups that it takes, after 12 prompts in 3 rounds "
        "(rollout.refill_rounds = 2); in 12 groups all rewards are equal, in 0 fewer than two count"
    )
    assert message.endswith("or raise rollout.refill_rounds, which a resumed run may")
    assert told == [(3, message)]  # so that whoever waits for the partition gets the same cause


def test_a_partition_that_is_short_by_one_ends_the_run_and_as_many_rounds_as_it_needs_do_not():
    """Partition 1 needs three refills."""
    reports, _ = run([planned(1, start=7)], refill=lambda: refill(rounds=3))
    assert reports[0]["rollout_refill_rounds"] == 3
    with pytest.raises(TooFewGroups, match=r"differ in 3 of the 4 .* after 8 prompts in 3 rounds .* in 5 groups"):
        run([planned(1, start=7)], refill=lambda: refill(rounds=2))


@pytest.mark.parametrize(("limit", "ends"), [(0.2, True), (0.3, False), (0.4, False)])
def test_failed_samples_are_counted_over_all_candidates(limit, ends):
    """Rows 0 and 3 fail: 4 of the 14 samples of partition 0 (0.286), 4 of 8 in its first round, none that is kept."""
    rewarder = ByRow(failed=(0, 3), limit=limit)
    if ends:
        with pytest.raises(StrettoError, match=r"partition 0: 4 of 14 samples failed .*; the first: grader is down"):
            run([planned(0, start=0)], rewarder=rewarder)
        return
    reports, case = run([planned(0, start=0)], rewarder=rewarder)
    assert taken(case) == expected((0,))
    assert counted(reports[0]) == REPORTS[0] and reports[0]["reward_raised"] == 4


def test_where_rewards_fail_that_is_said_rather_than_that_groups_are_missing():
    with pytest.raises(StrettoError, match=r"partition 0: 32 of 32 samples failed .*grader is down"):
        run([planned(0, start=0)], rewarder=ByRow(failed=range(ROWS)))


def test_an_error_in_a_later_round_ends_the_partition():
    def dies(request, sample, version):
        if request.group == 5:
            raise StrettoError("the engine refuses candidate 5")
        return by_candidate(request, sample, version)

    with pytest.raises(StrettoError, match="refuses candidate 5"):
        run([planned(0, start=0)], make=lambda _: StubEngine(answer=dies))


def test_the_next_partition_is_generated_while_puts_of_the_one_before_wait_for_room():
    async def body():
        room, put = asyncio.Event(), []

        async def waits(record, fields):
            put.append((record.partition, record.group))
            if record.partition == 1:
                room.set()
            await room.wait()

        async with rollout(stub, refill=refill(), put=waits) as case:
            case.scheduler.rewarder = ByRow()
            offer = Offer(0, weights(0))
            both = asyncio.gather(
                case.scheduler.run(planned(0, start=0), read, offer), case.scheduler.run(planned(1), read, offer)
            )
            await asyncio.wait_for(both, 60)
        return sorted(put)

    assert asyncio.run(body()) == [(k, group) for k in (0, 1) for group in range(4)]


# What surrounds it ---------------------------------------------------------------------------------------------------


def test_without_it_a_report_has_no_counts_of_it():
    async def body():
        async with rollout(stub) as case:
            case.scheduler.rewarder = ByRow()
            plan = PartitionPlan(partition=0, version=0, epochs=(0,) * 4, rows=(0, 1, 2, 3))
            return await case.scheduler.run(plan, read, Offer(0, weights(0))), taken(case)

    report, groups = asyncio.run(body())
    assert groups == {0: [(row, row) for row in range(4)]}
    assert report.keys().isdisjoint({"rollout_dropped_groups", "rollout_refill_rounds", "next_position"})


def test_its_counts_become_metrics_and_the_position_does_not():
    chunk = ChunkSchedule(chunk=0, groups=(0,), layout="padded", ranks=((),), fill=1.0)
    mini = Mini(partition=1, index=0, chunks=(chunk,))
    batch = Phase1Batch(
        minis=(mini,), records=(record(0),), leases=(), exposed_wait_s=0.0, forwards=(), fetched_bytes=0
    )
    step = Step(0)
    step.add(batch, REPORTS[1] | {"last_put_s": 0.0, "put_bytes": 0})
    found = {name: step.metrics[name] for name in METRICS if name in step.metrics}
    assert found == step.metrics
    assert found["rollout_dropped_groups"] == 5 and found["rollout_refill_rounds"] == 3


@given(start=st.integers(0, 60), length=st.integers(1, 12), seed=st.integers(0, 99), shuffle=st.booleans())
def test_positions_are_those_of_the_sequence_that_partitions_walk_without_it(start, length, seed, shuffle):
    config = Config.model_validate(
        {"rollout": {"refill_rounds": 1}, "run": {"seed": seed}, "data": {"shuffle": shuffle}}
    )
    endless = build.refill(config, length)
    assert endless is not None
    walked = [rows_of_partition(k, 5, length, seed, shuffle)[1] for k in range(15)]
    assert [endless.row_at(at) for at in range(start, start + 15)] == list(np.ravel(walked)[start : start + 15])


def test_it_is_off_unless_rounds_are_set():
    assert build.refill(Config(), 10) is None
    rollout_block = {"refill_rounds": 2, "prompts_per_partition": 6}
    config = Config.model_validate({"rollout": rollout_block, "algorithm": {"truncated": "drop"}})
    made = build.refill(config, 10)
    assert (made.groups, made.rounds, made.truncated, made.position) == (6, 2, "drop", 0)
