"""What an engine promises, held by ``hf`` and by ``vllm`` alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_case import LAYOUTS, assert_logprobs, assert_same_bits, family, flat, model, published, requests

from stretto.rollout.engine import Sampling
from stretto.types import StrettoError

pytestmark = pytest.mark.timeout(180)
SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=12, seed=3)


@pytest.fixture(params=["hf", "vllm"])
def served(request, started):
    return started(request.param)


def ids(groups):
    return [[r.token_ids.tolist() for r in group] for group in groups]


def test_an_engine_begins_with_the_weights_it_was_built_with(served):
    if served.engine.version >= 0:
        pytest.skip("another test has loaded weights")
    groups = served.generate(requests(), SAMPLING)
    assert_logprobs(model(0), requests(), groups)
    assert all((r.version_start, r.version_end, r.token_versions) == (-1, -1, None) for r in flat(groups))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
def test_log_probs_are_those_of_the_trainer(served, temperature):
    served.load(seed=1, version=1)
    asked = requests()
    groups = served.generate(asked, replace(SAMPLING, temperature=temperature, n=1 if temperature == 0 else 8))
    assert [len(group) for group in groups] == [1 if temperature == 0 else 8] * len(LAYOUTS)
    assert_logprobs(model(1), asked, groups, temperature)
    for r in flat(groups):
        assert r.error is None and r.token_ids.dtype == np.int32 and r.logprobs.dtype == np.float32


def test_greedy_takes_the_likeliest_token(served):
    served.load(seed=1, version=1)
    asked = requests()
    groups = served.generate(asked, replace(SAMPLING, temperature=0.0, n=1))
    first = [family().collate_prompts([q.prompt]).inputs for q in asked]
    for (response,), inputs in zip(groups, first, strict=True):
        with torch.no_grad():
            logits = family().logits(model(1), family().hidden_states(model(1), inputs)[0, -1])
        assert response.token_ids[0] == int(logits.masked_fill(family().suppressed_V, -torch.inf).argmax())


def test_eos_is_kept_where_it_was_sampled_and_suppressed_ids_never_are(served):
    served.load(seed=1, version=1)
    responses = flat(served.generate(requests([((32, 64),)] * 24), replace(SAMPLING, n=8, temperature=2.0)))
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    suppressed = set(torch.nonzero(family().suppressed_V)[:, 0].tolist())
    for r in responses:
        ends = [int(token) in family().eos_ids for token in r.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or len(r.token_ids) == 12
        assert not suppressed & set(r.token_ids.tolist())
        assert r.text == family().decode(r.token_ids)


def test_a_call_repeats_bit_for_bit(served):
    served.load(seed=1, version=1)
    assert_same_bits(served.generate(requests(), SAMPLING), served.generate(requests(), SAMPLING))


def test_tokens_depend_neither_on_company_nor_on_the_number_of_samples(served):
    served.load(seed=1, version=1)
    together = ids(served.generate(requests(), SAMPLING))
    assert [ids(served.generate([q], SAMPLING))[0] for q in requests()] == together
    assert ids(served.generate(requests(), replace(SAMPLING, n=2))) == [group[:2] for group in together]


def test_every_sample_has_noise_of_its_own(served):
    served.load(seed=1, version=1)
    base = ids(served.generate(requests([()] * 3), SAMPLING))
    assert len({tuple(response) for group in base for response in group}) == 12  # the prompts are alike
    assert base != ids(served.generate(requests([()] * 3, partition=1), SAMPLING))
    assert base != ids(served.generate(requests([()] * 3), replace(SAMPLING, seed=4)))


def test_a_stop_string_ends_a_response_with_its_tokens_and_without_its_text(served):
    served.load(seed=1, version=1)
    asked, free = requests([((32, 64),)] * 6), replace(SAMPLING, n=8, temperature=2.0)
    unstopped = flat(served.generate(asked, free))
    stopped = flat(served.generate(asked, replace(free, stop=("a", "3"))))
    hits = 0
    for r, whole in zip(stopped, unstopped, strict=True):
        n = len(r.token_ids)
        assert r.token_ids.tolist() == whole.token_ids[:n].tolist() and len(r.logprobs) == n
        at = min((whole.text.find(s) for s in ("a", "3") if s in whole.text), default=-1)
        if at < 0:
            assert (n, r.text) == (len(whole.token_ids), whole.text)
            continue
        hits += 1
        assert r.text == whole.text[:at] and r.finish_reason == "stop"
        assert any(s in family().decode(r.token_ids) for s in ("a", "3"))
        assert not any(s in family().decode(r.token_ids[:-1]) for s in ("a", "3"))
    assert hits > 5


def test_a_version_stamps_what_it_makes_and_leaves_nothing_of_the_one_before(served):
    """The same prompts before and after: keys, values and image features are those of the new weights."""
    asked = requests()
    for version, seed in ((5, 1), (6, 2), (7, 1)):
        served.load(seed, version)
        assert served.engine.version == version
        groups = served.generate(asked, SAMPLING)
        assert_logprobs(model(seed), asked, groups)
        for r in flat(groups):
            assert (r.version_start, r.version_end, r.token_versions) == (version, version, None)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_after_updates_an_engine_is_bit_for_bit_a_fresh_one(engine, tied, started):
    updated, fresh = started(engine, tied=tied), started(engine, tied=tied, seed=2)
    updated.load(1, 1, tied)
    updated.load(2, 2, tied)
    groups = updated.generate(requests(), SAMPLING)
    assert_logprobs(model(2, tied), requests(), groups)
    assert_same_bits(groups, fresh.generate(requests(), SAMPLING))


def broken(buckets, how):
    if how == "lacks a bucket":
        return buckets[:-1]
    if how == "mixes versions":
        return [*buckets[:-1], replace(buckets[-1], version=8)]
    metas = list(buckets[0].metas)
    if how == "has an unknown name":
        metas[0] = replace(metas[0], name="model.nothing.weight")
    else:
        metas[0] = replace(metas[0], shape=(*metas[0].shape, 1))
    return [replace(buckets[0], metas=tuple(metas)), *buckets[1:]]


@pytest.mark.parametrize("how", ["lacks a bucket", "mixes versions", "has an unknown name", "has another shape"])
def test_weights_that_do_not_fit_are_refused(served, how):
    with pytest.raises(StrettoError, match=r"buckets|mixed|not a parameter|shape"):
        served.do(served.engine.load_weights(9, broken(published(2, 9), how)))
    served.load(1, 1)
    groups = served.generate(requests(), SAMPLING)
    assert_logprobs(model(1), requests(), groups)


def test_a_cancelled_call_leaves_an_engine_that_goes_on(served):
    served.load(seed=1, version=1)
    before = served.generate(requests(), SAMPLING)

    async def cancelled():
        call = asyncio.ensure_future(
            served.engine.generate(requests([((32, 64),)] * 8), replace(SAMPLING, n=8, max_tokens=300))
        )
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    served.do(cancelled())
    assert_same_bits(served.generate(requests(), SAMPLING), before)
