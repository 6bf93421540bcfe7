"""Runs with several actor ranks: the same bits twice and across a stop, and an end in seconds when a rank dies."""

from __future__ import annotations

import json
import re
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
import running
from processes import processes_of, that_run, wait_until_gone

from stretto.actor.checkpoint import Checkpointer, latest_valid, read_tensors
from stretto.actor_ranks import Actor
from stretto.observe.fingerprint import fingerprint
from stretto.observe.raw import read_raw
from stretto.remote import answers
from stretto.types import CollectiveError, StrettoError

pytestmark = pytest.mark.timeout(480)
UPDATES = 3


def recipe(folder: Path, ranks: int = 2, run_dir: Path | None = None, updates: int = UPDATES) -> Path:
    return running.recipe(
        folder,
        run={"dir": str(run_dir or folder / "run"), "updates": updates},
        actor={"data_parallel": ranks, "lr": 1e-2, "warmup_updates": 1, "max_tokens_per_microbatch": 160},
        eval={"every": 0},
    )


def stopped_and_resumed(folder: Path, ranks: int, stop_after: int, updates: int) -> Path:
    made = recipe(folder, ranks, updates=updates)
    process = running.start(made)
    running.wait_for(process, f"update {stop_after}/{updates}")
    process.send_signal(signal.SIGTERM)
    output = running.finish(process)
    assert process.returncode == 143 and "nothing is lost" in output, output
    running.train(made, "--resume")
    return folder / "run"


