"""The HTTP engine against a small real server on loopback that misbehaves on purpose.

``tests/vllm/test_http_engine.py`` runs it against vLLM's own server.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tiny
import torch
from http_stand_in import TOKENS, StandIn
from safetensors.numpy import load_file

from stretto import build
from stretto.actor.weights import iter_buckets
from stretto.config import Config
from stretto.observe.trace import Tracer
from stretto.rollout import http, http_client
from stretto.rollout.engine import EngineLost, GroupRequest, Sampling
from stretto.rollout.http import HttpEngine
from stretto.rollout.http_vllm import is_norm, weight_name
from stretto.rollout.http_weights import WeightFolder, digests
from stretto.rollout.noise import sample_key
from stretto.rollout.router import DecodeBatch, Offer, Router
from stretto.types import StrettoError

SAMPLING = Sampling(n=2, temperature=0.7, max_tokens=TOKENS, seed=3)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "RETRY_WAITS_S", (0.01, 0.02, 0.04))
    monkeypatch.setattr(http, "START_S", 0.2)
    monkeypatch.setattr(http, "RESTART_S", 5.0)


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


@pytest.fixture
def old_server() -> Iterator[StandIn]:
    stand_in = StandIn(speaks="0.26")
    yield stand_in
    stand_in.close()


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in tiny.model().named_parameters()}


@cache
def published(version: int, bucket_bytes: int = 40_000) -> list:
    named = dict(tiny.model(seed=version).named_parameters())
    return list(iter_buckets(named, version, torch.float32, bucket_bytes))


def request(group: int = 0, images: tuple[tuple[int, int], ...] = ((32, 64), (64, 32))) -> GroupRequest:
    return GroupRequest(partition=1, group=group, prompt=tiny.family().process(tiny.prompt(group, images)))


def run(server: StandIn, folder: Path, work: Callable[[HttpEngine], Awaitable[Any]], **options: Any) -> Any:
    """What ``work`` returns of a started engine, which is closed."""

    async def main() -> Any:
        known: dict[str, Any] = {"shapes": shapes, "folder": folder, "samples": 2, "timeout_s": 20.0}
        engine = HttpEngine(tiny.family(), server.url, **(known | options))
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()
            assert len(asyncio.all_tasks()) == 1, "tasks are left"

    return asyncio.run(main())


async def nothing(engine: HttpEngine) -> None:
    pass


async def one_group(engine: HttpEngine) -> list:
    return (await engine.generate([request()], SAMPLING))[0]


# Start --------------------------------------------------------------------------------------------------------------


def test_a_start_says_what_the_server_is(server: StandIn, tmp_path: Path) -> None:
    server.options["invariant"] = True

    async def told(engine: HttpEngine) -> None:
        assert (await engine.start())["vllm"] == "0.32.0"
        assert (engine.fixed_batches, engine.live_update, engine.batch_invariant) == (False, False, False)
        assert engine.concurrency == 4  # 8 requests at once, 2 a group
        assert engine.version == -1

    run(server, tmp_path, told)


def test_every_option_that_would_spoil_rollouts_is_named_at_once(server: StandIn, tmp_path: Path) -> None:
    server.options |= {"logprobs_mode": "raw_logprobs", "mm_device_do_normalize": True, "device": "cpu"}
    server.options["quantization"] = "fp8"
    with pytest.raises(StrettoError) as caught:
        run(server, tmp_path, nothing)
    for part in (
        server.url,
        "--logprobs-mode processed_logprobs",
        "--no-mm-device-do-normalize",
        "fp8",
        "--no-enable-chunked-prefill",
        "tie_word_embeddings",
    ):
        assert part in str(caught.value)


def test_more_masked_ids_than_a_gpus_runner_takes_are_refused(server: StandIn, tmp_path: Path) -> None:
    family = copy.copy(tiny.family())
    family.suppressed_V = torch.ones(1200, dtype=torch.bool)
    engine = HttpEngine(family, server.url, shapes=shapes, folder=tmp_path, samples=2, timeout_s=20)
    with pytest.raises(StrettoError, match=r"1200 ids have to be masked .* it takes 1024"):
        asyncio.run(engine.start())
    assert list(tmp_path.glob("*/*")) == []


def test_a_probe_finds_raw_logprobs_whatever_the_options_say(server: StandIn, tmp_path: Path) -> None:
    server.measure = "raw_logprobs"
    with pytest.raises(StrettoError, match=r"log-prob \[-3.0\], not 0.*--logprobs-mode processed_logprobs"):
        run(server, tmp_path, nothing)


def test_routes_that_are_off_are_named_with_what_turns_them_on(server: StandIn, tmp_path: Path) -> None:
    server.scale_out = False
    with pytest.raises(StrettoError, match=r"/inference/v1/generate: HTTP 403: Scale-out.*set --enable-scale-out"):
        run(server, tmp_path, nothing)
    server.blind = {"/server_info"}
    with pytest.raises(StrettoError, match=r"server_info.*HTTP 404: Not Found; set VLLM_SERVER_DEV_MODE=1"):
        run(server, tmp_path, nothing)
    server.blind = {"/version"}
    with pytest.raises(StrettoError, match="is this a vLLM server"):
        run(server, tmp_path, nothing)


def test_a_folder_that_the_server_does_not_see_is_found_before_any_update(server: StandIn, tmp_path: Path) -> None:
    server.sees_folder = False
    with pytest.raises(StrettoError, match=r"cannot read weights from .*probe.*put run.dir on a file system"):
        run(server, tmp_path, nothing)


def test_a_server_left_paused_by_an_earlier_run_is_resumed(server: StandIn, tmp_path: Path) -> None:
    server.paused = True
    run(server, tmp_path, nothing)
    assert not server.paused


def test_no_server_is_a_lost_engine_that_names_it(tmp_path: Path) -> None:
    server = StandIn()
    server.close()
    with pytest.raises(EngineLost, match=rf"GET {server.url}/health: .*asked for 0.2 s"):
        run(server, tmp_path, nothing)


def test_a_server_that_the_run_has_used_is_given_the_time_to_come_back(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(server, tmp_path, nothing)
    server.healthy = False
    timer = threading.Timer(0.8, lambda: setattr(server, "healthy", True))
    timer.start()
    run(server, tmp_path, nothing)
    timer.join()


def test_a_refusal_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(http_client.Refused("GET x: HTTP 404: no", 404)))
    assert (str(error), error.status) == ("GET x: HTTP 404: no", 404)


def test_an_unfit_url_is_refused() -> None:
    with pytest.raises(StrettoError, match="no base URL"):
        http_client.HttpClient("10.0.0.5:8000", timeout_s=1)


# What is sent -------------------------------------------------------------------------------------------------------


def test_ids_seeds_masks_and_pixels_go_as_they_are(server: StandIn, tmp_path: Path) -> None:
    asked = request(group=4)
    prompt, family = asked.prompt, tiny.family()
    responses = run(server, tmp_path, lambda e: e.generate([asked], SAMPLING))[0]
    sent = server.requests()
    seeds = [sample_key(3, 1, 4, i) & (2**63 - 1) for i in range(2)]
    assert sorted(s["sampling_params"]["seed"] for s in sent) == sorted(seeds)
    for response, seed in zip(responses, seeds, strict=True):
        assert response.token_ids.tolist() == [(seed + i) % 90 + 3 for i in range(TOKENS)]
        assert response.logprobs.tolist() == [-0.5 - i for i in range(TOKENS)]
    params = sent[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["max_tokens"]) == (0.7, 1.0, 0, TOKENS)
    assert (params["ignore_eos"], params["stop_token_ids"]) == (True, list(family.eos_ids))
    suppressed = torch.nonzero(family.suppressed_V).flatten().tolist()
    assert params["logit_bias"] == {str(i): -100.0 for i in suppressed}
    assert sent[0]["token_ids"] == prompt.prompt_ids.tolist()
    images = sent[0]["features"]
    at = np.flatnonzero(prompt.prompt_ids == family.config.image_token_id)
    assert images["mm_placeholders"]["image"] == [
        {"offset": int(at[0]), "length": 2},
        {"offset": int(at[2]), "length": 2},
    ]
    rows = 0
    for item, grid in zip(images["kwargs_data"]["image"], prompt.image_grid_thw, strict=True):
        read = msgpack.unpackb(base64.b64decode(item))
        dtype, shape, raw = read["pixel_values"]["data"]
        pixels = np.frombuffer(raw.data, dtype).reshape(shape)
        assert np.array_equal(pixels, prompt.pixel_values[rows : rows + len(pixels)])
        assert np.frombuffer(read["image_grid_thw"]["data"][2].data, np.int64).tolist() == grid.tolist()
        rows += len(pixels)
    assert rows == len(prompt.pixel_values)


def test_a_prompt_without_images_has_no_features(server: StandIn, tmp_path: Path) -> None:
    run(server, tmp_path, lambda e: e.generate([request(images=())], SAMPLING))
    assert "features" not in server.requests()[0]


def test_names_in_caches_are_of_the_content_and_of_the_weights(server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> None:
        await engine.load_weights(0, published(0))
        await one_group(engine)
        await engine.generate([request(group=1)], SAMPLING)
        await engine.load_weights(1, published(1))
        await one_group(engine)

    run(server, tmp_path, work)
    sent = server.requests()
    names = [(s["cache_salt"], *s["features"]["mm_hashes"]["image"]) for s in (sent[0], sent[1], sent[2], sent[4])]
    assert names[0] == names[1]
    salts, first_images = zip(*(name[:2] for name in names), strict=True)
    assert salts[1] == salts[2] != salts[3]
    assert len(set(first_images)) == 3


def test_text_ends_before_the_first_stop_string(server: StandIn, tmp_path: Path) -> None:
    family = tiny.family()
    server.ids = family.encode_answer("ab=cd=")[:-1].tolist()
    sampling = Sampling(n=1, temperature=1.0, max_tokens=20, stop=("d", "="))
    server.faults = ["finish stop"]
    (response,) = run(server, tmp_path, lambda e: e.generate([request()], sampling))[0]
    assert (response.text, response.finish_reason) == ("ab", "stop")
    assert response.token_ids.tolist() == server.ids
    params = server.requests()[0]["sampling_params"]
    assert params["stop"] == ["d", "="] and params["detokenize"]


def test_more_tokens_than_the_server_takes_are_refused_since_it_would_cut_in_silence(
    server: StandIn, tmp_path: Path
) -> None:
    server.options["max_model_len"] = 20
    with pytest.raises(StrettoError, match=r"the server takes 20: set --max-model-len higher"):
        run(server, tmp_path, one_group)


# Faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["503", "429", "closes"])
def test_what_may_pass_is_tried_again(server: StandIn, tmp_path: Path, fault: str) -> None:
    server.faults = [fault, fault]
    responses = run(server, tmp_path, one_group)
    assert [len(r.token_ids) for r in responses] == [TOKENS] * 2
    assert len(server.requests()) == 4


@pytest.mark.parametrize(
    ("fault", "said"), [("503", "HTTP 503: told to answer 503"), ("closes", "/inference/v1/generate: ")]
)
def test_what_does_not_pass_is_a_lost_engine_after_few_tries(
    server: StandIn, tmp_path: Path, fault: str, said: str
) -> None:
    server.faults = [fault] * 100
    begun = time.monotonic()
    with pytest.raises(EngineLost, match=said) as caught:
        run(server, tmp_path, one_group)
    assert f"GET {server.url}/health says that it is well" in str(caught.value)
    assert len(server.requests()) <= 8
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_ends_the_run_at_once_with_the_servers_words(server: StandIn, tmp_path: Path, status: int) -> None:
    server.faults = [str(status)] * 100
    with pytest.raises(StrettoError, match=f"POST {server.url}/inference/v1/generate: HTTP {status}: told to answer"):
        run(server, tmp_path, one_group)
    assert len(server.requests()) <= 2  # one a sample, none again


@pytest.mark.parametrize(("fault", "said"), [("500", "HTTP 500: told to"), ("not JSON", "not JSON: <html>a proxy")])
def test_a_failure_of_the_server_is_a_lost_engine(server: StandIn, tmp_path: Path, fault: str, said: str) -> None:
    server.faults = [fault] * 2
    with pytest.raises(EngineLost, match=said):
        run(server, tmp_path, one_group)
    assert len(server.requests()) <= 2


def test_a_slow_answer_is_waited_for_no_longer_than_asked(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["slow"]
    begun = time.monotonic()
    with pytest.raises(EngineLost, match="no answer in time"):
        run(server, tmp_path, one_group, timeout_s=0.5)
    assert time.monotonic() - begun < 5


def test_a_machine_that_is_cut_off_is_noticed_before_the_time_out(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "HEALTH_EVERY_S", 0.05)
    server.faults = ["slow", "slow"]

    async def work(engine: HttpEngine) -> None:
        call = asyncio.ensure_future(one_group(engine))
        await asyncio.sleep(0.2)
        server.healthy = False
        await call

    begun = time.monotonic()
    with pytest.raises(EngineLost, match="/health: HTTP 503"):
        run(server, tmp_path, work)
    assert time.monotonic() - begun < 5


def test_another_prompt_than_was_sent_ends_the_run_with_both_shown(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["other prompt"]
    ids = request().prompt.prompt_ids.tolist()
    with pytest.raises(StrettoError) as caught:
        run(server, tmp_path, one_group)
    assert f"sent {ids}" in str(caught.value) and f"read {[*ids, 9]}" in str(caught.value)


def test_too_few_logprobs_end_the_run(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["too few"]
    with pytest.raises(StrettoError, match=f"{TOKENS - 1} log-probs, of ids .*, for {TOKENS} ids"):
        run(server, tmp_path, one_group)


def test_a_token_without_logprob_fails_its_response_alone(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["no log-prob"]
    responses = run(server, tmp_path, one_group)
    (failed,) = [r for r in responses if r.error]
    assert (failed.finish_reason, len(failed.token_ids), len(failed.logprobs)) == ("error", 2, 2)
    assert "no log-prob" in failed.error


@pytest.mark.parametrize(("said", "reason"), [("abort", "abort"), ("repetition", "error")])
def test_a_response_that_the_server_ended_fails_alone(server: StandIn, tmp_path: Path, said: str, reason: str) -> None:
    server.faults = [f"finish {said}"]
    responses = run(server, tmp_path, one_group)
    assert sorted(r.finish_reason for r in responses) == sorted([reason, "length"])


def test_an_id_that_no_response_may_hold_fails_it(server: StandIn, tmp_path: Path) -> None:
    image = tiny.family().config.image_token_id
    server.ids = [5, image, 6]
    responses = run(server, tmp_path, one_group)
    assert all(r.finish_reason == "error" and str(image) in r.error for r in responses)


def test_a_cancelled_call_closes_its_connections(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["slow", "slow"]

    async def work(engine: HttpEngine) -> None:
        call = asyncio.ensure_future(one_group(engine))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(await one_group(engine)) == 2

    run(server, tmp_path, work)


def test_a_killed_engine_is_lost_at_once(server: StandIn, tmp_path: Path) -> None:
    server.faults = ["slow", "slow"]

    async def work(engine: HttpEngine) -> None:
        call = asyncio.ensure_future(one_group(engine))
        await asyncio.sleep(0.2)
        engine.kill()
        engine.kill()
        with pytest.raises(EngineLost, match="told to stop"):
            await call

    run(server, tmp_path, work)


# Weights ------------------------------------------------------------------------------------------------------------


def test_an_update_pauses_loads_clears_checks_names_and_resumes(server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> list:
        server.seen.clear()
        await engine.load_weights(3, published(3))
        assert engine.version == 3
        return await one_group(engine)

    responses = run(server, tmp_path, work)
    assert server.paths()[:8] == [
        "/pause?mode=wait&clear_cache=true",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/weight_checker",
        "/update_weight_version",
        "/resume",
    ]
    assert server.tag.endswith("-version-3")
    assert {(r.version_start, r.version_end) for r in responses} == {(3, 3)}


def test_what_the_server_reads_is_every_weight_bit_for_bit_and_older_versions_go(
    server: StandIn, tmp_path: Path
) -> None:
    async def work(engine: HttpEngine) -> dict[str, np.ndarray]:
        for version in (0, 1):
            await engine.load_weights(version, published(version))
        (folder,) = tmp_path.glob("*/version-*")
        held: dict[str, np.ndarray] = {}
        for file in folder.glob("*.safetensors"):
            held |= load_file(file)
        return held

    held = run(server, tmp_path, work)
    named = dict(tiny.model(seed=1).named_parameters())
    assert held.keys() == named.keys()
    assert all(np.array_equal(held[name], p.detach().numpy()) for name, p in named.items())
    assert list(tmp_path.glob("*/*")) == []  # closed


def test_bfloat16_weights_are_written_as_such(server: StandIn, tmp_path: Path) -> None:
    from safetensors.torch import load_file as load_tensors

    named = dict(tiny.model(seed=2, dtype="bfloat16").named_parameters())
    path = WeightFolder(tmp_path).write(2, list(iter_buckets(named, 2, torch.bfloat16)))
    (file,) = path.glob("*.safetensors")
    held = load_tensors(file)
    assert all(torch.equal(held[name], p) and held[name].dtype == torch.bfloat16 for name, p in named.items())


def test_a_server_that_keeps_its_old_weights_in_silence_ends_the_run(server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> None:
        await engine.load_weights(0, published(0))
        server.forgets = True
        await engine.load_weights(1, published(1))

    with pytest.raises(StrettoError, match=r"holds other weights than it was given \(\d+ of \d+ differ, the first is"):
        run(server, tmp_path, work)


def test_part_of_a_model_is_never_sent(server: StandIn, tmp_path: Path) -> None:
    buckets = published(1)
    with pytest.raises(StrettoError, match=r"are mixed with bucket|got buckets"):
        run(server, tmp_path, lambda e: e.load_weights(1, buckets[1:]))
    fewer = lambda: {name: shape for name, shape in shapes().items() if "norm" not in name}  # noqa: E731
    with pytest.raises(StrettoError, match="is not a parameter of this model"):
        run(server, tmp_path, lambda e: e.load_weights(1, buckets), shapes=fewer)
    assert not any("/pause" in path for path in server.paths())


def test_an_update_that_fails_there_ends_the_engine_and_not_the_run(server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> None:
        server.sees_folder = False
        await engine.load_weights(0, published(0))

    with pytest.raises(EngineLost, match=r"/collective_rpc: HTTP 500: Cannot find any model weights"):
        run(server, tmp_path, work)


def test_a_server_that_was_restarted_has_lost_its_weights(server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> None:
        await engine.load_weights(0, published(0))
        await one_group(engine)
        server.tag = "default"
        await one_group(engine)

    with pytest.raises(EngineLost, match=r"sampled by weights \['default'\].*restarted"):
        run(server, tmp_path, work)


def test_folders_of_killed_engines_are_removed_and_those_of_living_ones_are_not(
    server: StandIn, tmp_path: Path
) -> None:
    left = tmp_path / "5f5f5f5f"
    left.mkdir()
    (left / "lock").touch()
    (left / "version-1-ab").mkdir()

    def folders() -> list[Path]:
        return [lock.parent for lock in tmp_path.glob("*/lock")]

    async def work(first: HttpEngine) -> None:
        assert not left.exists()
        (living,) = folders()

        async def both(second: HttpEngine) -> None:
            assert living in folders() and len(folders()) == 2

        other = HttpEngine(tiny.family(), server.url, shapes=shapes, folder=tmp_path, samples=2, timeout_s=20)
        await other.start()
        await both(other)
        await other.close()
        assert folders() == [living]

    run(server, tmp_path, work)


def test_a_run_folder_that_cannot_be_written_is_said(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StrettoError, match=r"run.dir: .* cannot be written"):
        run(server, tmp_path / "file", nothing)


# vLLM 0.26 ----------------------------------------------------------------------------------------------------------


def test_an_older_server_gives_the_same_responses(old_server: StandIn, server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> list:
        await engine.load_weights(0, published(0))
        return await one_group(engine)

    old, new = (run(s, tmp_path, work) for s in (old_server, server))
    assert [r.token_ids.tolist() for r in old] == [r.token_ids.tolist() for r in new]
    assert [r.logprobs.tolist() for r in old] == [r.logprobs.tolist() for r in new]


def test_an_older_server_is_known_by_its_start(old_server: StandIn, tmp_path: Path) -> None:
    async def work(engine: HttpEngine) -> None:
        await engine.load_weights(0, published(0))
        await one_group(engine)
        old_server.started += 1
        await one_group(engine)

    with pytest.raises(EngineLost, match="was restarted, and has lost the weights of version 0"):
        run(old_server, tmp_path, work)


def test_an_older_server_is_held_to_the_count_of_prompt_tokens(old_server: StandIn, tmp_path: Path) -> None:
    old_server.faults = ["other prompt"]
    count = len(request().prompt.prompt_ids)
    with pytest.raises(StrettoError, match=rf"a prompt of {count + 1} tokens, {count} were sent"):
        run(old_server, tmp_path, one_group)


# Around it ----------------------------------------------------------------------------------------------------------


def test_the_router_gives_a_lost_servers_batch_to_another(server: StandIn, tmp_path: Path) -> None:
    other = StandIn()
    urls = [server.url, other.url]
    notes: list[str] = []

    async def main() -> list:
        router = Router(
            lambda i: HttpEngine(tiny.family(), urls[i], shapes=shapes, folder=tmp_path, samples=2, timeout_s=20),
            2,
            max_restarts=1,
            timeout_s=20,
            tracer=Tracer(None, "test"),
            note=notes.append,
        )
        await router.start()
        offer = Offer(0, published(0))
        server.close()
        batch = DecodeBatch(order=0, requests=[request()], sampling=SAMPLING, offer=offer, span="s")
        decoded = await router.generate(batch)
        await router.close()
        return decoded.groups

    try:
        groups = asyncio.run(main())
    finally:
        other.close()
    assert [len(r.token_ids) for r in groups[0]] == [TOKENS] * 2
    assert server.url in notes[0]


def test_build_picks_it_by_replica(tmp_path: Path) -> None:
    blocks: dict[str, Any] = {
        "run": {"dir": str(tmp_path)},
        "model": {"config": tiny.BLOCK},
        "rollout": {"engine": "http", "servers": ("http://a:1", "http://b:2/v1/")},
    }
    engine = build.engine(Config(**blocks), "cpu", 1)
    assert isinstance(engine, HttpEngine) and engine.url == "http://b:2"


def test_digests_are_of_the_bytes_that_the_server_holds() -> None:
    weight = tiny.model(seed=1).get_parameter("model.visual.pos_embed.weight").detach()
    for dtype in (torch.float32, torch.bfloat16):
        raw = weight.to(dtype).view(torch.uint8).numpy().tobytes()
        assert digests(published(1), dtype)["model.visual.pos_embed.weight"] == hashlib.sha256(raw).hexdigest()


def test_names_of_weights_there() -> None:
    assert weight_name("model.language_model.norm.weight") == "language_model.model.norm.weight"
    assert weight_name("model.visual.merger.norm.bias") == "visual.merger.norm.bias"
    assert weight_name("lm_head.weight") == "language_model.lm_head.weight"
    assert is_norm("visual.merger.norm.bias") and not is_norm("visual.pos_embed.weight")
