"""One measure of log-probs from the engine to the ratio, at every temperature."""

from __future__ import annotations

import dataclasses
import math

import actor_case
import numpy as np
import pytest
import tiny
import torch

from stretto.models.logprobs import token_logprobs
from stretto.rollout.engine import GroupRequest, Sampling
from stretto.rollout.hf import HfEngine


@pytest.mark.case("D6")
def test_the_log_prob_of_fixed_logits_is_that_of_the_distribution_sampled_from():
    """Logits [2, 0], temperature 0.5, token 0: log sigmoid(4). Before the temperature it would be log sigmoid(2), and
    that divided by the temperature is a third, wrong number.
    """
    found = float(token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.zeros(2, dtype=torch.bool), 0.5))
    assert found == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-7) == pytest.approx(-0.0181, abs=5e-5)
    raw = -math.log1p(math.exp(-2))
    assert math.exp(found - raw) == pytest.approx(1.115, abs=5e-4)
    assert math.exp(found - raw / 0.5) == pytest.approx(1.266, abs=5e-4)


@pytest.mark.case("D6")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_ratio_to_the_engines_log_probs_is_one_at_equal_weights(temperature):
    """The engine samples and reports; phase 1 and phase 3 compute for themselves."""
    family = tiny.family()
    sampling = Sampling(n=actor_case.N, temperature=temperature, max_tokens=8, seed=3)
    records, payloads = actor_case.partition()
    requests = [
        GroupRequest(partition=0, group=g, prompt=family.process(tiny.prompt(g, actor_case.IMAGES[g])))
        for g in range(actor_case.GROUPS)
    ]
    groups = HfEngine(family, tiny.model, "cpu").decode(requests, sampling)
    for g, responses in enumerate(groups):
        payloads[g]["response_ids"] = [r.token_ids for r in responses]
        payloads[g]["rollout_logprobs"] = [r.logprobs for r in responses]
        records[g] = dataclasses.replace(records[g], response_tokens=tuple(len(r.token_ids) for r in responses))
    cfg = actor_case.config(rollout={"temperature": temperature})
    actor = actor_case.core(cfg, payloads)
    (metrics,) = actor_case.run_step(actor, records)
    raw = actor.samples.raw()
    ratio = np.exp(raw["old_logprobs"].astype(np.float64) - raw["rollout_logprobs"])
    assert len(ratio) > 50
    assert ratio.mean() == pytest.approx(1.0, abs=1e-5)
    assert np.abs(ratio - 1).max() < 1e-4
    assert metrics["ratio_mean"] == 1.0 and metrics["ratio_deviation_max"] == 0.0
    assert metrics["is_weight_mean"] == pytest.approx(1.0, abs=1e-5)
