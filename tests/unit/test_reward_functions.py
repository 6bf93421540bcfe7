"""What a reward function may return, raise and do, and what becomes of its sample (cases C1, C2 and S8)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from processes import still_there, that_run

from stretto.config import RewardConfig
from stretto.rollout.reward import ABSTAINED, Rewarder, exact_match
from stretto.types import ConfigError, Prompt, Response, Score, StrettoError

FUNCTIONS = """
import math, os, signal, subprocess, sys, threading, time
import numpy as np

RETURNS = {
    "one": 1, "zero": 0, "half": 0.5, "true": True, "false": False, "none": None, "nan": math.nan, "inf": math.inf,
    "huge": 10**400, "f32": np.float32(0.25), "i64": np.int64(3), "b": np.bool_(True), "npnan": np.float16("nan"),
    "text": "1", "list": [1.0, 0.0, 1.0], "array": np.zeros(1),
}

def by_name(response, answer):
    return RETURNS[response]

def misbehave(response, answer):
    if response == "raise":
        raise ValueError("no reward for this\\nand a second line")
    if response == "exit":
        sys.exit(3)
    if response == "os._exit":
        os._exit(7)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "hang":
        while True:
            pass
    if response == "alarm left running":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    if response == "sleep":
        time.sleep(0.2)
    return 1.0

def main_thread_timer(response, answer):
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too slow")))
    signal.alarm(5)
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("not on the main thread")
    return float(response == answer)

def everything(response, answer, **info):
    return float(info == {"row_id": "row/7", "source": "tests", "finish_reason": "length",
                          "messages": [{"role": "user", "content": "?"}]})

def some(response, answer, *, row_id, weight=2.0):
    return weight if row_id == "row/7" else 0.0

def pid(response, answer):
    return os.getpid()

def starts_child(response, answer):
    child = subprocess.Popen(["sleep", "60"])
    open(answer, "w").write(str(child.pid))
    time.sleep(60)

def sleep_one_second(response, answer):
    time.sleep(1.0)
    return 1.0

def note(response, answer):
    time.sleep(0.3 if response == "slow" else 0)
    with open(answer, "a") as file:
        file.write(response + "\\n")
    if response == "bad":
        raise ValueError("bad")
    return "1" if response == "text" else 1.0

async def later(response, answer): return 1.0
def only_response(response): return 1.0
def swapped(answer, response): return 1.0
def needs_more(response, answer, tokens): return 1.0
NUMBER = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module in the current directory; nothing else makes it importable."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def response(text: str, finish_reason: Any = "stop", error: str | None = None) -> Response:
    ids = np.zeros(1, np.int32)
    return Response(
        token_ids=ids,
        logprobs=ids.astype(np.float32),
        text=text,
        finish_reason=finish_reason,
        version_start=0,
        version_end=0,
        error=error,
    )


def prompt(answer: str = "") -> Prompt:
    return Prompt(row_id="row/7", messages=({"role": "user", "content": "?"},), answer=answer, source="tests")


def with_rewarder(
    function: str, body: Callable[[Rewarder], Coroutine[Any, Any, Any]], *, timeout_s: float = 30.0, workers: int = 1
) -> Any:
    async def main() -> Any:
        rewarder = Rewarder(RewardConfig(function=function, timeout_s=timeout_s, workers=workers))
        try:
            await rewarder.start()
            return await body(rewarder)
        finally:
            rewarder.close()
            rewarder.close()  # closing twice is allowed
            assert children() == []

    return asyncio.run(main())


def children() -> list[psutil.Process]:
    return that_run("reward_worker", psutil.Process().children(recursive=True))


def score(function: str, texts: list[str], *, answer: str = "", timeout_s: float = 30.0) -> list[Score]:
    return with_rewarder(function, lambda r: r.score(prompt(answer), [response(t) for t in texts]), timeout_s=timeout_s)


def test_exact_match_ignores_white_space_around_and_nothing_else() -> None:
    texts = ["3+5=8", " 3+5=8\n", "3+5=9", "3 +5=8", ""]
    assert [s.value for s in score("exact_match", texts, answer="3+5=8 ")] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert exact_match("a", "a") == 1.0


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["one", "zero", "one", "half"], [1.0, 0.0, 1.0, 0.5]),
        (["true", "false", "true", "true"], [1.0, 0.0, 1.0, 1.0]),
        (["f32", "i64", "b"], [0.25, 3.0, 1.0]),
    ],
)
def test_numbers_bools_and_numpy_scalars_are_rewards(texts: list[str], values: list[float]) -> None:
    assert score("my_rewards:by_name", texts) == [Score(value=v) for v in values]


