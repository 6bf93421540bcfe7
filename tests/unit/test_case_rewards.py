"""Rows C1, C2 and C4 of the collected public reports: from what a reward function does to advantages and gradients."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import actor_case
import numpy as np
import pytest
import torch

from stretto.actor.advantage import estimator
from stretto.actor.loss import policy_loss
from stretto.config import AlgorithmConfig, RewardConfig
from stretto.records import Records
from stretto.rollout.reward import ABSTAINED, Rewarder
from stretto.types import Prompt, Response, Score, StrettoError

FUNCTIONS = """
import math, threading

A = [1, 0, 1, None]
B = [0.5, math.nan, 0.5, 0.5]
LISTS = {
    "a": A, "b": B, "bools": [True, False, True, True], "texts": ["1", 0, 0, 0],
    "infinite": [math.inf, 0, 1, -math.inf], "none": [None] * 4, "short": [[1, 0, 1]] * 4,
    "tuples": [(1.0,)] * 4, "bytes": [b"1", 0, 0, 0], "complex": [1j] * 4,
}

def listed(response, answer):
    name, sample = response.split()
    return LISTS[name][int(sample)]

def both(response, answer):
    sample = int(response.split()[1])
    return A[sample] + B[sample]

def right(response, answer):
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("signal only works in main thread of the main interpreter")
    return float(response == answer)

def third(response, answer):
    if response.endswith("3"):
        raise ValueError("cannot parse\\nthis one")
    return 1.0

def never(response, answer):
    raise ValueError("the grader is down")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "case_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def response(text: str) -> Response:
    ids = np.zeros(1, np.int32)
    return Response(
        token_ids=ids,
        logprobs=ids.astype(np.float32),
        text=text,
        finish_reason="stop",
        version_start=0,
        version_end=0,
    )


class Scored(NamedTuple):
    """A group's scores, how many samples of it failed in which way, and what is kept of each distinct error."""

    scores: list[Score]
    failures: Counter[str]
    errors: dict[str, str]


def scored(function: str, texts: list[str], answer: str = "", workers: int = 1, limit: float = 0.5) -> Scored:
    """Scores of one group, after the check that every partition passes."""

    async def main() -> Scored:
        rewarder = Rewarder(
            RewardConfig(function=f"case_rewards:{function}", workers=workers, max_failed_fraction=limit)
        )
        try:
            await rewarder.start()
            scores = await rewarder.score(
                Prompt(row_id="row-7", messages=(), answer=answer), [response(t) for t in texts]
            )
            rewarder.check_partition(0, scores)
            return Scored(scores, Counter(s.failure for s in scores if s.failure), dict(rewarder.errors))
        finally:
            rewarder.close()

    return asyncio.run(main())


def group(name: str, limit: float = 1.0) -> Scored:
    return scored("listed", [f"{name} {sample}" for sample in range(4)], limit=limit)


