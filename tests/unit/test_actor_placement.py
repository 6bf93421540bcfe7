"""Who gets which cores and GPUs: pure arithmetic on what this machine shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import machine
from stretto.config import Config
from stretto.machine import Share
from stretto.types import ConfigError


def place(monkeypatch, cores: int, gpus: int, ranks: int = 1, replay: str = "", **cluster) -> machine.Placement:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(machine, "_gpu_count", lambda: gpus)
    config = Config.model_validate({"actor": {"data_parallel": ranks}, "cluster": cluster})
    return machine.placement(config.with_seams(replay=replay))


def test_one_rank_owns_all_cores_of_its_side(monkeypatch):
    found = place(monkeypatch, 8, 0)
    assert found.ranks == (Share((0, 1, 2, 3), 4),)
    assert found.replicas == (Share((4, 5, 6, 7), 4),)


def test_ranks_get_equally_many_cores_so_that_all_have_one_number_of_threads(monkeypatch):
    found = place(monkeypatch, 14, 0, ranks=2)
    assert found.actor_cores == (0, 1, 2, 3, 4, 5, 6)
    assert found.ranks == (Share((0, 1, 2), 3), Share((3, 4, 5), 3))


def test_more_ranks_than_cores_share_all_of_them_with_one_thread_each(monkeypatch):
    assert place(monkeypatch, 2, 0, ranks=4).ranks == (Share((0,), 1),) * 4
    assert place(monkeypatch, 8, 0, ranks=3, actor_cores=(5, 6)).ranks == (Share((5, 6), 1),) * 3


def test_on_a_cluster_nothing_is_pinned(monkeypatch):
    assert place(monkeypatch, 8, 0, ranks=2, address="10.0.0.1:6379").ranks == (Share((), 0),) * 2


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu"), (3, "cpu"), (4, "cuda"), (8, "cuda")])
def test_auto_takes_gpus_where_every_rank_and_replica_gets_one_and_says_why_not(monkeypatch, gpus, device):
    found = place(monkeypatch, 8, gpus, ranks=3)
    assert found.device == device
    assert (found.note == "") == (device == "cuda")
    if found.note:
        assert "need a GPU each, so 4, and " + str(gpus) in found.note


def test_cuda_is_refused_with_the_numbers(monkeypatch):
    with pytest.raises(ConfigError, match=r"data_parallel = 2 and rollout.replicas = 1 .* so 3, and 2 can be seen"):
        place(monkeypatch, 8, 2, ranks=2, device="cuda")
    assert place(monkeypatch, 8, 0, ranks=2, device="cpu").note == ""


def test_a_replay_needs_gpus_for_its_ranks_alone(monkeypatch):
    """Its engine holds no model: what two GPUs recorded replays on one."""
    assert place(monkeypatch, 8, 2, ranks=2, replay="recording", device="cuda").device == "cuda"
    with pytest.raises(ConfigError, match=r"data_parallel = 2 need a GPU each, so 2, and 1 can be seen .* lower it"):
        place(monkeypatch, 8, 1, ranks=2, replay="recording", device="cuda")


def test_auto_takes_the_device_of_a_replay_as_that_of_the_recorded_run(monkeypatch):
    """Else one would run on the CPU, the other on a GPU, and nothing but distances would come of comparing them."""
    for gpus in (2, 3):
        live, replay = place(monkeypatch, 8, gpus, ranks=2), place(monkeypatch, 8, gpus, ranks=2, replay="recording")
        assert live.device == replay.device


def vllm(monkeypatch, gpus: int, *, ranks: int = 1, replicas: int = 1, width: int = 1, **cluster) -> machine.Placement:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr(machine, "_gpu_count", lambda: gpus)
    rollout = {"engine": "vllm", "replicas": replicas, "tensor_parallel": width}
    return machine.placement(
        Config.model_validate({"actor": {"data_parallel": ranks}, "rollout": rollout, "cluster": cluster})
    )


@pytest.mark.parametrize(("gpus", "device"), [(4, "cpu"), (5, "cuda")])
def test_an_engine_gets_as_many_gpus_as_its_tensor_parallel_width(monkeypatch, gpus, device):
    found = vllm(monkeypatch, gpus, replicas=2, width=2)
    assert found.device == device
    assert found.engine_gpus == 2
    if device == "cpu":
        assert "rollout.replicas = 2 need 2 GPUs an engine, so 5, and 4 can be seen" in found.note
    else:
        assert machine.gpu_share(found, 1, engine=True) == {"num_gpus": 2}
        assert machine.gpu_share(found, 0) == {"num_gpus": 1}


def test_a_rank_and_an_engine_that_share_a_gpu_need_one_and_never_fall_back_to_the_cpu(monkeypatch):
    assert vllm(monkeypatch, 2, ranks=2, replicas=2, colocate=True).device == "cuda"
    with pytest.raises(
        ConfigError, match=r"share a GPU with an engine each, so 2, and 1 can be seen.*take cluster.colo"
    ):
        vllm(monkeypatch, 1, ranks=2, replicas=2, colocate=True)
    with pytest.raises(ConfigError, match=r"so 2, and 0 can be seen"):
        vllm(monkeypatch, 0, ranks=2, replicas=2, colocate=True, device="cuda")


def test_both_sides_of_a_shared_gpu_are_told_to_take_half_of_the_same(monkeypatch):
    pairs = object()
    place = replace(vllm(monkeypatch, 2, ranks=2, replicas=2, colocate=True), pairs=pairs)
    for index in range(2):
        for engine in (False, True):
            share = machine.gpu_share(place, index, engine=engine)
            where = share.pop("scheduling_strategy")
            assert share == {"num_gpus": 0.5}
            assert (where.placement_group, where.placement_group_bundle_index) == (pairs, index)


def test_no_gpu_is_asked_for_on_the_cpu_for_servers_of_someone_else_and_for_a_replay(monkeypatch):
    assert machine.gpu_share(place(monkeypatch, 8, 0), 0, engine=True) == {"num_gpus": 0}
    replay = place(monkeypatch, 8, 1, replay="recording", device="cuda")
    assert machine.gpu_share(replay, 0, engine=True) == {"num_gpus": 0}
    servers = Config.model_validate({"rollout": {"engine": "http"}, "cluster": {"device": "cuda"}})
    assert machine.gpu_share(machine.placement(servers), 0, engine=True) == {"num_gpus": 0}


@pytest.mark.parametrize(
    ("engine", "asked", "colocate", "found"),
    [
        ("hf", "auto", False, "host"),
        ("vllm", "auto", False, "host"),
        ("vllm", "auto", True, "ipc"),
        ("vllm", "host", True, "host"),
        ("vllm", "nccl", False, "nccl"),
    ],
)
def test_weights_go_by_cuda_ipc_where_a_gpu_is_shared_unless_told_otherwise(engine, asked, colocate, found):
    rollout = {"engine": engine, "weight_transfer": asked}
    config = Config.model_validate({"rollout": rollout, "cluster": {"colocate": colocate}})
    assert config.weight_transfer == found
    assert config.with_seams(replay="recording").weight_transfer == "host"