def test_none_abstains_and_non_finite_values_fail_each_for_its_own_sample_only() -> None:
    async def body(rewarder: Rewarder) -> None:
        scores = await rewarder.score(prompt(), [response(t) for t in ("one", "none", "nan", "inf", "huge", "npnan")])
        assert [s.valid for s in scores] == [True, False, False, False, False, False]
        assert [s.value for s in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert scores[1].error == ABSTAINED
        assert [s.error for s in scores[2:4]] == ["reward was nan", "reward was inf"]
        assert [s.failure for s in scores] == [None, "abstained", *["nonfinite"] * 4]

    with_rewarder("my_rewards:by_name", body)


@pytest.mark.parametrize(("name", "kind"), [("text", "str"), ("list", "list"), ("array", "ndarray")])
def test_another_type_stops_at_once_and_names_function_type_and_sample(name: str, kind: str) -> None:
    with pytest.raises(StrettoError, match=rf"'my_rewards:by_name' returned a {kind} for sample 1 of row row/7"):
        score("my_rewards:by_name", ["zero", name, "zero", "zero"])


def test_rewards_run_on_the_main_thread_where_timers_work() -> None:
    assert score("my_rewards:main_thread_timer", ["right"] * 7 + ["wrong"], answer="right") == [
        Score(value=1.0)
    ] * 7 + [Score(value=0.0)]


def test_a_raised_exception_fails_one_sample_and_keeps_one_traceback_per_error() -> None:
    async def body(rewarder: Rewarder) -> None:
        texts = ["ok", "raise", "ok", "raise", "exit", "ok"]
        scores = await rewarder.score(prompt(), [response(t) for t in texts])
        assert [s.valid for s in scores] == [True, False, True, False, False, True]
        assert scores[1].error == "reward raised ValueError: no reward for this"
        assert scores[4].error == "reward raised SystemExit: 3"
        assert [s.failure for s in scores] == [None, "raised", None, "raised", "raised", None]
        assert list(rewarder.errors) == [scores[1].error, scores[4].error]
        assert "in misbehave" in rewarder.errors[scores[1].error]
        assert "and a second line" in rewarder.errors[scores[1].error]

    with_rewarder("my_rewards:misbehave", body)


@pytest.mark.parametrize(("how", "words"), [("os._exit", "exit code 7"), ("kill", "SIGKILL")])
def test_a_sample_that_ends_its_process_costs_only_itself(how: str, words: str) -> None:
    scores = score("my_rewards:misbehave", ["ok", how, "ok", how, "ok"])
    assert [s.valid for s in scores] == [True, False, True, False, True]
    assert scores[1].error == f"reward process ended: {words}" and scores[1].failure == "died"


def test_a_sample_that_overruns_its_limit_costs_only_itself_and_is_not_run_again() -> None:
    begun = time.monotonic()
    scores = score("my_rewards:misbehave", ["ok", "hang", "sleep", "ok"], timeout_s=0.5)
    assert [s.valid for s in scores] == [True, False, True, True]
    assert scores[1].error == "reward took longer than reward.timeout_s = 0.5" and scores[1].failure == "timed_out"
    assert time.monotonic() - begun < 5


def test_the_limit_is_per_sample_not_per_group() -> None:
    assert all(s.valid for s in score("my_rewards:misbehave", ["sleep"] * 5, timeout_s=0.6))


def test_a_timer_left_running_does_not_reach_the_next_sample() -> None:
    assert all(s.valid for s in score("my_rewards:misbehave", ["alarm left running", "sleep", "ok"]))


def test_responses_that_failed_in_the_engine_are_not_shown_to_the_function() -> None:
    async def body(rewarder: Rewarder) -> None:
        responses = [
            response("one"),
            response("boom", error="engine fell over"),
            response("boom", finish_reason="abort"),
            response("boom", finish_reason="error"),
        ]
        scores = await rewarder.score(prompt(), responses)
        assert [s.valid for s in scores] == [True, False, False, False]
        assert scores[1].error == "not scored: engine fell over"
        assert scores[2].error == "not scored: finish reason abort"
        assert [s.failure for s in scores] == [None, *["unscored"] * 3]
        assert await rewarder.score(prompt(), responses[1:2]) == scores[1:2]
        assert await rewarder.score(prompt(), []) == []

    with_rewarder("my_rewards:by_name", body)


def test_a_group_settles_whole_before_its_result_is_returned(tmp_path: Path) -> None:
    log = tmp_path / "log"
    scores = score("my_rewards:note", ["bad", "slow", "last"], answer=str(log))
    assert log.read_text().split() == ["bad", "slow", "last"]
    assert [s.valid for s in scores] == [False, True, True]


def test_nothing_of_a_group_runs_after_a_wrong_type_was_raised(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def body(rewarder: Rewarder) -> None:
        with pytest.raises(StrettoError, match="returned a str for sample 1"):
            await rewarder.score(prompt(str(log)), [response(t) for t in ("first", "text", "late", "late")])
        assert await rewarder.score(prompt(str(log)), [response("next group")]) == [Score(value=1.0)]

    with_rewarder("my_rewards:note", body)
    assert log.read_text().splitlines() == ["first", "text", "next group"]


def test_functions_get_the_information_they_name() -> None:
    def body(rewarder: Rewarder) -> Coroutine[Any, Any, list[Score]]:
        return rewarder.score(prompt(), [response("x", finish_reason="length")])

    assert with_rewarder("my_rewards:everything", body) == [Score(value=1.0)]
    assert with_rewarder("my_rewards:some", body) == [Score(value=2.0)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("exactmatch", "write exact_match or module:function"),
        ("my_rewards:", "write exact_match or module:function"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("broken:f", r"module 'broken' cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("my_rewards:absent", "my_rewards.py has no 'absent'"),
        ("my_rewards:NUMBER", "'NUMBER' is a int"),
        ("my_rewards:later", "asynchronous"),
        ("my_rewards:only_response", r"too many positional arguments; its signature is \(response\)"),
        ("my_rewards:swapped", "swap them"),
        ("my_rewards:needs_more", "missing a required argument: 'tokens'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_start(function: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=rf"^reward\.function = '{function}': .*{words}"):
        with_rewarder(function, lambda r: r.score(prompt(), []), workers=2)


def test_a_process_killed_while_idle_is_replaced_without_loss() -> None:
    async def body(rewarder: Rewarder) -> None:
        first = await rewarder.score(prompt(), [response("x")])
        os.kill(int(first[0].value), signal.SIGKILL)
        second = await rewarder.score(prompt(), [response("x"), response("x")])
        assert second[0].valid
        assert second[0] == second[1] != first[0]

    with_rewarder("my_rewards:pid", body)


def test_several_processes_score_several_groups_at_once() -> None:
    async def body(rewarder: Rewarder) -> None:
        begun = time.monotonic()
        groups = await asyncio.gather(*(rewarder.score(prompt(), [response("x")]) for _ in range(4)))
        assert groups == [[Score(value=1.0)]] * 4
        assert time.monotonic() - begun < 3.0  # one process would take 4 s

    with_rewarder("my_rewards:sleep_one_second", body, workers=4)


def test_the_event_loop_is_free_while_rewards_sleep() -> None:
    async def body(rewarder: Rewarder) -> float:
        gaps, running = [], True

        async def heartbeat() -> None:
            last = time.monotonic()
            while running:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        await asyncio.gather(*(rewarder.score(prompt(), [response("x")]) for _ in range(2)))
        running = False
        await beat
        return max(gaps)

    assert with_rewarder("my_rewards:sleep_one_second", body, workers=2) < 0.1


def test_close_ends_a_running_reward_and_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "child"

    async def body(rewarder: Rewarder) -> int:
        running = asyncio.create_task(rewarder.score(prompt(str(noted)), [response("x")]))
        queued = asyncio.create_task(rewarder.score(prompt(str(noted)), [response("x")]))
        while not (noted.exists() and noted.read_text()):
            await asyncio.sleep(0.02)
        begun = time.monotonic()
        rewarder.close()
        assert time.monotonic() - begun < 2
        for task in (running, queued):
            with pytest.raises(StrettoError, match="closed before its group was scored"):
                await task
        with pytest.raises(StrettoError, match="not running"):
            await rewarder.score(prompt(), [response("x")])
        return int(noted.read_text())

    child = with_rewarder("my_rewards:starts_child", body)
    assert not still_there([child], 5)


def test_a_partition_of_failures_stops_the_run_with_the_first_traceback() -> None:
    failed = Score(value=0.0, valid=False, error="reward raised ValueError: no reward for this", failure="raised")
    abstained, good = Score(value=0.0, valid=False, error=ABSTAINED), Score(value=1.0)

    async def body(rewarder: Rewarder) -> None:
        assert await rewarder.score(prompt(), [response("raise")]) == [failed]
        rewarder.check_partition(3, [failed, good, good, failed])
        rewarder.check_partition(3, [abstained] * 4)
        with pytest.raises(StrettoError, match=r"(?s)partition 3: 3 of 4 samples failed.*no reward.*in misbehave"):
            rewarder.check_partition(3, [failed, failed, failed, good])

    with_rewarder("my_rewards:misbehave", body)
    tolerant = Rewarder(RewardConfig(function="my_rewards:misbehave", max_failed_fraction=1.0))
    with pytest.raises(StrettoError, match="4 of 4 samples failed"):
        tolerant.check_partition(0, [failed] * 4)
