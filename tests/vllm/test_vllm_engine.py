"""What only the ``vllm`` engine promises: bad input, weights on the fly, checked weights, and its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from processes import still_there
from vllm_case import (
    GAP,
    assert_logprobs,
    assert_same_bits,
    config,
    flat,
    model,
    published,
    requests,
    trainer_logprobs,
)

from stretto import build
from stretto.rollout import vllm_compat
from stretto.rollout.engine import EngineLost, Sampling
from stretto.rollout.vllm_transfer import HostTransfer
from stretto.types import ConfigError, StrettoError

pytestmark = pytest.mark.timeout(180)
SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=12, seed=3)


@pytest.fixture
def served(started):
    served = started("vllm")
    served.load(1, 1)
    return served


def spoiled(what):
    """A request whose prompt does not fit together."""
    (request,) = requests([((32, 64),)])
    prompt = request.prompt
    if what == "grid":
        changed = {"image_grid_thw": prompt.image_grid_thw + np.array([0, 2, 0], np.int32)}
    elif what == "pixels":
        changed = {"pixel_values": prompt.pixel_values[:-1]}
    elif what == "image token":
        types = prompt.mm_token_type_ids.copy()
        types[np.flatnonzero(types)[0]] = 0
        changed = {"mm_token_type_ids": types}
    else:
        changed = {
            "prompt_ids": np.tile(prompt.prompt_ids[-1:], 501),
            "mm_token_type_ids": np.zeros(501, np.int8),
            "pixel_values": prompt.pixel_values[:0],
            "image_grid_thw": prompt.image_grid_thw[:0],
        }
    return replace(request, prompt=replace(prompt, **changed))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("grid", r"do not fit together: \d+ ids, image tokens at \['\d+-\d+'\], grids \[\[1, 4, 4\]\]"),
        ("pixels", "7 patches"),
        ("image token", "do not fit together"),
        ("length", r"prompt of 501 tokens and a response of 12 do not fit .*max_model_len = 512"),
    ],
)
def test_a_prompt_that_can_not_be_taken_is_refused_and_the_engine_goes_on(served, what, message):
    good = requests()
    before = served.generate(good, SAMPLING)
    with pytest.raises(StrettoError, match=message):
        served.generate([*good, spoiled(what)], SAMPLING)
    assert_same_bits(served.generate(good, SAMPLING), before)


def test_a_temperature_that_vllm_refuses_is_no_death(served):
    with pytest.raises(StrettoError, match="temperature"):
        served.generate(requests(), replace(SAMPLING, temperature=3.0))
    assert_logprobs(model(1), requests(), served.generate(requests(), SAMPLING))


def test_many_calls_at_once_are_served_together(served):
    """What the router sends: a group a call, each with the tokens that it has alone."""
    asked = requests([((32, 64),), (), ((64, 32), (32, 32))] * 8)
    alone = [served.generate([q], SAMPLING)[0] for q in asked[:3]]

    async def together():
        return await asyncio.gather(*(served.engine.generate([q], SAMPLING) for q in asked))

    groups = [group for (group,) in served.do(together())]
    assert_logprobs(model(1), asked, groups)
    assert [[r.token_ids.tolist() for r in g] for g in groups[:3]] == [[r.token_ids.tolist() for r in g] for g in alone]
    assert served.engine.concurrency == 256 // 8


def test_tokens_are_stamped_with_the_weights_that_made_them(served):
    """Two updates while responses are under way: each token has the log-prob of the version on its stamp, and not of
    the other ones.
    """
    asked, long = requests(), replace(SAMPLING, n=6, max_tokens=300, temperature=1.5)

    async def updated_twice():
        call = asyncio.ensure_future(served.engine.generate(asked, long))
        for version in (2, 3):
            await asyncio.sleep(0.7)
            await served.engine.load_weights(version, published(version, version))
        late = asyncio.ensure_future(served.engine.generate(asked[:1], SAMPLING))
        return await call, await late

    groups, late = served.do(updated_twice())
    by = {version: trainer_logprobs(model(version), asked, groups, 1.5) for version in (1, 2, 3)}
    seen = set()
    for i, r in enumerate(flat(groups)):
        stamps = np.full(len(r.token_ids), r.version_start) if r.token_versions is None else r.token_versions
        assert (r.version_start, r.version_end) == (stamps[0], stamps[-1]) and (np.diff(stamps) >= 0).all()
        seen |= {tuple(np.unique(stamps))}
        for version in (1, 2, 3):
            gap = np.abs(r.logprobs - by[version][i])
            np.testing.assert_array_less(gap[stamps == version], 2 * GAP)
            assert gap[stamps != version].max(initial=1) > 0.1  # the stamp means something
    assert (1, 2, 3) in seen
    assert {(r.version_start, r.version_end) for r in flat(late)} == {(3, 3)}


def test_what_comes_and_goes_while_weights_are_taken_is_stamped_right_and_ends_nothing(served, monkeypatch):
    """A request that is made during an update waits, and is of the new version alone; one that is given up then, as
    one that is over, is nobody's concern.
    """
    asked, long = requests(partition=7), replace(SAMPLING, n=4, max_tokens=300, temperature=1.5)
    engine, send = served.engine, served.engine._transfer.send

    async def body():
        before = asyncio.ensure_future(engine.generate(asked[:2], long))
        given_up = asyncio.ensure_future(engine.generate(asked[2:], long))
        late = []

        async def meanwhile(version, weights, update):
            late.append(asyncio.ensure_future(engine.generate(asked[:1], SAMPLING)))
            given_up.cancel()
            await asyncio.sleep(0.5)
            return await send(version, weights, update)

        monkeypatch.setattr(engine._transfer, "send", meanwhile)
        await asyncio.sleep(0.7)
        await engine.load_weights(4, published(4, 4))
        assert given_up.cancelled()
        return await before, await late[0]

    before, late = served.do(body())
    ends = [(r.version_start, r.version_end) for r in flat(before)]  # some may be over before
    assert (1, 4) in ends and set(ends) <= {(1, 1), (1, 4)}
    assert {(r.version_start, r.version_end, r.token_versions is None) for r in flat(late)} == {(4, 4, True)}
    assert_logprobs(model(4), asked[:1], late)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.1.self_attn.k_proj.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "model.language_model.layers.1.mlp.down_proj.weight",
        "model.language_model.norm.weight",
        "model.visual.blocks.1.attn.qkv.weight",
        "model.visual.blocks.1.attn.qkv.bias",
        "model.visual.patch_embed.proj.weight",
        "model.visual.merger.linear_fc2.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_arrive_wrong_are_found(started, monkeypatch, name, tied):
    if tied and name == "lm_head.weight":
        pytest.skip("a tied model has none")
    served = started("vllm", tied=tied)
    put = HostTransfer._put

    def wrong(self, bucket):
        data = [
            array + np.float32(1e-3) if meta.name == name else array
            for meta, array in zip(bucket.metas, bucket.data, strict=True)
        ]
        return put(self, replace(bucket, data=tuple(data)))

    monkeypatch.setattr(HostTransfer, "_put", wrong)
    monkeypatch.setattr("stretto.models.weight_sample.TENSORS", 1000)
    with pytest.raises(
        StrettoError, match=rf"version 4 .* in 1 of \d+ tensors that were compared: {name}: .* differ"
    ) as e:
        served.load(2, 4, tied)
    assert ("as the output layer" in str(e.value)) == (tied and "embed_tokens" in name)
    monkeypatch.setattr(HostTransfer, "_put", put)
    served.load(2, 4, tied)
    assert_logprobs(model(2, tied), requests(), served.generate(requests(), SAMPLING))


def segments(processes):
    """Names in /dev/shm that these processes have open."""
    found = set()
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                found.add(line.split(maxsplit=5)[5])
    return found


def test_nothing_in_dev_shm_has_a_name(served):
    assert segments(vllm_compat.processes(served.engine._llm)) == set()


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_process_is_an_engine_lost_within_seconds(started, victim):
    """The core while it generates; a worker while nothing is asked of it, which vLLM itself does not notice."""
    served = started("vllm", tied=victim == "core", seed=2)
    processes = vllm_compat.processes(served.engine._llm)
    core = processes[0]
    target = core if victim == "core" else next(p for p in core.children() if "Worker" in " ".join(p.cmdline()))

    async def killed():
        calls = []
        if victim == "core":
            calls = [
                asyncio.ensure_future(served.engine.generate([q], replace(SAMPLING, max_tokens=400))) for q in asked
            ]
            await asyncio.sleep(0.5)
        os.kill(target.pid, signal.SIGKILL)
        begun = time.monotonic()
        if victim == "core":
            ended = await asyncio.gather(*calls, return_exceptions=True)
        else:
            ended = await asyncio.gather(
                served.engine.load_weights(1, published(1, 1, tied=False)), return_exceptions=True
            )
        assert all(isinstance(error, EngineLost) for error in ended)
        assert "has ended" in str(ended[0]) or "vLLM failed" in str(ended[0])
        return time.monotonic() - begun

    asked = requests()
    assert served.do(killed()) < 5
    with pytest.raises(EngineLost):
        served.generate(asked, SAMPLING)
    served.close()
    assert still_there([p.pid for p in processes]) == []


def test_vllm_ends_with_an_engine_whose_process_is_killed(tmp_path):
    """As the driver of a run may be, with all that Ray started."""
    code = (
        "import asyncio, time; from vllm_case import Served, config; from stretto.rollout import vllm_compat\n"
        f"s = Served(config({str(tmp_path)!r}, 'vllm'))\n"
        "print('pids', *(p.pid for p in vllm_compat.processes(s.engine._llm)), flush=True); time.sleep(600)"
    )
    folders = ":".join([*(str(Path(p)) for p in sys.path if "tests" in p), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": folders}
    )
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("pids"))  # vLLM writes there too
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) >= 2 and not any(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids)
    process.kill()
    process.wait()
    assert still_there(pids, limit_s=5) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "engine_args.logprobs_mode"),
        ({"seed": 3}, "set run.seed"),
        ({"max_model_length": 64}, "did you mean 'max_model_len'"),
    ],
)
def test_engine_arguments_that_are_not_the_users_are_refused(tmp_path, arguments, message):
    async def start():
        engine = build.engine(config(tmp_path, "vllm", engine_args=arguments), "cpu", 0)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=message):
        asyncio.run(start())
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_all_processes(started):
    served = started("vllm")
    processes = vllm_compat.processes(served.engine._llm)
    assert len(processes) >= 2 and all(isinstance(p, psutil.Process) for p in processes)
    begun = time.monotonic()
    served.close()
    assert time.monotonic() - begun < 3
    assert still_there([p.pid for p in processes], limit_s=1) == []