def assert_same_run(one: Path, other: Path, updates: int, ranks: int) -> None:
    prints = running.jsonl(one, "fingerprints.jsonl")
    assert len(prints) == updates and len({p["parameters"] for p in prints}) == updates
    assert prints == running.jsonl(other, "fingerprints.jsonl")
    assert running.numbers(one) == running.numbers(other)
    for update in range(updates):
        raw, again = read_raw(one, update), read_raw(other, update)
        assert raw["global_index"].tolist() == list(range(32))
        assert all(raw[name].tobytes() == again[name].tobytes() for name in raw)
    for run in (one, other):
        found = latest_valid(run / "checkpoints", ranks)
        assert found.path is not None and found.state["cursor"] == updates
        assert fingerprint(read_tensors(found.path, "masters")) == prints[-1]["parameters"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    running.train(recipe(folder))
    return folder / "run"


@pytest.mark.case("G1")
def test_a_second_run_of_two_ranks_stopped_and_resumed_is_bit_identical(straight, tmp_path):
    assert_same_run(straight, stopped_and_resumed(tmp_path, 2, 1, UPDATES), UPDATES, 2)


def test_both_ranks_train_and_the_records_say_what_each_had(straight):
    events = running.jsonl(straight, "events.jsonl")
    trained = {
        rank: [e for e in events if e["process"] == f"actor{rank}" and e["name"] == "actor.train"] for rank in (0, 1)
    }
    assert len(trained[0]) == len(trained[1]) >= 2 * UPDATES
    assert all(sum(e["samples"] for e in trained[rank]) for rank in (0, 1))
    assert sum(e["samples"] for rank in (0, 1) for e in trained[rank]) == 32 * UPDATES
    (session,) = json.loads((straight / "manifest.json").read_text())["sessions"]
    facts = session["determinism"]["actor"]
    assert facts["device"] == "cpu" and "need a GPU each, so 3" in facts["device_note"]
    assert len(facts["ranks"]) == 2
    for row in running.jsonl(straight, "metrics.jsonl"):
        assert row["ratio_deviation_max"] == 0 and row["update_skipped"] == 0 and row["samples"] == 32
    newest = straight / "checkpoints" / f"step_{UPDATES:06d}"
    assert {p.name for p in newest.glob("masters*")} == {"masters-0-of-2.safetensors", "masters-1-of-2.safetensors"}


def ranks_of(run: Path) -> list[psutil.Process]:
    """The processes of the actor ranks, in the order in which they were started."""
    return that_run("ActorProcess", processes_of(run))


@pytest.mark.parametrize("waiting", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_killed_rank_ends_the_run_within_seconds_named_and_all_listened_on_loopback(marked, tmp_path, waiting):
    """While ranks train together, and while they have nothing to do: the driver waits for an engine that is stopped."""
    process = running.start(recipe(tmp_path, run_dir=marked, updates=400))
    running.wait_for(process, "update 2/400")
    ranks = ranks_of(marked)
    assert len(ranks) == 2
    if waiting:
        (engine,) = that_run("EngineProcess", processes_of(marked))
        engine.suspend()
        time.sleep(3)
    ports = {p.pid: [c.laddr.ip for c in p.net_connections() if c.status == "LISTEN"] for p in ranks}
    assert all(ports.values())
    assert {ip for ips in ports.values() for ip in ips} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    ranks[1].kill()
    killed = time.monotonic()
    output = running.finish(process, 30)
    assert time.monotonic() - killed < 20
    assert process.returncode == 1 and "Traceback" not in output, output
    error, _, go_on = output.splitlines()[-3:]
    assert re.match(r"error: the actor rank [01] process died: it was killed \(SIGKILL", error), output
    assert go_on.startswith("go on with: stretto train ")
    wait_until_gone(marked, 1)


@pytest.mark.long
@pytest.mark.case("G1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_stopping_at_any_update_changes_no_bit(tmp_path, ranks):
    updates = 5
    (tmp_path / "straight").mkdir()
    running.train(recipe(tmp_path / "straight", ranks, updates=updates))
    for stop_after in range(1, updates):
        folder = tmp_path / str(stop_after)
        folder.mkdir()
        run = stopped_and_resumed(folder, ranks, stop_after, updates)
        assert_same_run(tmp_path / "straight/run", run, updates, ranks)


# The wait for several ranks ------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_restarts=0)
class Worker:
    """Ends a call in the way asked for."""

    def after(self, seconds: float, how: str) -> str:
        time.sleep(seconds)
        if how == "die":
            import os

            os._exit(1)
        if how == "lost":
            raise CollectiveError("connection closed by peer")
        if how == "refuse":
            raise StrettoError("row 7 does not fit")
        return how


def ask(*calls: tuple[float, str]) -> list[str]:
    workers = [Worker.remote() for _ in calls]
    ray.get([worker.after.remote(0, "up") for worker in workers])
    try:
        refs = [worker.after.remote(*call) for worker, call in zip(workers, calls, strict=True)]
        return answers(refs, [f"actor rank {rank}" for rank in range(len(calls))])
    finally:
        for worker in workers:
            ray.kill(worker)


def test_answers_come_in_the_order_of_the_calls(ray_session):
    assert ask((0.5, "a"), (0, "b")) == ["a", "b"]


def test_the_first_failure_is_raised_while_others_still_wait(ray_session):
    begun = time.monotonic()
    with pytest.raises(StrettoError, match="row 7 does not fit"):
        ask((60, "waits"), (0.2, "refuse"))
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("calls", "cause"),
    [
        (((0, "lost"), (1.5, "die")), "the actor rank 1 process died"),
        (((1.5, "refuse"), (0, "lost")), "row 7 does not fit"),
        (((0, "lost"), (0.5, "lost")), "connection closed by peer"),
    ],
)
def test_the_cause_is_raised_rather_than_what_it_did_to_the_others(ray_session, calls, cause):
    begun = time.monotonic()
    with pytest.raises(StrettoError, match=cause):
        ask(*calls)
    assert time.monotonic() - begun < 20


@ray.remote(num_cpus=0, max_restarts=0)
class Saver:
    """What of ``ActorProcess`` a save needs; rank 1 has a full disk when it is told so."""

    def __init__(self, directory: Path, rank: int):
        self.rank, self.saver = rank, Checkpointer(directory, 2)

    def begin_save(self, step: int) -> None:
        self.saver.begin(step)

    def write_shard(self, step: int) -> dict:
        import torch

        full = self.rank == 1 and step == 2
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        else:
            time.sleep(1)  # still at work when the other has failed
        named = {f"w{self.rank}": torch.full((20_000,), float(step))}
        return self.saver.write(step, {"masters": named, "optimizer": {}, "rng": {}}, self.rank, 2)

    def commit(self, step: int, shards: list, published: dict, extra: dict) -> None:
        self.saver.commit(step, shards, {"cursor": step}, published)

    def abandon_save(self, step: int) -> None:
        self.saver.abandon(step)


def test_a_full_disk_of_one_rank_is_one_message_and_leaves_the_old_checkpoint_alone(ray_session, tmp_path):
    actor = object.__new__(Actor)
    actor.world, actor.names = 2, ["actor rank 0", "actor rank 1"]
    actor.ranks = [Saver.remote(tmp_path, rank) for rank in range(2)]
    actor.save(1, {}, {})
    with pytest.raises(StrettoError, match=r"step_000002 could not be written .* earlier ones are untouched"):
        actor.save(2, {}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert latest_valid(tmp_path, 2).path == tmp_path / "step_000001"
    for rank in actor.ranks:
        ray.kill(rank)