def gradient(scores: list[Score]) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages [4] and the gradient of the loss for log-probs of one token a sample [4]."""
    valid = torch.tensor([score.valid for score in scores])
    rewards = torch.tensor([score.value for score in scores], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    advantages = estimator(AlgorithmConfig(advantage_eps=1e-6))(rewards, valid, groups).advantages_B
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    ones = torch.ones(4)
    old = logprobs.detach()
    loss, _ = policy_loss(
        "ppo_clip", logprobs, old, advantages, ones, ones, valid, [1] * 4, clip_low=0.2, clip_high=0.2
    )
    loss.backward()
    assert logprobs.grad is not None
    assert (
        bool(torch.isfinite(advantages).all())
        and bool(torch.isfinite(logprobs.grad).all())
        and math.isfinite(loss.detach())
    )
    return advantages, logprobs.grad


# C1: an exception is no reward ---------------------------------------------------------------------------------------


@pytest.mark.case("C1")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_reward_that_only_works_on_the_main_thread_gives_eight_right_answers_their_reward(workers):
    scores, failures, _ = scored("right", ["42"] * 8, answer="42", workers=workers)
    assert scores == [Score(value=1.0)] * 8
    assert not failures


@pytest.mark.case("C1")
def test_a_reward_that_raises_for_sample_3_leaves_seven_right_and_is_counted_with_its_traceback():
    scores, failures, errors = scored("third", [f"sample {i}" for i in range(8)])
    assert [score.valid for score in scores] == [i != 3 for i in range(8)]
    assert [score.value for score in scores if score.valid] == [1.0] * 7
    assert scores[3].error == "reward raised ValueError: cannot parse"
    assert failures == {"raised": 1}
    assert "in third" in errors[scores[3].error] and "this one" in errors[scores[3].error]


@pytest.mark.case("C1")
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_failures_of_all_samples_stop_the_run_with_the_first_traceback(limit):
    with pytest.raises(StrettoError, match=r"(?s)8 of 8 samples failed.*the grader is down.*in never"):
        scored("never", ["x"] * 8, limit=limit)


# C2: what is no number -----------------------------------------------------------------------------------------------


@pytest.mark.case("C2")
def test_none_abstains_and_a_nan_is_a_failed_sample_and_neither_reaches_advantages_or_gradients():
    scores, failures, _ = group("a")
    assert [(s.value, s.valid) for s in scores] == [(1.0, True), (0.0, True), (1.0, True), (0.0, False)]
    assert scores[3].error == ABSTAINED and failures == {"abstained": 1}
    advantages, grad = gradient(scores)
    # mean 2/3, unbiased variance (1/9 + 4/9 + 1/9) / 2 = 1/3
    expected = [(1 - 2 / 3) * math.sqrt(3), (-2 / 3) * math.sqrt(3), (1 - 2 / 3) * math.sqrt(3), 0.0]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5)
    assert grad[3] == 0 and (grad[:3] != 0).all()

    scores, failures, _ = group("b")
    assert [(s.value, s.valid) for s in scores] == [(0.5, True), (0.0, False), (0.5, True), (0.5, True)]
    assert scores[1].error == "reward was nan" and failures == {"nonfinite": 1}
    advantages, grad = gradient(scores)
    assert advantages.tolist() == [0.0] * 4 and not grad.any()


@pytest.mark.case("C2")
def test_two_functions_added_up_fail_where_either_gives_no_number():
    scores, failures, _ = scored("both", [f"x {sample}" for sample in range(4)], limit=1.0)
    assert [s.valid for s in scores] == [True, False, True, False]
    assert failures == {"nonfinite": 1, "raised": 1}  # 0 + NaN, None + 0.5
    assert [s.value for s in scores] == [1.5, 0.0, 1.5, 0.0]


@pytest.mark.case("C2")
def test_bools_are_one_and_zero():
    scores, _, _ = group("bools")
    assert scores == [Score(value=v) for v in (1.0, 0.0, 1.0, 1.0)]
    assert all(type(score.value) is float for score in scores)


@pytest.mark.case("C2")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("texts", "str"), ("short", "list"), ("tuples", "tuple"), ("bytes", "bytes"), ("complex", "complex")],
)
def test_a_string_a_list_and_other_types_stop_the_run_at_once(name, kind):
    """A function scores one sample, so that a list of 3 for 4 samples is a wrong type for the first of them."""
    with pytest.raises(StrettoError, match=rf"returned a {kind} for sample 0 of row row-7"):
        group(name)


@pytest.mark.case("C2")
def test_infinities_are_failed_samples_and_all_none_has_no_weight():
    scores, failures, _ = group("infinite")
    assert [s.valid for s in scores] == [False, True, True, False]
    assert {s.error for s in scores if not s.valid} == {"reward was inf", "reward was -inf"} and failures == {
        "nonfinite": 2
    }
    gradient(scores)
    scores, failures, _ = group("none", limit=0.0)  # abstaining is no failure, whatever the limit
    assert failures == {"abstained": 4}
    advantages, grad = gradient(scores)
    assert advantages.tolist() == [0.0] * 4 and not grad.any()


# C4: degenerate groups -----------------------------------------------------------------------------------------------


def advantages(
    rewards: Any, groups: list[int], valid: list[bool] | None = None, eps: float = 1e-6, **options: Any
) -> Any:
    rewards = torch.as_tensor(rewards)
    ok = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    return estimator(AlgorithmConfig(advantage_eps=eps, **options))(rewards, ok, torch.tensor(groups))


@pytest.mark.case("C4")
@pytest.mark.parametrize(
    "rewards", [np.full(7, 0.9, np.float32), np.full(3, 0.1), np.full(3, 0.1, np.float32), np.full(5, 1e8, np.float32)]
)
def test_equal_rewards_are_exactly_zero_where_their_computed_deviation_is_not(rewards):
    """(1), (2): the float32 deviation of seven 0.9 is 6.4e-8, which an eps of 1e-6 turns into advantages of 0.056."""
    if len(rewards) == 7:
        assert 0 < np.std(rewards, ddof=1) < 1e-6
    result = advantages(rewards, [0] * len(rewards))
    assert result.advantages_B.tolist() == [0.0] * len(rewards)
    assert (result.groups, result.zero_signal_groups) == (1, 1)


@pytest.mark.case("C4")
def test_a_leave_one_out_advantage_stays_what_it_is_where_the_others_deviation_is_a_rounding_error():
    """(3): the float32 deviation of seven 0.35 by E[x^2] - E[x]^2 is 1.5e-4, by which 0.6 would become some 4000."""
    rewards = np.array([0.95] + [0.35] * 7, np.float32)
    others = rewards[1:]
    assert 0.6 / np.sqrt(abs((others * others).mean() - others.mean() ** 2)) > 3000
    result = advantages(rewards, [0] * 8, advantage="rloo").advantages_B
    np.testing.assert_allclose(result.numpy(), [0.6] + [0.35 - (0.95 + 6 * 0.35) / 7] * 7, rtol=1e-6)


@pytest.mark.case("C4")
def test_a_group_of_one_is_zero_and_not_nan():
    result = advantages([5.0, 1.0, 0.0], [3, 8, 8])
    assert result.advantages_B[0] == 0.0 and bool(torch.isfinite(result.advantages_B).all())
    assert (result.groups, result.zero_signal_groups) == (2, 1)


@pytest.mark.case("C4")
def test_a_lost_sample_shifts_no_group():
    """(5): A = [1, 1, 0] and a lost one, B = [0, 0, 1, 0], rows interleaved: means 2/3 and 1/4 by id, in any order."""
    rows = [("A", 1.0, True), ("B", 0.0, True), ("A", 1.0, True), ("B", 0.0, True), ("A", 0.0, True), ("B", 1.0, True)]
    rows += [("A", 0.0, False), ("B", 0.0, True)]
    means = {"A": Fraction(2, 3), "B": Fraction(1, 4)}
    deviations = {"A": math.sqrt(1 / 3), "B": 0.5}
    for order in (rows, rows[::-1], sorted(rows)):
        result = advantages(
            [r for _, r, _ in order], [ord(g) for g, _, _ in order], [v for _, _, v in order], eps=0.0
        ).advantages_B
        expected = [(r - float(means[g])) / deviations[g] if v else 0.0 for g, r, v in order]
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-7)
    kept = [row for row in rows if row[2]]  # the lost one not there at all
    result = advantages([r for _, r, _ in kept], [ord(g) for g, _, _ in kept], eps=0.0).advantages_B
    np.testing.assert_allclose(result.numpy(), [(r - float(means[g])) / deviations[g] for g, r, _ in kept], rtol=1e-6)


class Heard:
    """A progress display that remembers its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str, **_: Any) -> None:
        self.notes.append(message)

    def step(self, _: Any) -> None: ...


