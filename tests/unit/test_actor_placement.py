"""Who gets which cores and GPUs: pure arithmetic on what this machine shows."""

from __future__ import annotations

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
