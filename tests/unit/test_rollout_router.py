"""The router: which replica gets a batch, under which version, and what happens when replicas fail."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from stub_engine import StubEngine, weights

from stretto.observe.trace import Tracer
from stretto.rollout.engine import GroupRequest, Sampling
from stretto.rollout.router import DecodeBatch, Offer, Router
from stretto.types import ProcessedPrompt, StrettoError

orders = itertools.count()


def request(group: int, partition: int = 0, tokens: int = 3) -> GroupRequest:
    prompt = ProcessedPrompt(
        prompt_ids=np.zeros(tokens, np.int32),
        mm_token_type_ids=np.zeros(tokens, np.int8),
        pixel_values=np.zeros((0, 1536), np.float32),
        image_grid_thw=np.zeros((0, 3), np.int32),
    )
    return GroupRequest(partition=partition, group=group, prompt=prompt)


def batch(group: int = 0, *, version: int | None = 0, tokens: int = 3, n: int = 2, partition: int = 0) -> DecodeBatch:
    return DecodeBatch(
        order=next(orders),
        requests=[request(group, partition, tokens)],
        sampling=Sampling(n=n, temperature=1.0, max_tokens=5),
        offer=None if version is None else Offer(version, weights(version)),
        span="rollout.generate",
    )


class Fleet:
    """A router and every engine that it has had made, by replica."""

    def __init__(self, *engines: StubEngine, restarts: int = 0, timeout_s: float = 60.0, successor=None, **options):
        self.successor = successor or (lambda: StubEngine(per_sample_s=0.01))
        self.prepared = {i: [engine] for i, engine in enumerate(engines)}
        self.made: dict[int, list[StubEngine]] = {i: [] for i in self.prepared}
        self.notes: list[str] = []
        self.router = Router(
            self.make,
            len(engines),
            max_restarts=restarts,
            timeout_s=timeout_s,
            tracer=Tracer(None, "test"),
            note=self.notes.append,
            **options,
        )

    def make(self, replica: int) -> StubEngine:
        prepared = self.prepared[replica]
        engine = prepared.pop(0) if prepared else self.successor()
        self.made[replica].append(engine)
        return engine

    def engine(self, replica: int) -> StubEngine:
        return self.made[replica][-1]

    def idle(self) -> bool:
        return all(counts == (0, 0) for counts in self.router.outstanding().values())


def with_fleet(body, *engines: StubEngine, **options):
    async def run():
        fleet = Fleet(*engines, **options)
        await fleet.router.start()
        try:
            return await asyncio.wait_for(body(fleet), 20)
        finally:
            await fleet.router.close()
            assert all(engine.killed for made in fleet.made.values() for engine in made)

    return asyncio.run(run())


def test_a_batch_counts_for_the_most_tokens_that_it_may_hold():
    # 3 samples of (7 + 4) prompt tokens, and of 5 response tokens for each of two prompts
    two = DecodeBatch(
        order=0,
        requests=[request(0, tokens=7), request(1, tokens=4)],
        sampling=Sampling(n=3, temperature=1.0, max_tokens=5),
        offer=None,
        span="rollout.generate",
    )
    assert two.tokens == 3 * (7 + 4 + 2 * 5)


def test_a_batch_goes_to_the_replica_with_the_fewest_outstanding_tokens():
    async def body(fleet):
        # tokens of a batch: 2 * (prompt + 5): 210, 30, 50, 110, 70
        sizes = (100, 10, 20, 50, 30)
        tasks = []
        for group, size in enumerate(sizes):
            tasks.append(asyncio.create_task(fleet.router.generate(batch(group, tokens=size))))
            await asyncio.sleep(0.01)
        # 0 takes 210; 1 takes 30, then 50 (80 in all), then 110 (190), and then 70, as 190 < 210
        assert fleet.router.outstanding() == {0: (1, 210), 1: (4, 260)}
        assert [call[2] for call in fleet.engine(1).calls if call[0] == "generate"] == [1, 2, 3, 4]
        await asyncio.gather(*tasks)
        assert fleet.idle()

    with_fleet(body, *(StubEngine(per_sample_s=0.2, concurrency=8) for _ in range(2)))


def test_a_replica_that_serves_one_call_at_a_time_gets_the_next_when_it_is_free_not_before():
    async def body(fleet):
        tasks = [asyncio.create_task(fleet.router.generate(batch(group))) for group in range(6)]
        await asyncio.gather(*tasks)
        # the slow one takes 0.2 s a batch, the fast one 0.02 s: nothing is ever queued behind the slow one
        assert [call[2] for call in fleet.engine(0).calls if call[0] == "generate"] == [0]
        assert [call[2] for call in fleet.engine(1).calls if call[0] == "generate"] == [1, 2, 3, 4, 5]

    with_fleet(body, StubEngine(per_sample_s=0.1), StubEngine(per_sample_s=0.01))


def test_each_batch_is_generated_by_its_version_and_a_version_is_loaded_only_where_another_is_held():
    async def body(fleet):
        results = await asyncio.gather(
            *(fleet.router.generate(batch(g, version=v)) for g, v in enumerate((0, 0, 1, 1)))
        )
        assert [r.version for r in results] == [0, 0, 1, 1]
        assert [r.groups[0][0].version_start for r in results] == [0, 0, 1, 1]
        assert [call for call in fleet.engine(0).calls if call[0] == "load"] == [("load", 0), ("load", 1)]

    with_fleet(body, StubEngine(per_sample_s=0.01, load_s=0.01))


def test_the_next_version_starts_on_a_free_replica_while_the_last_one_still_runs_on_another():
    async def body(fleet):
        old = asyncio.create_task(fleet.router.generate(batch(0, version=0)))
        await asyncio.sleep(0.05)
        new = await fleet.router.generate(batch(1, version=1))
        assert new.version == 1 and not old.done()
        assert (await old).version == 0

    with_fleet(body, StubEngine(per_sample_s=0.2), StubEngine())


def test_an_engine_with_several_calls_runs_dry_before_it_takes_another_version():
    """StubEngine asserts that no weights are taken while a response is under way."""

    async def body(fleet):
        versions = (0, 0, 1, 0, 1, 1)
        results = await asyncio.gather(*(fleet.router.generate(batch(g, version=v)) for g, v in enumerate(versions)))
        assert [r.version for r in results] == list(versions)

    with_fleet(body, StubEngine(per_sample_s=0.01, load_s=0.01, concurrency=4))


@pytest.mark.case("E1")
def test_weights_offered_while_a_sample_is_half_generated_are_taken_after_it():
    async def body(fleet):
        fleet.router.offer(3, weights(3))
        half = asyncio.create_task(fleet.router.generate(batch(0, version=None)))
        await asyncio.sleep(0.05)
        fleet.router.offer(4, weights(4))
        fleet.router.offer(2, weights(2))  # late: an older one never comes back
        after = await fleet.router.generate(batch(1, version=None))
        (stamps,) = {(r.version_start, r.version_end) for r in (await half).groups[0]}
        assert stamps == (3, 3)
        assert {(r.version_start, r.version_end) for r in after.groups[0]} == {(4, 4)}

    with_fleet(body, StubEngine(per_sample_s=0.1))


def test_batches_begin_in_their_order_even_if_they_wait_for_a_version_others_have():
    async def body(fleet):
        batches = [batch(g, version=v) for g, v in enumerate((0, 1, 0, 0))]
        await asyncio.gather(*(fleet.router.generate(b) for b in batches))
        assert [call[2] for call in fleet.engine(0).calls if call[0] == "generate"] == [0, 1, 2, 3]

    with_fleet(body, StubEngine(per_sample_s=0.01, concurrency=4))


# Failures ----------------------------------------------------------------------------------------------------------


def third_request_raises(engine):
    if engine.requests == 3:
        raise RuntimeError("CUDA error: an illegal memory access")


def never_answers(engine):
    return asyncio.sleep(3600)


@pytest.mark.case("E3")
@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (third_request_raises, "RuntimeError: CUDA error: an illegal memory access"),
        (never_answers, "it has not answered for rollout.engine_timeout_s = 0.3 s"),
    ],
)
def test_the_work_of_a_replica_that_fails_moves_to_the_live_one_and_a_successor_is_started(before, cause):
    async def body(fleet):
        results = await asyncio.gather(*(fleet.router.generate(batch(g)) for g in range(12)))
        assert [[r.token_ids.tolist() for r in result.groups[0]] for result in results] == [[[5, 6], [6, 6]]] * 12
        assert fleet.idle() and fleet.router.outstanding().keys() == {0, 1}
        assert fleet.router.restarts == 1
        assert fleet.notes == [f"rollout engine 0 died: {cause}; restart 1 of 1"]
        assert len(fleet.made[0]) == 2 and fleet.made[0][0].killed and not fleet.engine(0).killed

    with_fleet(body, StubEngine(before=before), StubEngine(per_sample_s=0.01), restarts=1, timeout_s=0.3)


@pytest.mark.case("E3")
def test_both_replicas_fail_and_the_run_ends_with_the_cause_once_no_restart_is_left():
    async def body(fleet):
        results = await asyncio.gather(*(fleet.router.generate(batch(g)) for g in range(30)), return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        assert failed and all(isinstance(error, StrettoError) for error in failed)
        assert {str(error) for error in failed} == {
            "rollout engine 1 died: RuntimeError: CUDA error: an illegal memory access "
            "(rollout.max_engine_restarts = 1; the first death: rollout engine 0 died: RuntimeError: CUDA error: an "
            "illegal memory access); resume from the last checkpoint"
        }
        with pytest.raises(StrettoError, match="illegal memory access"):  # for good
            await fleet.router.generate(batch(0))
        assert fleet.idle()

    dying = [StubEngine(before=third_request_raises, per_sample_s=0.01 * (i + 1)) for i in range(2)]
    with_fleet(body, *dying, restarts=1)


def test_without_restarts_the_first_death_ends_the_run_even_if_another_replica_lives():
    async def body(fleet):
        with pytest.raises(StrettoError, match=r"engine 0 died: RuntimeError.*max_engine_restarts = 0"):
            await asyncio.gather(*(fleet.router.generate(batch(g)) for g in range(9)))

    with_fleet(body, StubEngine(before=third_request_raises), StubEngine(per_sample_s=0.01))


def test_an_error_about_the_input_is_no_death():
    def refuses(engine):
        raise StrettoError("row 7: an image token without an image")

    async def body(fleet):
        with pytest.raises(StrettoError, match="row 7"):
            await fleet.router.generate(batch(0))
        assert fleet.router.restarts == 0 and fleet.idle() and not fleet.engine(0).killed

    with_fleet(body, StubEngine(before=refuses), restarts=3)


def test_a_successor_loads_the_version_of_the_batch_that_its_predecessor_failed():
    async def body(fleet):
        assert (await fleet.router.generate(batch(0, version=6))).version == 6
        assert fleet.engine(0).calls == [("load", 6), ("generate", 0, 0, 6)]

    def breaks(engine):
        raise MemoryError

    with_fleet(body, StubEngine(before=breaks), restarts=1)


def test_an_engine_that_cannot_start_is_replaced_or_ends_the_start_with_its_cause():
    class Stillborn(StubEngine):
        async def start(self):
            raise OSError("no space left on device")

    class Refuses(StubEngine):
        async def start(self):
            raise StrettoError("no such model")

    async def body(fleet):
        assert fleet.router.restarts == 2
        await fleet.router.generate(batch(0))

    fleet_of = Fleet(Stillborn(), restarts=2)
    fleet_of.prepared[0].append(Stillborn())

    async def run(fleet):
        await fleet.router.start()
        await body(fleet)
        await fleet.router.close()

    asyncio.run(run(fleet_of))
    for engine, words in ((Stillborn(), "engine 0 died: OSError: no space left"), (Refuses(), "no such model")):
        with pytest.raises(StrettoError, match=words):
            asyncio.run(Fleet(engine).router.start())
        assert engine.killed


def test_counts_return_to_normal_after_cancellation_and_the_engine_is_told():
    async def body(fleet):
        tasks = [asyncio.create_task(fleet.router.generate(batch(g))) for g in range(5)]
        await asyncio.sleep(0.05)
        for task in (tasks[0], tasks[3], tasks[4]):  # one that runs, two that wait
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in done] == [True, False, False, True, True]
        assert fleet.idle() and fleet.engine(0).aborted == 1
        await fleet.router.generate(batch(9))

    with_fleet(body, StubEngine(per_sample_s=0.05))


def test_all_calls_of_an_engine_that_dies_count_as_one_death():
    async def body(fleet):
        results = await asyncio.gather(*(fleet.router.generate(batch(g)) for g in range(4)))
        assert len(results) == 4 and fleet.router.restarts == 1

    def breaks(engine):
        async def later():
            await asyncio.sleep(0.05)
            raise ConnectionError

        return later()

    with_fleet(body, StubEngine(before=breaks, concurrency=4), restarts=1)


def test_a_slow_call_is_told_of_once_while_it_runs_and_what_is_slow_is_learnt():
    """Batches of two samples: the first takes 0.6 s, which is over the 0.05 s of a router that knows nothing; then
    0.6 s is what a batch takes, and 2 s is not ten times as long."""

    async def body(fleet):
        task = asyncio.create_task(fleet.router.generate(batch(0)))
        await asyncio.sleep(0.3)
        assert fleet.notes == [
            "rollout engine 0 has not answered for 0.05 s; it is replaced after rollout.engine_timeout_s = 60 s"
        ]
        await task
        fleet.engine(0).per_sample_s = 1.0
        await fleet.router.generate(batch(1))
        assert len(fleet.notes) == 1

    with_fleet(body, StubEngine(per_sample_s=0.3), slow_s=0.05)
