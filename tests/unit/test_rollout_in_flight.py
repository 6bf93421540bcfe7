"""What newer weights do to responses under way: they finish, are begun again, or go on under them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_rollout_router import batch, with_fleet

from stretto.rollout.engine import EngineLost
from stretto.types import Response, StrettoError

TOKENS = 6
TOKEN_S = 0.03


class TokenByToken:
    """Serves any number of calls, each a token every 30 ms, stamped with the version in use; notes every call."""

    fixed_batches = False
    batch_invariant = False
    concurrency = 8

    def __init__(self, *, live: bool = True, fails_at: int | None = None, error: Exception | None = None):
        self.live_update = live
        self.fails_at, self.error = fails_at, error
        self.version = -1
        self.loads: list[tuple[int, int]] = []
        """Versions, and the calls that ran when each was taken."""
        self.running = self.begun = self.aborted = 0
        self.killed = False

    async def start(self):
        return {}

    async def load_weights(self, version, weights):
        assert list(weights) == [f"weights {version}"]
        assert self.live_update or not self.running, "weights taken while a response is under way"
        if version == self.fails_at:
            raise self.error
        await asyncio.sleep(TOKEN_S / 2)
        self.loads.append((version, self.running))
        self.version = version

    async def generate(self, requests, sampling):
        self.running += 1
        self.begun += 1
        stamps: list[int] = []
        try:
            for _ in range(TOKENS):
                await asyncio.sleep(TOKEN_S)
                if self.killed:
                    raise EngineLost("killed")
                stamps.append(self.version)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        made = Response(
            token_ids=np.zeros(TOKENS, np.int32),
            logprobs=np.zeros(TOKENS, np.float32),
            text="",
            finish_reason="stop",
            version_start=stamps[0],
            version_end=stamps[-1],
            token_versions=np.array(stamps, np.int32),
        )
        return [[made] * sampling.n for _ in requests]

    def kill(self):
        self.killed = True

    async def close(self):
        self.kill()


async def begun(fleet, *groups, offered=0, after_tokens=2, pinned=None):
    """Batches of ``groups`` on a fleet that has been offered a version, once they have made a few tokens."""
    fleet.router.offer(offered, [f"weights {offered}"])
    tasks = [asyncio.create_task(fleet.router.generate(batch(g, version=pinned))) for g in groups]
    await asyncio.sleep(TOKEN_S * (after_tokens + 1))
    return tasks


def stamps(decoded) -> list[int]:
    return decoded.groups[0][0].token_versions.tolist()


def test_finish_lets_responses_end_under_their_version_before_the_next_is_taken():
    async def body(fleet):
        first = await begun(fleet, 0, 1)
        fleet.router.offer(1, ["weights 1"])
        later = await fleet.router.generate(batch(2, version=None))
        assert [stamps(await task) for task in first] == [[0] * TOKENS] * 2
        assert stamps(later) == [1] * TOKENS
        assert fleet.engine(0).loads == [(0, 0), (1, 0)]
        assert fleet.router.begun_again == 0

    with_fleet(body, TokenByToken())


def test_keep_goes_on_under_the_new_weights_without_losing_a_token():
    async def body(fleet):
        first = await begun(fleet, 0, 1)
        fleet.router.offer(1, ["weights 1"])
        made = [stamps(await task) for task in first]
        assert made[0] == made[1] == sorted(made[0]) and set(made[0]) == {0, 1}
        engine = fleet.engine(0)
        assert engine.loads == [(0, 0), (1, 2)] and engine.begun == 2 and not engine.aborted
        assert fleet.idle()

    with_fleet(body, TokenByToken(), in_flight="keep")


def test_keep_reaches_every_replica_that_is_at_work_and_the_idle_ones_when_they_are_given_something():
    async def body(fleet):
        tasks = await begun(fleet, 0)
        fleet.router.offer(1, ["weights 1"])
        await asyncio.gather(*tasks)
        assert fleet.engine(0).loads == [(0, 0), (1, 1)] and fleet.engine(1).loads == []
        more = [asyncio.create_task(fleet.router.generate(batch(g, version=None))) for g in (1, 2)]
        assert [stamps(await task) for task in more] == [[1] * TOKENS] * 2
        assert fleet.engine(1).loads == [(1, 0)]

    with_fleet(body, TokenByToken(), TokenByToken(), in_flight="keep")


def test_versions_that_follow_one_another_fast_end_with_the_newest():
    async def body(fleet):
        (task,) = await begun(fleet, 0)
        for version in (1, 2, 3):
            fleet.router.offer(version, [f"weights {version}"])
            await asyncio.sleep(0)
        assert stamps(await task)[-1] == 3
        versions = [version for version, _ in fleet.engine(0).loads]
        assert versions == sorted(versions) and versions[-1] == 3

    with_fleet(body, TokenByToken(), in_flight="keep")


def test_abort_begins_the_same_batches_again_under_the_new_weights():
    async def body(fleet):
        tasks = await begun(fleet, 0, 1)
        fleet.router.offer(1, ["weights 1"])
        assert [stamps(await task) for task in tasks] == [[1] * TOKENS] * 2
        engine = fleet.engine(0)
        assert (engine.aborted, engine.begun) == (2, 4)
        assert engine.loads == [(0, 0), (1, 0)]  # an engine without live_update would do as well
        assert fleet.router.begun_again == 2 and fleet.idle()

    with_fleet(body, TokenByToken(live=False), in_flight="abort")


def test_abort_generates_nothing_by_a_version_that_was_replaced_while_it_was_loaded():
    async def body(fleet):
        fleet.router.offer(0, ["weights 0"])
        task = asyncio.create_task(fleet.router.generate(batch(0, version=None)))
        await asyncio.sleep(TOKEN_S / 4)  # version 0 is being loaded
        fleet.router.offer(1, ["weights 1"])
        assert stamps(await task) == [1] * TOKENS
        assert fleet.engine(0).loads == [(0, 0), (1, 0)] and fleet.engine(0).begun == 1

    with_fleet(body, TokenByToken(live=False), in_flight="abort")


@pytest.mark.parametrize("policy", ["abort", "keep"])
def test_a_batch_that_names_its_version_is_left_alone_whatever_the_policy(policy):
    async def body(fleet):
        pinned = await begun(fleet, 0, pinned=0)
        beside = asyncio.create_task(fleet.router.generate(batch(1, version=None)))
        await asyncio.sleep(TOKEN_S)
        fleet.router.offer(1, ["weights 1"])
        assert stamps(await pinned[0]) == [0] * TOKENS
        # once it is through, the one beside it is free to take the new weights
        assert stamps(await beside)[-1] == 1
        assert fleet.engine(0).loads[0] == (0, 0) and fleet.idle()

    with_fleet(body, TokenByToken(), in_flight=policy)


def test_weights_that_an_engine_refuses_while_it_generates_end_the_run_with_that_cause():
    async def body(fleet):
        (task,) = await begun(fleet, 0)
        fleet.router.offer(1, ["weights 1"])
        with pytest.raises(StrettoError, match="the checksum differs"):
            await task
        with pytest.raises(StrettoError, match="the checksum differs"):
            await fleet.router.generate(batch(1, version=None))

    with_fleet(body, TokenByToken(fails_at=1, error=StrettoError("the checksum differs")), in_flight="keep")


def test_an_engine_that_dies_of_an_update_is_replaced_and_its_batches_are_generated_again():
    async def body(fleet):
        tasks = await begun(fleet, 0, 1)
        fleet.router.offer(1, ["weights 1"])
        assert [stamps(await task) for task in tasks] == [[1] * TOKENS] * 2
        assert fleet.router.restarts == 1 and "broken pipe" in fleet.notes[0]

    first = TokenByToken(fails_at=1, error=EngineLost("broken pipe"))
    with_fleet(body, first, restarts=1, in_flight="keep", successor=TokenByToken)


@pytest.mark.parametrize("policy", ["finish", "abort", "keep"])
def test_under_a_stream_of_versions_every_batch_ends_once_and_no_stamp_falls(policy):
    async def body(fleet):
        fleet.router.offer(0, ["weights 0"])
        tasks = [asyncio.create_task(fleet.router.generate(batch(g, version=None))) for g in range(24)]
        for version in range(1, 5):
            await asyncio.sleep(TOKEN_S * 4.3)
            fleet.router.offer(version, [f"weights {version}"])
        made = [stamps(decoded) for decoded in await asyncio.gather(*tasks)]
        assert all(len(each) == TOKENS and each == sorted(each) for each in made)
        mixed = sum(len(set(each)) > 1 for each in made)
        assert (mixed > 0) == (policy == "keep")
        assert (fleet.router.begun_again > 0) == (policy == "abort")
        assert fleet.idle()

    with_fleet(body, TokenByToken(), TokenByToken(), in_flight=policy)
