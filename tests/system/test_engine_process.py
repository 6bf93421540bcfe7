"""Engines in Ray actors, behind the router: every way to die, hang or refuse, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
import pytest
import ray
from processes import still_there
from rollout_case import plan, read, rollout
from stub_engine import weights

from stretto.engine_process import EngineProcess, RemoteEngine
from stretto.remote import memory_mib
from stretto.rollout.router import Offer
from stretto.types import StrettoError

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("ray_session")]


def process_class(how: str, replicas_that_fail: set[int]):
    """An EngineProcess around an engine without a model, whose third request goes wrong; a successor's never does."""

    class Stub(EngineProcess):  # local, so that Ray sends the class itself
        def __init__(self, replica: int, first: bool):
            self.fails = first and replica in replicas_that_fail
            self.requests, self.version = 0, -1

        async def start(self):
            node = ray.get_runtime_context().get_node_id()
            known = {"fixed_batches": True, "batch_invariant": True, "live_update": False, "concurrency": 1}
            return {}, {"pid": os.getpid(), "node": node, **known}

        async def load_weights(self, version, refs):
            assert [str(bucket) for bucket in await asyncio.gather(*refs)] == [f"weights {version}"]
            self.version = version

        async def generate(self, requests, sampling):
            from stretto.types import Response

            self.requests += 1
            if self.fails and self.requests == 3:
                if how == "raises":
                    raise RuntimeError("CUDA error: an illegal memory access")
                if how == "exits":
                    os._exit(1)
                if how == "hangs":
                    time.sleep(3600)
                if how == "refuses":
                    raise StrettoError("row 7: an image token without an image")
            await asyncio.sleep(0.02)
            made = dict(finish_reason="stop", version_start=self.version, version_end=self.version, text="1")
            groups = [
                [
                    Response(
                        token_ids=np.array([r.group, i], np.int32), logprobs=np.array([-1, -2], np.float32), **made
                    )
                    for i in range(sampling.n)
                ]
                for r in requests
            ]
            return groups, memory_mib()

        async def close(self):
            pass

    return Stub


class Fleet:
    def __init__(self, how, replicas_that_fail):
        self.cls = ray.remote(num_cpus=0, max_restarts=0)(process_class(how, replicas_that_fail))
        self.made: list[tuple[int, RemoteEngine]] = []

    def make(self, replica):
        first = all(index != replica for index, _ in self.made)
        engine = RemoteEngine(self.cls.options(max_concurrency=100).remote(replica, first))
        self.made.append((replica, engine))
        return engine


async def run(fleet, restarts):
    """12 groups on two replicas, in batches of one; records and payloads, and the router's counts."""
    references = [ray.put(bucket) for bucket in weights(0)]
    async with rollout(fleet.make, 2, m=1, restarts=restarts, timeout_s=4.0) as case:
        try:
            await case.scheduler.run(plan(12), read, Offer(0, references))
        finally:
            pids = [engine._local.pid for _, engine in fleet.made if engine._local is not None]
            counts = set(case.router.outstanding().values())
    return case, counts, pids


def test_a_call_that_is_cancelled_before_it_was_made_is_taken_back():
    """What is cancelled while its arguments are still being handed to Ray would go on with nobody to cancel it."""

    class Slow:
        def __init__(self):
            self.ended = []

        async def generate(self, requests, sampling):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise

        async def seen(self):
            return self.ended

    class Handed:
        """Takes a while to hand a call over."""

        def __init__(self, actor):
            self.actor = actor
            self.generate = self

        def remote(self, *args):
            time.sleep(0.3)
            return self.actor.generate.remote(*args)

    async def body(actor):
        assert await actor.seen.remote() == []
        engine = RemoteEngine(Handed(actor))
        call = asyncio.create_task(engine.generate([], None))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        deadline = time.monotonic() + 10
        while not (ended := await actor.seen.remote()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return ended

    actor = ray.remote(num_cpus=0)(Slow).options(max_concurrency=10).remote()
    assert asyncio.run(body(actor)) == ["cancelled"]
    ray.kill(actor)


@pytest.mark.case("E3")
@pytest.mark.parametrize(("how", "failing"), [("raises", {0, 1}), ("exits", {0}), ("exits", {0, 1}), ("hangs", {0, 1})])
def test_the_work_goes_on_elsewhere_and_no_sample_is_lost_or_doubled(how, failing):
    fleet = Fleet(how, failing)
    case, counts, pids = asyncio.run(run(fleet, restarts=len(failing)))
    assert sorted(record.group for record, _ in case.arrived) == list(range(12))
    for record, fields in case.arrived:
        assert [ids.tolist() for ids in fields["response_ids"]] == [[record.group, 0], [record.group, 1]]
    assert case.router.restarts == len(failing) and counts == {(0, 0)}
    assert not still_there(pids)


@pytest.mark.case("E3")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exits", "engine 0 died: it was killed \\(SIGKILL"),
        ("refuses", "row 7: an image token without an image"),
    ],
)
def test_without_restarts_the_first_cause_is_raised_within_seconds(how, words):
    fleet = Fleet(how, {0})
    begun = time.monotonic()
    with pytest.raises(StrettoError, match=words):
        asyncio.run(run(fleet, restarts=0))
    assert time.monotonic() - begun < 30
    assert not still_there([engine._local.pid for _, engine in fleet.made if engine._local is not None])
