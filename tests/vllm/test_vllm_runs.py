"""Runs of the real command whose rollout engine is vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import running
from processes import processes_of, still_there, that_run, wait_until_gone
from vllm_case import block

from stretto.observe.raw import read_raw

pytestmark = pytest.mark.timeout(400)
UPDATES = 6


def recipe(folder: Path, run: Path, *, updates: int = UPDATES, **rollout) -> Path:
    """Hybrid-async, staleness 1: 8 prompts x 4 samples a partition, one group a call."""
    return running.recipe(
        folder,
        run={"dir": str(run), "updates": updates, "determinism": "fast"},
        model={"config": block()},
        rollout={
            "engine": "vllm",
            "prompts_per_partition": 8,
            "n_samples_per_prompt": 4,
            "max_response_tokens": 8,
            **rollout,
        },
        actor={"max_tokens_per_microbatch": 256},
        checkpoint={"every": 0},
        eval={"every": 3, "prompts": 12},
    )


def vllm_processes(run: Path) -> list[psutil.Process]:
    """vLLM's own below the engine: the core first. Their titles have taken the place of their environment."""
    deadline = time.monotonic() + 10
    while True:  # a process that ends meanwhile can hide others from whoever lists them
        engines = that_run("EngineProcess", processes_of(run))
        below = [child for engine in engines for child in engine.children()]
        if cores := that_run("EngineCore", below):
            return [cores[0], *cores[0].children(recursive=True)]
        assert time.monotonic() < deadline, [(p.pid, p.ppid(), p.cmdline()) for p in (*engines, *below)]
        time.sleep(0.1)


def trained(run: Path) -> list[tuple[list[int], list[int]]]:
    """Of every update: ``global_index``, and which prompts these are."""
    found = []
    for update in range(UPDATES):
        raw = read_raw(run, update)
        found.append((raw["global_index"].tolist(), np.bitwise_xor(raw["prompt_hash"], raw["image_hash"]).tolist()))
    return found


def test_a_run_whose_engine_is_killed_goes_on_and_trains_every_prompt_once(marked, tmp_path):
    process = running.start(recipe(tmp_path, marked))
    seen = running.wait_for(process, "update 2/6", 200)
    before = vllm_processes(marked)
    open_to = {c.laddr.ip for p in before for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert open_to <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    before[0].kill()
    killed = time.monotonic()
    seen += running.wait_for(process, "restart 1 of 3")
    assert time.monotonic() - killed < 5
    output = seen + running.finish(process, 200)
    assert process.returncode == 0 and "Traceback" not in output, output
    assert "rollout engine 0 died" in output, output
    assert still_there([p.pid for p in before]) == []

    hf = tmp_path / "hf"
    hf.mkdir()
    running.train(recipe(hf, hf / "run", engine="hf"))
    assert trained(marked) == trained(hf / "run")
    rows = running.jsonl(marked, "metrics.jsonl")
    assert rows[-1]["engine_restarts"] == 1 and all(row["failed_samples"] == 0 for row in rows)
    assert all(row["staleness_max"] <= 1 for row in rows)
    # A wrong log-prob would be off by whole units; these are the differences of one update and of rounding.
    assert rows[0]["rollout_gap_max"] < 1e-4
    assert len(running.jsonl(marked, "evaluations.jsonl")) == len(running.jsonl(hf / "run", "evaluations.jsonl"))
    (session,) = json.loads((marked / "manifest.json").read_text())["sessions"]
    (facts,) = session["determinism"]["rollout"]["engines"]
    assert facts["weight_transfer"] == "stretto_host" and facts["engine_args"]["logprobs_mode"] == "processed_logprobs"
    assert not list(marked.glob("vllm-model-*"))


def test_without_restarts_the_run_ends_with_the_first_cause(marked, tmp_path):
    process = running.start(recipe(tmp_path, marked, updates=400, max_engine_restarts=0))
    running.wait_for(process, "update 1/400", 200)
    processes = vllm_processes(marked)
    processes[0].kill()
    killed = time.monotonic()
    output = running.finish(process, 30)
    assert time.monotonic() - killed < 15
    assert process.returncode == 1 and "Traceback" not in output, output
    assert f"rollout engine 0 died: vLLM's process {processes[0].pid} has ended" in output, output
    assert "max_engine_restarts = 0" in output, output
    wait_until_gone(marked, 5)
    assert still_there([p.pid for p in processes]) == []
