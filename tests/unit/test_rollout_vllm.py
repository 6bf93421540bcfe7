"""The parts of the vllm engine that need no vLLM; with it, see tests/vllm."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from stretto.actor.weights import iter_buckets
from stretto.config import Config, DataConfig, ModelConfig, RolloutConfig
from stretto.models.weight_sample import TENSORS, chosen, sample
from stretto.rollout.vllm_args import RESERVED, engine_arguments
from stretto.rollout.vllm_inputs import image_places
from stretto.rollout.vllm_outputs import Spans
from stretto.rollout.vllm_transfer import HostTransfer
from stretto.types import ConfigError, StrettoError

KNOWN = {*RESERVED, "max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager"}


def arguments(device="cpu", known=KNOWN, data=None, **asked):
    rollout = RolloutConfig(engine="vllm", engine_args=asked, max_response_tokens=16)
    config = Config(model=ModelConfig(path="some/model"), rollout=rollout, data=data or DataConfig())
    return engine_arguments(config, "folder", 4096, device, known)


def test_a_users_arguments_replace_defaults_and_nothing_else():
    made = arguments(max_num_seqs=7, enforce_eager=False)
    assert made["max_num_seqs"] == 7 and made["enforce_eager"] is False
    assert made["model"] == "folder" and made["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(ConfigError) as refused:
        arguments(logprobs_mode="raw_logprobs", seed=1, max_num_seq=3)
    assert [p.split(":")[0] for p in refused.value.problems] == [
        "rollout.engine_args.logprobs_mode",
        "rollout.engine_args.seed",
        "rollout.engine_args.max_num_seq",
    ]
    assert "did you mean 'max_num_seqs'" in refused.value.problems[2]


def test_what_is_only_for_the_cpu_is_only_there():
    cpu, gpu = arguments(max_model_len=9000), arguments("cuda", max_model_len=9000)
    assert cpu["enable_chunked_prefill"] is False and cpu["max_num_batched_tokens"] == 9000 and cpu["enforce_eager"]
    assert not {"enable_chunked_prefill", "max_num_batched_tokens", "enforce_eager", "kv_cache_memory_bytes"} & set(gpu)


def test_an_argument_that_a_release_lacks_is_left_out():
    assert arguments()["mm_device_do_normalize"] is False
    assert "mm_device_do_normalize" not in arguments(known=KNOWN - {"mm_device_do_normalize"})


def test_the_longest_sequence_is_what_the_model_and_the_prompts_allow():
    assert arguments()["max_model_len"] == 4096
    assert arguments(data=DataConfig(source="files", max_prompt_tokens=100))["max_model_len"] == 116


def test_images_are_placed_where_their_tokens_are():
    prompt = tiny.family().process(tiny.prompt(0, ((32, 64), (64, 64))))
    (a, n), (b, m) = image_places(prompt, 2)
    assert (n, m) == (2, 4)
    assert np.flatnonzero(prompt.mm_token_type_ids).tolist() == [a, a + 1, b, b + 1, b + 2, b + 3]
    assert image_places(tiny.family().process(tiny.prompt(0, ())), 2) == []
    swapped = replace(prompt, image_grid_thw=prompt.image_grid_thw[::-1].copy())
    with pytest.raises(StrettoError, match=r"grids \[\[1, 4, 4\], \[1, 2, 4\]\]"):
        image_places(swapped, 2)


def test_spans_stamp_every_token_with_the_version_that_made_it():
    spans = Spans(3)
    assert spans.versions(2).tolist() == [3, 3]
    spans.begin(4, 2)
    spans.begin(5, 2)  # nothing was sampled under 4
    assert spans.versions(5).tolist() == [3, 3, 5, 5, 5]
    queued = Spans(1)
    queued.begin(2, 0)
    assert queued.versions(3).tolist() == [2, 2, 2] and queued.newest == 2


def buckets(seed=0, version=1):
    return list(iter_buckets(dict(tiny.model(seed).named_parameters()), version, torch.float32, 20_000))


def shapes():
    return {name: tuple(p.shape) for name, p in tiny.model().named_parameters()}


def test_a_sample_holds_values_of_the_tensors_themselves():
    tensors = dict(tiny.model().named_parameters())
    sampled = sample(shapes(), 1, buckets())
    assert len(sampled) == min(TENSORS, len(tensors)) and {s.name for s in sampled} == set(chosen(shapes(), 1))
    for s in sampled:
        tensor = tensors[s.name].detach()
        vector = tensor if tensor.ndim == 1 else tensor.reshape(len(tensor), -1)[:, s.column]
        assert s.values == vector.contiguous().numpy().tobytes()


def test_every_tensor_and_other_columns_have_their_turn():
    wide = {f"layer.{i}.weight": (8, 1000) for i in range(200)}
    seen = [chosen(wide, version) for version in range(40)]
    assert all(len(s) == TENSORS for s in seen) and set().union(*seen) == set(wide)
    assert len({s["layer.7.weight"] for s in seen if "layer.7.weight" in s}) > 3


def test_weights_pass_through_one_segment_that_has_no_name():
    transfer, seen, paths = HostTransfer(shapes()), {}, set()

    async def update(info):
        paths.add(info["path"])
        data = np.memmap(info["path"], np.uint8, "r", shape=(info["size"],))
        for name, dtype, shape, offset in info["tensors"]:
            count = int(np.prod(shape))
            seen[name] = np.frombuffer(data[offset : offset + 4 * count].tobytes(), dtype).reshape(shape)

    sent = buckets()
    assert len(sent) > 3
    transfer.check(1, sent)
    asyncio.run(transfer.send(1, sent, update))
    for name, tensor in tiny.model().named_parameters():
        np.testing.assert_array_equal(seen[name], tensor.detach().numpy())
    assert not any("stretto" in name for name in os.listdir("/dev/shm"))
    transfer.close()
    transfer.close()
    assert not any(os.path.exists(path) and "stretto-weights" in os.readlink(path) for path in paths)


def test_weights_of_a_later_version_than_asked_are_refused_and_those_before_skipped_updates_taken():
    transfer = HostTransfer(shapes())
    with pytest.raises(StrettoError, match="version 1 were asked for, and those of version 2 came"):
        transfer.check(1, buckets(version=2))
    transfer.check(2, buckets(version=1))
    with pytest.raises(StrettoError, match="got buckets"):
        transfer.check(1, buckets()[1:])


WORKER = "from stretto.rollout.vllm_processes import *; end_with_the_engine(); time.sleep(60)"
CORE = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {WORKER!r}]).wait(), flush=True)"


@pytest.mark.parametrize("of_the_engine", [True, False])
def test_a_worker_ends_with_its_engine_and_takes_the_core_along_but_nobody_who_adopted_it(of_the_engine):
    """The engine has ended before its worker looks. Its parent is the core, or whoever adopts orphans."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = os.environ | {"ENGINE_OF_STRETTO": str(gone.pid)}
    start = CORE if of_the_engine else CORE.replace(".Popen(", f".Popen(env={dict(environment)!r}, args=")
    parent = subprocess.Popen(
        [sys.executable, "-c", start, *(["VLLM::EngineCore"] if of_the_engine else [])],
        env=environment if of_the_engine else dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = parent.communicate(timeout=60)
    assert (parent.returncode, said.strip()) == ((-9, "") if of_the_engine else (0, "-9"))


UNLINKED = """
import os
from multiprocessing.shared_memory import SharedMemory
from stretto.rollout.vllm_compat import prepare_environment

prepare_environment("cpu", 1, loopback=True)
os.unlink("/dev/shm/" + SharedMemory(create=True, size=64).name)
"""


def test_shared_memory_that_lost_its_name_early_is_not_told_to_the_user():
    process = subprocess.run([sys.executable, "-c", UNLINKED], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


MEETING = """
import sys
import psutil
import torch.distributed as dist
from stretto.rollout.vllm_compat import meet_at_one_address

meet_at_one_address()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", world_size=2, rank=int(sys.argv[1]))
dist.barrier()
print(*{c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN})
dist.barrier()
"""


def test_workers_that_meet_at_loopback_listen_there_alone():
    """By itself torch's store listens on every interface ("::")."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING, rank, port], stdout=subprocess.PIPE, text=True, env=environment
        )
        for rank in "01"
    ]
    heard = {ip for worker in workers for ip in worker.communicate(timeout=100)[0].split()}
    assert [worker.returncode for worker in workers] == [0, 0]
    assert heard <= {"127.0.0.1", "::ffff:127.0.0.1"} and "127.0.0.1" in heard
