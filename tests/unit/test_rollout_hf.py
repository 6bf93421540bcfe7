"""The hf engine: tokens, log-probs, seeds, stops and versions."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import tiny
import torch

from stretto.models.batch import SampleInput
from stretto.models.logprobs import token_logprobs
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling
from stretto.rollout.hf import HfEngine

SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=10, seed=3)
LAYOUTS = [((32, 64),), (), ((64, 32), (32, 32)), ((32, 64),)]


@pytest.fixture(scope="module")
def engine():
    engine = HfEngine(tiny.family(), tiny.model, "cpu")
    yield engine
    asyncio.run(engine.close())


def requests(layouts=LAYOUTS, partition=0):
    family = tiny.family()
    return [
        GroupRequest(partition=partition, group=g, prompt=family.process(tiny.prompt(g, images)))
        for g, images in enumerate(layouts)
    ]


def ids(groups):
    return [[r.token_ids.tolist() for r in group] for group in groups]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_reported_log_probs_are_those_of_the_training_forward(engine, temperature):
    family, model = tiny.family(), tiny.model()
    reqs = requests()
    groups = engine.decode(reqs, Sampling(n=4, temperature=temperature, max_tokens=10, seed=1))
    samples = [SampleInput(q.prompt, r.token_ids) for q, group in zip(reqs, groups, strict=True) for r in group]
    batch = family.collate(samples)
    with torch.no_grad():
        logits = family.response_logits(model, batch)
    expected = token_logprobs(logits, batch.response_ids_T, family.suppressed_V, temperature)
    got = np.concatenate([r.logprobs for group in groups for r in group])
    np.testing.assert_allclose(got, expected.numpy(), atol=2e-5)
    assert all(len(r.logprobs) == len(r.token_ids) for group in groups for r in group)


def test_greedy_tokens_are_those_of_generate(engine):
    family, model = tiny.family(), tiny.model()
    (request,) = requests([((32, 64), (32, 32))])
    ids = torch.from_numpy(request.prompt.prompt_ids.astype(np.int64))[None]
    out = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == family.config.image_token_id).int(),
        pixel_values=torch.from_numpy(request.prompt.pixel_values),
        image_grid_thw=torch.from_numpy(request.prompt.image_grid_thw.astype(np.int64)),
        do_sample=False,
        max_new_tokens=10,
        eos_token_id=list(family.eos_ids),
        pad_token_id=family.pad_id,
        suppress_tokens=torch.nonzero(family.suppressed_V).flatten().tolist(),
    )
    ((response,),) = engine.decode([request], Sampling(n=1, temperature=0.0, max_tokens=10))
    assert response.token_ids.tolist() == out[0, ids.shape[1] :].tolist()


def test_tokens_do_not_depend_on_the_other_prompts_of_the_batch_or_on_what_came_before(engine):
    reqs = requests([((32, 64),)] * 6)
    together = ids(engine.decode(reqs, SAMPLING))
    engine.decode(requests(partition=9), SAMPLING)
    assert together == ids(engine.decode(reqs, SAMPLING))
    # Other batch compositions: float32 log-probs move by 1e-6 at most, so tokens agree here.
    assert together == [group for q in reqs for group in ids(engine.decode([q], SAMPLING))]


def test_one_call_is_bit_reproducible(engine):
    first, second = engine.decode(requests(), SAMPLING), engine.decode(requests(), SAMPLING)
    for a, b in zip((r for g in first for r in g), (r for g in second for r in g), strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()


def test_partition_and_seed_change_the_samples(engine):
    base = ids(engine.decode(requests(), SAMPLING))
    assert base != ids(engine.decode(requests(partition=1), SAMPLING))
    assert base != ids(engine.decode(requests(), Sampling(n=4, temperature=1.0, max_tokens=10, seed=4)))
    assert len({tuple(r) for group in base for r in group}) > len(base)


def test_eos_is_kept_where_sampled_and_never_invented(engine):
    family = tiny.family()
    groups = engine.decode(requests([((32, 64),)] * 40), Sampling(n=8, temperature=2.0, max_tokens=12, seed=0))
    responses = [r for group in groups for r in group]
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    for r in responses:
        ends = [int(t) in family.eos_ids for t in r.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or len(r.token_ids) == 12


def test_suppressed_ids_are_never_sampled(engine):
    suppressed = set(torch.nonzero(tiny.family().suppressed_V).flatten().tolist())
    groups = engine.decode(requests(), Sampling(n=32, temperature=20.0, max_tokens=16, seed=0))
    assert not suppressed & {int(t) for group in groups for r in group for t in r.token_ids}


def test_a_stop_string_ends_the_response_keeps_its_tokens_and_leaves_the_text(engine):
    free = Sampling(n=8, temperature=3.0, max_tokens=16, seed=5)
    unstopped = [r for group in engine.decode(requests(), free) for r in group]
    stop = "a"
    stopped = [r for group in engine.decode(requests(), Sampling(**(vars(free) | {"stop": (stop,)}))) for r in group]
    hit = 0
    for before, after in zip(unstopped, stopped, strict=True):
        if stop not in before.text:
            assert before.token_ids.tolist() == after.token_ids.tolist()
            continue
        hit += 1
        assert after.finish_reason == "stop" and stop not in after.text
        assert before.text.startswith(after.text + stop)
        assert after.token_ids.tolist() == before.token_ids.tolist()[: len(after.token_ids)]
        assert int(after.token_ids[-1]) not in tiny.family().eos_ids
        assert stop in tiny.family().decode(after.token_ids)
    assert hit


def test_generation_does_not_block_the_event_loop(engine):
    async def body():
        gaps, last, running = [], asyncio.get_running_loop().time(), True

        async def heartbeat():
            nonlocal last
            while running:
                await asyncio.sleep(0.01)
                now = asyncio.get_running_loop().time()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        for _ in range(5):
            await engine.generate(requests([((32, 64),)] * 32), Sampling(n=8, temperature=1.0, max_tokens=16, seed=0))
        running = False
        await beat
        return gaps

    gaps = asyncio.run(body())
    assert len(gaps) > 10 and max(gaps) < 0.5


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_a_call_that_is_cancelled_or_killed_ends_within_a_token(how):
    family = tiny.family()
    steps = []

    class Counting(HfEngine):
        def _sample(self, logits, rows, step, sampling):
            steps.append(step)
            started.set()
            return super()._sample(logits, rows, step, sampling)

    started = threading.Event()
    engine = Counting(family, tiny.model, "cpu")
    long = Sampling(n=1, temperature=1.0, max_tokens=400, seed=0, stop=("never",))

    async def body():
        await engine.start()
        call = asyncio.create_task(engine.generate(requests([((32, 64),)] * 64), long))
        await asyncio.to_thread(started.wait)
        if how == "cancelled":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            (response,) = (await engine.generate(requests([()]), Sampling(n=1, temperature=0.0, max_tokens=3)))[0]
            assert len(response.token_ids) <= 3
        else:
            engine.kill()
            with pytest.raises(EngineLost):
                await call
        await engine.close()

    asyncio.run(body())
    assert len(steps) < 50
