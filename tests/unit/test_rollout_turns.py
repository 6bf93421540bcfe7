"""The coordinator begins work in the order in which it was queued, whatever order Ray delivers the calls in."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from stretto.rollout_process import RolloutProcess


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
def test_work_is_begun_in_the_order_in_which_it_was_queued(arrival):
    begun = []

    class Worker:
        async def evaluate(self, split, prompts, offer):
            begun.append(offer.version)
            await asyncio.sleep(0.01 * (3 - offer.version))
            if offer.version == 1:
                raise RuntimeError("one that fails holds up no other")
            return offer.version

    async def body():
        process = RolloutProcess(None, None, None, [])
        process.worker = Worker()
        calls = [process.evaluate(turn, "validation", 1, turn, []) for turn in arrival]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = dict(zip(arrival, asyncio.run(body()), strict=True))
    assert begun == [0, 1, 2]
    assert results[0] == 0 and isinstance(results[1], RuntimeError) and results[2] == 2
