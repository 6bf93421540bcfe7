"""Rewards inside a Ray actor, as the rollout process runs them: they start there, and never outlive it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from processes import that_run

MODULE = """
import os, sys, threading

def where(response, answer):
    assert threading.current_thread() is threading.main_thread()
    assert "ray" not in sys.modules
    return os.getpid()

def spin(response, answer):
    open(answer, "w").write(str(os.getpid()))
    while True:
        pass
"""


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("ray_session")
def test_reward_processes_start_in_an_actor_and_end_when_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "ray_rewards.py").write_text(MODULE)

    @ray.remote(num_cpus=0)
    class Holder:
        """Keeps rewarders in the event loop of an async actor."""

        async def score(self, folder: str, function: str, answer: str) -> tuple[int, list[float]]:
            from stretto.config import RewardConfig
            from stretto.rollout.reward import Rewarder
            from stretto.types import Prompt, Response

            os.chdir(folder)
            self.rewarder = Rewarder(RewardConfig(function=f"ray_rewards:{function}", workers=2, timeout_s=600))
            await self.rewarder.start()
            ids = np.zeros(1, np.int32)
            fields: dict[str, Any] = {"token_ids": ids, "logprobs": ids.astype(np.float32), "text": "x"}
            response = Response(**fields, finish_reason="stop", version_start=0, version_end=0)
            prompt = Prompt(row_id="row/0", messages=(), answer=answer)
            groups = await asyncio.gather(*(self.rewarder.score(prompt, [response]) for _ in range(4)))
            assert all(score.valid for group in groups for score in group), groups
            return os.getpid(), [group[0].value for group in groups]

    holder = Holder.remote()  # type: ignore[attr-defined]
    actor_pid, pids = ray.get(holder.score.remote(str(tmp_path), "where", ""), timeout=60)
    assert actor_pid not in pids
    idle = that_run("reward_worker", psutil.Process(actor_pid).children())
    assert len(idle) == 2
    assert {int(pid) for pid in pids} <= {p.pid for p in idle}

    spinning = tmp_path / "spinning"
    holder.score.remote(str(tmp_path), "spin", str(spinning))
    _wait_for(lambda: spinning.exists() and spinning.read_text() != "", 30)
    workers = that_run("reward_worker", psutil.Process(actor_pid).children())
    assert len(workers) == 4
    ray.kill(holder)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


def _wait_for(condition: Any, limit_s: float) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(poll(), limit_s))
