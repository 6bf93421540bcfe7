"""Reward processes and the process that owns them: whatever ends the owner ends them too (case E5)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

OWNER = """
import asyncio, sys
import numpy as np
from stretto.config import RewardConfig
from stretto.rollout.reward import Rewarder
from stretto.types import Prompt, Response

# No main guard: reward processes must not run the script of their owner again (case F1).
ids = np.zeros(1, np.int32)
response = Response(token_ids=ids, logprobs=ids.astype("f4"), text="x",
    finish_reason="stop", version_start=0, version_end=0)

async def main():
    rewarder = Rewarder(RewardConfig(function="busy:spin", workers=2, timeout_s=600))
    await rewarder.start()
    await rewarder.score(Prompt(row_id="r", messages=()), [response])

print("owner runs", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_reward_process_outlives_its_owner(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import subprocess\n"
        "def spin(response, answer):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    with open('spinning.new', 'w') as file: file.write(str(child.pid))\n"
        "    __import__('os').rename('spinning.new', 'spinning')\n"
        "    while True: pass\n"
    )
    (tmp_path / "owner.py").write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, "owner.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        wait_for(lambda: (tmp_path / "spinning").exists(), 30)
        workers = psutil.Process(owner.pid).children(recursive=True)
        assert len(workers) == 5  # each with its guardian, and what the function has started
        assert int((tmp_path / "spinning").read_text()) in {p.pid for p in workers}
        os.kill(owner.pid, how)
        output, _ = owner.communicate(timeout=10)
    finally:
        owner.kill()
    assert output == "owner runs\n"
    assert owner.returncode != 0
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def test_a_reward_process_loads_the_users_module_and_no_framework(tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(
        "import sys\ndef count(response, answer):\n"
        "    return len(sys.modules.keys() & {'torch', 'ray', 'transformers', 'numpy', 'pydantic', 'stretto'})\n"
    )
    script = (
        textwrap.dedent(OWNER)
        .replace("busy:spin", "light:count")
        .replace("await rewarder.score", "print(await rewarder.score")
    )
    script = script.replace("[response])\n", "[response]))\n    rewarder.close()\n")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Score(value=0.0, valid=True" in done.stdout, done.stderr


def wait_for(condition: object, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
