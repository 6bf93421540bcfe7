"""The HTTP engine against vLLM's own server, on the CPU: tokens, log-probs, seeds, stops, weights, and its death.

Run by ``make test-vllm``; skipped where vLLM is not installed. Servers listen on loopback, and end with the tests.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import tiny

from stretto.actor.weights import iter_buckets
from stretto.config import ModelConfig
from stretto.models.batch import SampleInput
from stretto.models.loading import load_family, load_model, save_model
from stretto.models.logprobs import token_logprobs
from stretto.models.qwen3_vl import Qwen3VL
from stretto.rollout import http_vllm
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling
from stretto.rollout.http import HttpEngine
from stretto.rollout.vllm_compat import segments
from stretto.types import ProcessedPrompt, Response, StrettoError

pytestmark = pytest.mark.timeout(900)

START_S = 400.0
"""A start takes 20 s on a core of its own."""
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "1024"),
    *("--max-num-seqs", "16", "--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
)
FOR_ROLLOUTS = (
    *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
    *("--no-mm-device-do-normalize", "--no-enable-chunked-prefill"),
)
LAYOUTS: tuple[tuple[tuple[int, int], ...], ...] = (((32, 64),), (), ((64, 32), (32, 32)))


def config(*, tied: bool = False) -> ModelConfig:
    """The tiny model with a head size that vLLM has kernels for."""
    block = copy.deepcopy(tiny.BLOCK)
    block["tie_word_embeddings"] = tied
    block["text"] |= {"head_dim": 32, "hidden_size": 64}
    block["text"]["rope_parameters"] |= {"mrope_section": [8, 4, 4]}
    block["vision"] |= {"hidden_size": 64, "out_hidden_size": 64}
    return ModelConfig(config=block, dtype="float32")


FAMILY: Qwen3VL = load_family(config())


def prompts() -> list[ProcessedPrompt]:
    return [FAMILY.process(tiny.prompt(row, layout)) for row, layout in enumerate(LAYOUTS)]


def requests() -> list[GroupRequest]:
    return [GroupRequest(partition=2, group=group, prompt=prompt) for group, prompt in enumerate(prompts())]


def model(seed: int) -> nn.Module:
    """Weights of a seed, norms included, which are ones where a model is made."""
    made = load_model(config(), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """With what a server that is killed leaves in /dev/shm, 400 MiB of it."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        left = set().union(*(segments(pid) for pid in (self.process.pid, *(p.pid for p in below))))
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for segment in left:
            segment.unlink(missing_ok=True)


@contextmanager
def serving(folder: Path, log: Path, *flags: str) -> Iterator[Server]:
    """A vLLM server, with all of its processes killed at the end, or with this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    libc = ctypes.CDLL(None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_until_well(server, log)
        yield server
    finally:
        if process.poll() is None:
            server.kill()


def wait_until_well(server: Server, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if httpx2.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        ended = server.process.poll() is not None
        assert not ended and time.monotonic() < end, log.read_text(errors="replace")[-4000:]
        time.sleep(0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Of the weights of seed 0."""
    save_model(FAMILY, model(0), folder / "zero")
    with serving(folder / "zero", folder / "zero.log", *FOR_ROLLOUTS) as started:
        yield started


def run(server: Server, folder: Path, work: Callable[[HttpEngine], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        shapes = {name: tuple(p.shape) for name, p in model(0).named_parameters()}
        engine = HttpEngine(
            FAMILY, server.url, shapes=lambda: shapes, folder=folder / "weights", samples=4, timeout_s=120
        )
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def sampled(*, n: int = 4, temperature: float = 1.0, max_tokens: int = 24, stop: Sequence[str] = ()) -> Sampling:
    return Sampling(n=n, temperature=temperature, max_tokens=max_tokens, stop=tuple(stop), seed=7)


def generated(server: Server, folder: Path, sampling: Sampling) -> list[list[Response]]:
    return run(server, folder, lambda engine: engine.generate(requests(), sampling))


def gap(groups: list[list[Response]], of: nn.Module, temperature: float) -> float:
    """Largest difference to log-probs of the trainer's forward."""
    worst = 0.0
    for request, responses in zip(requests(), groups, strict=True):
        batch = FAMILY.collate([SampleInput(request.prompt, r.token_ids) for r in responses])
        with torch.no_grad():
            logits = FAMILY.response_logits(of, batch)
            ours = token_logprobs(logits, batch.response_ids_T, FAMILY.suppressed_V, temperature).numpy()
        worst = max(worst, float(np.abs(ours - np.concatenate([r.logprobs for r in responses])).max()))
    return worst


def bits(groups: list[list[Response]]) -> list[tuple[bytes, bytes, str]]:
    return [(r.token_ids.tobytes(), r.logprobs.tobytes(), r.finish_reason) for group in groups for r in group]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.5, 0.0])
def test_logprobs_are_those_of_the_trainers_forward(server: Server, folder: Path, temperature: float) -> None:
    groups = generated(server, folder, sampled(temperature=temperature))
    assert all(r.error is None for group in groups for r in group)
    assert gap(groups, model(0), temperature or 1.0) <= 2e-5
    held = np.concatenate([r.token_ids for group in groups for r in group])
    assert not FAMILY.suppressed_V[held].any()


def test_seeds_fix_responses_whatever_is_asked_beside_them(server: Server, folder: Path) -> None:
    first, again = (generated(server, folder, sampled()) for _ in range(2))
    assert bits(first) == bits(again)
    fewer = generated(server, folder, sampled(n=2))
    assert bits(fewer) == bits([group[:2] for group in first])
    assert len(set(bits(first))) == 12


