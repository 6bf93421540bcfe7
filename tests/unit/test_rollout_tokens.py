"""Token ids on their whole way: engine, scheduler, payload of the data plane, actor. Text is for the reward only."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tiny
from actor_case import config, core, run_step
from rollout_case import rollout
from stub_engine import StubEngine, response, weights

from stretto.plane.payload import check_group, pack_group, unpack_group
from stretto.rollout.engine import Sampling
from stretto.rollout.router import Offer
from stretto.types import PartitionPlan


def trained(answers, reward="exact_match", **rollout_options):
    """What the actor holds after one update on one group of ``answers`` (and a second one like it), its records and its
    metrics.
    """
    n = len(answers)
    engine = StubEngine(answer=lambda request, sample, version: answers[sample])

    async def body():
        async with rollout(
            lambda _: engine, m=2, reward=reward, sampling=Sampling(n=n, temperature=1.0, max_tokens=6)
        ) as case:
            plan = PartitionPlan(partition=0, version=0, epochs=(0, 0), rows=(0, 1))
            await case.scheduler.run(plan, tiny.prompt, Offer(0, weights(0)))
            return sorted(case.arrived, key=lambda pair: pair[0].group)

    arrived = asyncio.run(body())
    for record, fields in arrived:
        check_group(record, fields, "here")
    payloads = {record.group: unpack_group(pack_group(fields)) for record, fields in arrived}
    cfg = config(rollout={"prompts_per_partition": 2, "n_samples_per_prompt": n, **rollout_options}, staleness=0)
    actor = core(cfg, payloads)
    records = [record for record, _ in arrived]
    (metrics,) = run_step(actor, records, groups_per_mini=2)
    return actor.samples.raw(), records, metrics


def responses_of(raw):
    return [ids.tolist() for ids in np.split(raw["response_ids"], np.cumsum(raw["lengths"])[:-1])]


@pytest.mark.case("B4")
def test_the_trainers_ids_are_the_engines_even_where_its_text_would_be_tokenised_otherwise():
    family = tiny.family()
    tokenizer = family.tokenizer
    ids = tokenizer("user").input_ids
    pieces = [i for part in ("us", "er") for i in tokenizer(part).input_ids]
    snowman = tokenizer("\u2603").input_ids  # several bytes
    incomplete = snowman[:1]
    assert family.decode(pieces) == "user" and tokenizer(family.decode(pieces)).input_ids != pieces
    assert tokenizer(family.decode(incomplete)).input_ids != incomplete
    answers = [response(i, 0, text=family.decode(i)) for i in (pieces, incomplete, ids)]
    raw, records, _ = trained(answers)
    assert responses_of(raw) == [pieces, incomplete, ids] * 2
    assert raw["rollout_logprobs"].tolist() == [-x for r in answers for x in range(1, len(r.token_ids) + 1)] * 2
    assert records[0].response_tokens == (len(pieces), len(incomplete), len(ids))


@pytest.mark.case("B5")
def test_loss_tokens_come_from_lengths_where_pad_is_eos_and_responses_end_in_every_way(monkeypatch):
    family = tiny.family()
    eos = family.eos_ids[0]
    monkeypatch.setattr(family, "pad_id", eos)
    right = tiny.prompt(0).answer
    answers = [
        response([5, 6, eos], 0, text=right),
        response([5, 6, 7, 8, 9, 10], 0, finish_reason="length"),
        response([eos], 0, text=""),
        response([], 0, text=""),
        response([5, 6], 0, text="before the stop string"),
    ]
    raw, records, metrics = trained(answers)
    lengths = [3, 6, 1, 0, 2]
    assert raw["lengths"].tolist() == lengths * 2 and metrics["loss_tokens"] == 2 * sum(lengths)
    assert responses_of(raw) == [[5, 6, eos], [5, 6, 7, 8, 9, 10], [eos], [], [5, 6]] * 2
    for name in ("old_logprobs", "train_logprobs", "rollout_logprobs"):
        assert len(raw[name]) == 2 * sum(lengths) and np.isfinite(raw[name]).all()
    assert records[0].truncated == (False, True, False, False, False)
    assert records[0].rewards == (1.0, 0.0, 0.0, 0.0, 0.0) and records[0].valid == (True,) * 5
    # Mean 0.2 over all five, the empty one among them; unbiased variance (0.8**2 + 4 * 0.2**2) / 4 = 0.2.
    std = 0.2**0.5 + 1e-4
    np.testing.assert_allclose(raw["advantages"], [0.8 / std, *[-0.2 / std] * 4] * 2, rtol=1e-6)
    assert metrics["update_skipped"] == 0 and np.isfinite(metrics["grad_norm"])


@pytest.mark.case("B5")
def test_the_end_token_gets_a_gradient_where_it_was_sampled():
    """Two runs that differ in the sampled EOS alone end in different weights: it is trained, not masked as padding."""
    eos = tiny.family().eos_ids[0]
    other = response([5, 7, 8], 0)
    with_eos = trained([response([5, 6, eos], 0, text=tiny.prompt(0).answer), other])[2]
    without = trained([response([5, 6], 0, text=tiny.prompt(0).answer), other])[2]
    assert with_eos["loss_tokens"] == 12 and without["loss_tokens"] == 10
    assert with_eos["grad_norm"] != pytest.approx(without["grad_norm"], rel=1e-3)
