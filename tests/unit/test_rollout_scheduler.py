"""The scheduler with real engines, processor and rewards; a list stands where the data plane would be."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import tiny
from rollout_case import LAYOUTS, SAMPLING, SlowFor, hf, plan, published, read, rollout
from stub_engine import StubEngine, response, weights

from stretto.data.processor import InlineProcessor
from stretto.models.loading import load_model
from stretto.plane.payload import check_group
from stretto.rollout.hf import HfEngine
from stretto.rollout.router import Offer
from stretto.types import Score, StrettoError


def run(count=7, version=0, make=hf, offer=published, **options):
    """Report, and records and payloads in the order in which they were put."""

    async def body():
        async with rollout(make, **options) as case:
            report = await case.scheduler.run(plan(count, version), read, offer(version))
            return report, case

    return asyncio.run(body())


def test_every_group_is_put_once_whole_and_as_declared():
    report, case = run()
    assert sorted(record.group for record, _ in case.arrived) == list(range(7))
    for record, fields in case.arrived:
        check_group(record, fields, "here")
        assert record.row_id == f"row-{record.group}" and record.partition == 4
        assert record.images == len(LAYOUTS[record.group % 3])
        assert record.n == 2 and record.valid == (True, True)
    assert report["samples"] == 14
    assert report["response_tokens"] == sum(sum(record.response_tokens) for record, _ in case.arrived)


def test_what_is_sampled_does_not_depend_on_which_prompt_was_processed_first():
    assert run()[1].bits() == run(processor=SlowFor)[1].bits()


async def two_partitions_and_evaluations(replicas, **options):
    """Partitions 0 and 1 by versions 0 and 1, queued at once, with an evaluation of version 1 in between."""
    async with rollout(hf, replicas, m=2, **options) as case:
        _, evaluation, _, again = await asyncio.gather(
            case.scheduler.run(plan(7, 0, partition=0), read, published(0)),
            case.scheduler.evaluate(9, read, "validation", published(1)),
            case.scheduler.run(plan(7, 1, partition=1), read, published(1)),
            case.scheduler.evaluate(9, read, "validation", published(0)),
        )
        assert {v for record, _ in case.arrived for v in record.version_start if record.partition == 0} == {0}
        assert {v for record, _ in case.arrived for v in record.version_end if record.partition == 1} == {1}
        return case.bits(), evaluation, again


def test_one_two_and_three_replicas_give_the_same_bits_and_each_evaluation_is_of_its_version():
    results = [asyncio.run(two_partitions_and_evaluations(replicas)) for replicas in (1, 2, 3)]
    assert results[0] == results[1] == results[2]
    bits, of_one, of_zero = results[0]
    assert len(bits) == 14 and of_one.version == 1 and of_zero.version == 0
    assert of_one.examples != of_zero.examples  # random models of two seeds
    assert all(bits[0, group] != bits[1, group] for group in range(7))


def test_an_evaluation_has_the_mean_of_the_valid_rewards():
    class Graded:
        def __init__(self, valid):
            self.valid = valid

        async def score(self, prompt, _responses):
            row = int(prompt.row_id.removeprefix("row-"))
            return [Score(value=(1.0, 0.25, 0.0)[row] if self.valid[row] else 0.0, valid=self.valid[row])]

    async def evaluated(*valid):
        async with rollout(hf) as case:
            case.scheduler.rewarder = Graded(valid)
            return await case.scheduler.evaluate(3, read, "validation", published(0))

    result = asyncio.run(evaluated(True, True, False))
    assert result.reward_mean == (1.0 + 0.25) / 2 and result.correct == 1 and result.total == 3
    assert math.isnan(asyncio.run(evaluated(False, False, False)).reward_mean)


def test_a_killed_replica_changes_no_bit():
    died = []

    class Dies(HfEngine):
        def decode(self, requests, sampling, aborted=None):
            if len(died) < 2 and requests[0].group == 4:
                died.append(requests[0].partition)
                raise RuntimeError("out of memory")
            return super().decode(requests, sampling, aborted)

    def make(_replica):
        return Dies(tiny.family(), lambda: load_model(tiny.model_config(), 0), "cpu")

    undisturbed = run(7, m=2)[1].bits()
    assert run(7, m=2, make=make, replicas=2, restarts=2)[1].bits() == undisturbed
    assert died == [4, 4]


def test_replicas_decode_at_the_same_time_and_the_next_partition_starts_without_a_global_drain():
    engines = []

    def make(replica):
        engines.append(StubEngine(per_sample_s=0.05 if replica == 0 else 0.01))
        return engines[-1]

    async def body():
        async with rollout(make, 2, m=1) as case:
            offers = [Offer(v, weights(v)) for v in (0, 1)]
            begun = time.monotonic()
            await asyncio.gather(
                *(case.scheduler.run(plan(4, k, partition=k), read, offer) for k, offer in enumerate(offers))
            )
            # Alone the slow one would take 8 batches of 0.1 s.
            assert time.monotonic() - begun < 0.6
            issued = [(record.partition, record.group) for record, _ in case.arrived]
            assert sorted(issued) == [(k, g) for k in (0, 1) for g in range(4)]
            fast = [call for call in engines[1].calls if call[0] == "load"]
            assert fast == [("load", 0), ("load", 1)]

    asyncio.run(body())


def test_batches_in_flight_are_bounded_by_the_engines_and_one_ahead():
    processed = []

    class Noting(InlineProcessor):
        async def process(self, prompt):
            processed.append(prompt.row_id)
            return await super().process(prompt)

    gate = asyncio.Event()

    async def body():
        async with rollout(lambda _: StubEngine(before=lambda _: gate.wait()), 2, m=2, processor=Noting) as case:
            running = asyncio.create_task(case.scheduler.run(plan(12), read, Offer(0, weights(0))))
            await asyncio.sleep(0.3)
            assert len(processed) == (2 + 1) * 2  # two replicas and one batch ahead, of two groups each
            gate.set()
            await running
            assert len(processed) == 12

    asyncio.run(body())


def test_groups_of_a_batch_are_put_while_the_next_batch_is_generated():
    """A put that waits (back-pressure) must not keep the engine from going on."""
    order = []

    async def body():
        gate = asyncio.Event()

        async def put(record, fields):
            order.append(record.group)
            if record.group >= 3:
                gate.set()
            await gate.wait()

        async with rollout(hf, put=put) as case:
            await asyncio.wait_for(case.scheduler.run(plan(6), read, published(0)), 60)

    asyncio.run(body())
    assert sorted(order) == list(range(6))


def test_a_put_that_fails_ends_the_partition_and_nothing_of_it_appears_later():
    late = []

    async def put(record, fields):
        if record.group == 1:
            raise StrettoError("the plane refuses group 1")
        await asyncio.sleep(0.05)
        late.append(record.group)

    async def body():
        async with rollout(hf, put=put) as case:
            with pytest.raises(StrettoError, match="refuses group 1"):
                await case.scheduler.run(plan(7), read, published(0))
            seen = list(late)
            await asyncio.sleep(0.3)
            assert late == seen
            assert case.router.outstanding() == {0: (0, 0)}

    asyncio.run(body())


def test_a_prompt_that_cannot_be_processed_ends_the_partition_with_its_row():
    class Broken(InlineProcessor):
        async def process(self, prompt):
            if prompt.row_id == "row-5":
                raise StrettoError("row row-5: no such image")
            return await super().process(prompt)

    with pytest.raises(StrettoError, match="row-5"):
        run(processor=Broken)


@pytest.mark.case("B4")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda r, i, v: response([5, 6], v) if i else short(v),
            r"group 0, response 0: .* 3 token ids with 2 log-probs",
        ),
        (None, r"group 0: the engine returned 1 responses instead of 2"),
    ],
)
def test_an_engine_that_returns_too_little_is_an_error_not_a_slice(answer, words):
    class OneTooFew(StubEngine):
        async def generate(self, requests, sampling):
            return [group[:1] for group in await super().generate(requests, sampling)]

    def make(_):
        return OneTooFew() if answer is None else StubEngine(answer=answer)

    with pytest.raises(StrettoError, match=words):
        run(make=make, offer=lambda v: Offer(v, weights(v)), sampling=SAMPLING)


def short(version):
    whole = response([5, 6, 7], version)
    object.__setattr__(whole, "logprobs", whole.logprobs[:2])
    return whole


def stamped(start, end, *each):
    whole = response([5, 6, 7], start)
    return replace(whole, version_end=end, token_versions=np.array(each, np.int32))


@pytest.mark.parametrize(
    ("made", "good"),
    [
        (stamped(3, 3, 3, 3, 3), True),
        (stamped(3, 5, 3, 4, 5), True),
        (stamped(3, 5, 3, 5, 4), False),  # falls
        (stamped(3, 5, 3, 5, 5, 5), False),  # one too many
        (stamped(3, 5, 4, 5, 5), False),  # began later than it says
        (stamped(3, 5, 3, 4, 4), False),  # ended earlier
        (replace(response([5, 6], 3), version_end=4), True),
        (replace(response([5, 6], 3), version_end=2), False),
        (replace(response([], 3), token_versions=np.array([], np.int32)), True),
    ],
)
def test_versions_of_tokens_never_fall_and_are_those_of_the_response(made, good):
    answer = StubEngine(answer=lambda request, sample, version: made)
    if good:
        run(make=lambda _: answer, offer=lambda v: Offer(v, weights(v)), sampling=SAMPLING)
        return
    with pytest.raises(StrettoError, match="response 0: the engine stamped"):
        run(make=lambda _: answer, offer=lambda v: Offer(v, weights(v)), sampling=SAMPLING)


class FormsItsOwnBatches(StubEngine):
    """As a serving engine: it batches what has arrived, and its bits depend on that."""

    fixed_batches = False
    batch_invariant = False

    def __init__(self):
        super().__init__(per_sample_s=0.01, concurrency=4)
        self.sizes, self.most = [], 0

    async def generate(self, requests, sampling):
        self.sizes.append(len(requests))
        self.most = max(self.most, self.running + 1)
        return await super().generate(requests, sampling)


def test_an_engine_that_forms_its_own_batches_gets_a_group_a_call_and_several_calls_at_once():
    engine = FormsItsOwnBatches()
    _, case = run(make=lambda _: engine, offer=lambda version: Offer(version, weights(version)))
    assert sorted(record.group for record, _ in case.arrived) == list(range(7))
    assert engine.sizes == [1] * 7 and engine.most == 4


@pytest.mark.parametrize("invariant", [True, False])
def test_exact_mode_needs_fixed_batches_or_an_engine_whose_bits_do_not_depend_on_them(invariant, monkeypatch):
    from stretto import build
    from stretto.config import Config
    from stretto.observe.trace import Tracer

    monkeypatch.setattr(FormsItsOwnBatches, "batch_invariant", invariant)
    config = Config.model_validate({"model": {"config": tiny.BLOCK}})

    async def body():
        worker, _ = await build.rollout_worker(config, None, Tracer(None, "test"), lambda _: FormsItsOwnBatches())
        await worker.close()

    if invariant:
        asyncio.run(body())
        return
    with pytest.raises(StrettoError, match=r"rollout.engine = 'hf' forms its batches .*determinism = \"exact\""):
        asyncio.run(body())