@pytest.mark.case("C4")
def test_a_batch_without_signal_trains_to_nothing_and_says_so(tmp_path):
    """There is no refill that could go on for ever: the partition is trained as it is, which moves no weight."""
    records, payloads = actor_case.partition()
    records = [dataclasses.replace(r, rewards=(0.9,) * 3, valid=(True,) * 3) for r in records]
    actor = actor_case.core(actor_case.config(), payloads)
    before = {name: tensor.clone() for name, tensor in actor_case.parameters(actor).items()}
    (metrics,) = actor_case.run_step(actor, records)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert metrics["zero_signal_groups"] == metrics["groups"] == 4
    actor_case.assert_equal_bits(actor_case.parameters(actor), before)
    assert said(tmp_path, metrics) == [
        "update 1: the rewards of each of its 4 groups are equal, so that it learnt nothing; look at the reward, the "
        "temperature and how hard the prompts are"
    ]
    some = metrics | {"zero_signal_groups": 3.0}
    assert said(tmp_path, some) == []
    heard = said(tmp_path, *[metrics] * 25, some, metrics)  # once, at every tenth in a row, and when it comes again
    assert [line.partition(":")[0] for line in heard] == ["update 1", "update 10", "update 20", "update 27"]
    assert "groups are equal, as for 20 updates in a row, so that" in heard[2]


def said(folder: Path, *updates: dict[str, float]) -> list[str]:
    """The notes of updates with these metrics."""
    from stretto.records import Step

    heard = Heard()
    records = Records(folder, 0, heard)  # type: ignore[arg-type]
    records.begin()
    needed = dict.fromkeys(("tokens", "response_tokens", "staleness_mean", "exposed_wait_s", "rollout_waited_s"), 1.0)
    for k, metrics in enumerate(updates):
        step = Step(k)
        step.merge(metrics | needed)
        records.step(step)
    records.close()
    return heard.notes