def test_a_response_ends_at_its_stop_string_or_its_eos(server: Server, folder: Path) -> None:
    free = generated(server, folder, sampled(max_tokens=100))
    ended = [r for group in free for r in group if r.finish_reason == "stop"]
    assert ended and all(r.token_ids[-1] in FAMILY.eos_ids for r in ended)
    text = free[1][0].text
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    cut = generated(server, folder, sampled(max_tokens=100, stop=[stop]))[1][0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    n = len(cut.token_ids)
    assert cut.token_ids.tolist() == free[1][0].token_ids[:n].tolist() and len(cut.logprobs) == n
    assert stop in FAMILY.decode(cut.token_ids) and stop not in FAMILY.decode(cut.token_ids[:-1])


def test_pixels_are_encoded_as_vllm_reads_them() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

    prompt = prompts()[2]
    first = int(prompt.image_grid_thw[0].prod())
    read = decode_mm_kwargs_item(http_vllm.encode_item(prompt.pixel_values[:first], prompt.image_grid_thw[0]))
    held = read.get_data()
    assert torch.equal(held["pixel_values"], torch.from_numpy(prompt.pixel_values[:first]))
    assert held["image_grid_thw"].tolist() == prompt.image_grid_thw[0].tolist()
    assert read["image_grid_thw"].field.keep_on_cpu and not read["pixel_values"].field.keep_on_cpu


def test_a_bad_request_ends_the_run_and_not_the_server(server: Server, folder: Path) -> None:
    (asked, *_) = requests()
    bad = copy.copy(asked.prompt)
    object.__setattr__(bad, "prompt_ids", np.append(bad.prompt_ids, 99_999).astype(np.int32))
    wrong = GroupRequest(partition=0, group=0, prompt=bad)
    with pytest.raises(StrettoError, match=r"HTTP 400: .*99999"):
        run(server, folder, lambda engine: engine.generate([wrong], sampled()))
    assert len(generated(server, folder, sampled())) == 3


def test_a_cancelled_call_ends_its_requests_there(server: Server, folder: Path) -> None:
    def running() -> float:
        lines = httpx2.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:num_requests_running{"))

    async def work(engine: HttpEngine) -> None:
        call = asyncio.ensure_future(engine.generate(requests() * 4, sampled(max_tokens=200)))
        end = time.monotonic() + 30
        while not running() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        end = time.monotonic() + 30
        while running():
            assert time.monotonic() < end
            await asyncio.sleep(0.1)

    run(server, folder, work)


def test_after_an_update_a_server_is_as_one_started_on_the_weights_and_its_death_is_noticed(
    server: Server, folder: Path
) -> None:
    """Bit for bit, for prompts that it has in its caches; and back again."""
    new, old = model(1), model(0)

    async def work(engine: HttpEngine) -> list[list[list[Response]]]:
        results = []
        await engine.load_weights(0, list(iter_buckets(dict(old.named_parameters()), 0, torch.float32, 50_000)))
        results.append(await engine.generate(requests(), sampled()))
        await engine.load_weights(1, list(iter_buckets(dict(new.named_parameters()), 1, torch.float32, 50_000)))
        results.append(await engine.generate(requests(), sampled()))
        await engine.load_weights(2, list(iter_buckets(dict(old.named_parameters()), 2, torch.float32, 50_000)))
        results.append(await engine.generate(requests(), sampled()))
        # As after a restart by its owner:
        httpx2.post(f"{server.url}/update_weight_version", json={"new_version": "default"})
        with pytest.raises(EngineLost, match="was restarted"):
            await engine.generate(requests(), sampled())
        return results

    before, updated, back = run(server, folder, work)
    assert gap(before, old, 1.0) <= 2e-5 and gap(updated, new, 1.0) <= 2e-5 < gap(updated, old, 1.0)
    assert bits(before) == bits(back) != bits(updated)
    assert {(r.version_start, r.version_end) for group in updated for r in group} == {(1, 1)}

    save_model(FAMILY, new, folder / "one")
    with serving(folder / "one", folder / "one.log", *FOR_ROLLOUTS) as fresh:
        assert bits(generated(fresh, folder, sampled())) == bits(updated)

        async def killed(engine: HttpEngine) -> float:
            call = asyncio.ensure_future(engine.generate(requests() * 8, sampled(max_tokens=200)))
            await asyncio.sleep(0.5)
            assert not call.done()
            begun = time.monotonic()
            fresh.kill()
            with pytest.raises(EngineLost, match=fresh.url):
                await call
            return time.monotonic() - begun

        assert run(fresh, folder, killed) < 20


def test_a_server_without_the_flags_is_refused_with_all_of_them(folder: Path) -> None:
    family = load_family(config(tied=True))
    save_model(family, load_model(config(tied=True), 0), folder / "tied")
    with serving(folder / "tied", folder / "tied.log") as wrong:
        engine = HttpEngine(family, wrong.url, shapes=dict, folder=folder / "weights", samples=4, timeout_s=60)

        async def main() -> None:
            try:
                await engine.start()
            finally:
                await engine.close()

        with pytest.raises(StrettoError) as caught:
            asyncio.run(main())
    for part in ("processed_logprobs", "--no-mm-device-do-normalize", "--no-enable-chunked-prefill", "tie_word"):
        assert part in str(caught.value)
