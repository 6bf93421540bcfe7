"""Snapshots of published versions and how they travel. On the CPU: what the bytes are, and who waits for whom; NCCL
itself needs GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import pickle
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import actor_case
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.actor import device_weights
from stretto.actor.device_weights import Sender, Snapshots
from stretto.actor.publishing import Publisher
from stretto.actor.weights import iter_buckets
from stretto.models import device_io
from stretto.models.device_io import layout, meta_bytes, pieces, stamp, view
from stretto.models.weight_sample import sample
from stretto.models.weights_io import load_buckets
from stretto.rollout import device_receiver
from stretto.rollout.device_receiver import Receiver
from stretto.rollout.device_transfer import DeviceTransfer
from stretto.types import DeviceWeights, StrettoError, TensorMeta, WeightsLost


def named(model):
    return dict(model.named_parameters())


def tensors_of(snapshots, weights):
    with snapshots.reading(weights) as buffer:
        return {m.name: view(buffer, m, at).clone() for m, at in zip(weights.metas, weights.offsets, strict=True)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_holds_the_published_bits_and_gives_the_buckets_that_the_host_would_have_got(dtype):
    model = tiny.model(0)
    kind = getattr(torch, dtype)
    snapshots = Snapshots(2, kind)
    weights = snapshots.take(named(model), 7)
    assert tensors_of(snapshots, weights).keys() == named(model).keys()
    for name, tensor in tensors_of(snapshots, weights).items():
        assert torch.equal(tensor, named(model)[name].detach().to(kind))
    expected = list(iter_buckets(named(model), 7, kind, 20_000))
    found = list(snapshots.buckets(weights, 20_000))
    assert [(b.version, b.index, b.count, b.metas) for b in found] == [
        (b.version, b.index, b.count, b.metas) for b in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.data, other.data, strict=True))


def test_a_snapshot_comes_with_the_sample_that_the_host_buckets_would_be_checked_by():
    model, snapshots = tiny.model(0), Snapshots(1, torch.bfloat16)
    weights = snapshots.take(named(model), 3)
    shapes = {name: tuple(p.shape) for name, p in named(model).items()}
    expected = sample(shapes, 3, iter_buckets(named(model), 3, torch.bfloat16))
    assert {s.name: s for s in weights.sample} == {s.name: s for s in expected}
    assert len(weights.sample) > 10


def test_a_snapshot_is_not_changed_by_training():
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    weights = snapshots.take(named(model), 0)
    before = tensors_of(snapshots, weights)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    after = tensors_of(snapshots, weights)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_the_newest_versions_are_held_and_one_more_until_the_next_is_taken(kept):
    model, snapshots = tiny.model(0), Snapshots(kept, torch.float32)
    taken: list[DeviceWeights] = []
    buffers = set()
    for version in range(2 * kept + 3):
        with torch.no_grad():
            model.lm_head.weight.fill_(float(version))
        taken.append(snapshots.take(named(model), version))
        for weights in taken[-kept - 1 :]:
            head = next(t for name, t in tensors_of(snapshots, weights).items() if "embed_tokens" in name)
            assert torch.all(head == weights.version)
            with snapshots.reading(weights) as buffer:
                buffers.add(buffer.data_ptr())
                assert int(stamp(buffer, weights.size)) == weights.serial
        for weights in taken[: -kept - 1]:
            with pytest.raises(StrettoError, match=f"version {weights.version} are no longer held"):
                tensors_of(snapshots, weights)
    assert len(buffers) == kept + 1  # written over, never made anew: handles to them stay good


def test_a_version_that_is_being_read_is_not_written_over():
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    first = snapshots.take(named(model), 0)
    snapshots.take(named(model), 1)
    taken = threading.Event()

    def take():
        snapshots.take(named(model), 2)
        taken.set()

    with snapshots.reading(first):
        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(0.2)
    assert taken.wait(10)
    thread.join()


def test_a_version_is_read_by_many_at_once_and_written_over_when_the_last_has_done():
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    first = snapshots.take(named(model), 0)
    second = snapshots.take(named(model), 1)
    together, taken = threading.Barrier(3), threading.Event()
    ends = [threading.Event(), threading.Event()]
    seen = []

    def read(end):
        with snapshots.reading(first) as buffer:
            together.wait(10)
            assert end.wait(10)
            seen.append(int(stamp(buffer, first.size)))

    def take():
        snapshots.take(named(model), 2)
        taken.set()

    readers = [threading.Thread(target=read, args=(end,)) for end in ends]
    for thread in readers:
        thread.start()
    together.wait(10)  # both are reading
    writer = threading.Thread(target=take)
    writer.start()
    assert not taken.wait(0.2)
    # A writer that waits is not held up by newcomers, and holds up nobody who reads another version.
    with pytest.raises(WeightsLost, match="version 0 are no longer held"), snapshots.reading(first):
        pass
    with snapshots.reading(second) as buffer:
        assert int(stamp(buffer, second.size)) == second.serial
    ends[0].set()
    readers[0].join(10)
    assert not taken.wait(0.2)
    ends[1].set()
    assert taken.wait(10)
    for thread in (*readers, writer):
        thread.join(10)
    assert seen == [first.serial, first.serial]


@given(
    st.lists(st.lists(st.integers(1, 300), max_size=3), min_size=1, max_size=12),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 4000),
)
def test_pieces_hold_every_tensor_once_whole_and_in_order(shapes, dtype, limit):
    metas = tuple(TensorMeta(name=str(i), dtype=dtype, shape=tuple(s[:2])) for i, s in enumerate(shapes))
    offsets, size = layout([meta_bytes(meta) for meta in metas])
    weights = DeviceWeights(version=0, serial=1, metas=metas, offsets=offsets, size=size)
    found = list(pieces(weights, limit))
    assert [i for _, _, tensors in found for i in tensors] == list(range(len(metas)))
    assert found[0][0] == 0 and found[-1][1] == size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    for begin, end, tensors in found:
        assert end - begin <= limit or len(tensors) == 1
        for i in tensors:
            assert begin <= offsets[i] and offsets[i] + meta_bytes(metas[i]) <= end
            assert offsets[i] % device_io.ALIGN == 0


def test_a_worker_takes_the_tensors_of_a_shared_buffer_and_finds_out_when_it_was_written_again(monkeypatch):
    model, snapshots = tiny.model(0), Snapshots(0, torch.float32)
    weights = snapshots.take(named(model), 3)
    with snapshots.reading(weights) as buffer:
        shared = buffer
    monkeypatch.setattr(device_receiver, "open_ipc", lambda handles, device: shared)
    sent = pickle.dumps(replace(weights, handles={"gpu": b"handle"}))
    receiver = Receiver(torch.device("cpu"), 0)
    (tensors,) = receiver.receive(sent)
    assert {name for name, _ in tensors} == named(model).keys()
    assert all(torch.equal(tensor, named(model)[name]) for name, tensor in tensors)
    receiver.verify()
    snapshots.take(named(model), 4)
    with pytest.raises(StrettoError, match="version 3 are no longer held"):
        receiver.verify()
    list(receiver.receive(sent))
    with pytest.raises(StrettoError, match="version 3 are no longer held"):
        receiver.verify()


class Group:
    """Both ends of a broadcast within this process."""

    def __init__(self, pieces=()):
        self.pieces = list(pieces)

    def broadcast(self, buffer, root, stream, deadline):
        if self.pieces:
            buffer.copy_(self.pieces.pop(0))


def test_a_worker_takes_pieces_as_they_are_sent(monkeypatch):
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    weights = snapshots.take(named(model), 3)
    monkeypatch.setattr(device_receiver, "pieces", lambda w: pieces(w, 20_000))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    receiver = Receiver(torch.device("cpu"), 0)
    with pytest.raises(StrettoError, match="before this engine had joined"):
        list(receiver.receive(pickle.dumps(weights)))
    with snapshots.reading(weights) as buffer:
        receiver._group = Group(buffer[a:b] for a, b, _ in pieces(weights, 20_000))
    parts = list(receiver.receive(pickle.dumps(weights)))
    assert len(parts) > 2
    found = {name: tensor for part in parts for name, tensor in part}
    assert found.keys() == named(model).keys()
    assert all(torch.equal(tensor, named(model)[name]) for name, tensor in found.items())


def test_a_checkpoint_gets_host_buckets_of_versions_that_lie_on_the_device_beside_those_of_a_resumed_run():
    model = tiny.model(0)
    publisher = Publisher(actor_case.config(), model)
    resumed = list(iter_buckets(named(tiny.model(1)), 1, torch.float32))
    assert list(publisher.on_host(resumed)) == resumed
    target = tiny.model(3)
    assert load_buckets(target, publisher.on_host([publisher.snapshot(2)])) == 2
    assert all(torch.equal(p, named(model)[name]) for name, p in target.named_parameters())


def test_an_engine_joins_its_sender_once_and_the_sender_sends_while_workers_receive():
    calls = []

    async def note(what):
        calls.append(what)
        await asyncio.sleep(0)
        return b"group"

    sender = SimpleNamespace(
        invite=lambda: note("invite"),
        admit=lambda group, world: note(("admit", group, world)),
        send=lambda group: note(("send", group)),
    )
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    shapes = {name: tuple(p.shape) for name, p in named(model).items()}
    weights = snapshots.take(named(model), 3)
    transfer = DeviceTransfer(shapes, workers=2)

    async def run():
        for _ in range(2):
            sampled = await transfer.send(3, [replace(weights, sender=sender)], lambda info: note((*info.keys(),)))
            assert sampled == list(weights.sample)
        await transfer.send(3, [weights], lambda info: note((*info.keys(),)))
        await transfer.send(1, list(iter_buckets(named(model), 1, torch.float32)), lambda info: note((*info.keys(),)))

    transfer.check(3, [weights])
    asyncio.run(run())
    transfer.close()
    update = ("sent",)
    joined = ["invite", ("admit", b"group", 3), ("group", "world")]
    send = ("send", b"group")
    assert calls == [*joined, send, update, send, update, update, ("path", "size", "tensors")]


def test_weights_of_another_model_are_refused_before_anything_is_touched():
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    weights = snapshots.take(named(model), 3)
    shapes = {name: tuple(p.shape) for name, p in named(model).items()}
    with pytest.raises(StrettoError, match="lack 1 parameters, the first is 'more'"):
        DeviceTransfer(shapes | {"more": (2,)}, workers=1).check(3, [weights])
    with pytest.raises(StrettoError, match="has shape"):
        DeviceTransfer(shapes | {weights.metas[0].name: (2,)}, workers=1).check(3, [weights])


class Nccl:
    """The library as nccl.h has its non-blocking calls: they answer "in progress" (7) and go on by themselves, until
    the members that a test says are there have joined, taken what is sent, or failed."""

    def __init__(self):
        self.made = itertools.count(1)
        self.groups = itertools.count(1)
        self.state: dict[int, int] = {}
        self.aborted: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self.there = True

    def ncclGetErrorString(self, code):
        return b"remote process exited or there was a network error" if code == 6 else b"code %d" % code

    def ncclGetUniqueId(self, made):
        ctypes.memmove(made, bytes([next(self.groups)]) * device_io.UNIQUE_ID_BYTES, device_io.UNIQUE_ID_BYTES)
        return 0

    def ncclCommInitRankConfig(self, comm, world, group, rank, config):
        fields = config._obj
        assert (fields.size, fields.magic, fields.version, fields.blocking) == (24, 0xCAFEBEEF, 21400, 0)
        comm._obj.value = next(self.made)
        self.state[comm._obj.value] = 0 if self.there else 7
        return self.state[comm._obj.value]

    def ncclCommGetAsyncError(self, comm, state):
        assert comm.value not in self.aborted, "used after it was freed"
        state._obj.value = self.state[comm.value]
        return 0

    def ncclBroadcast(self, sent, received, count, dtype, root, comm, stream):
        assert comm.value not in self.aborted, "used after it was freed"
        assert self.state[comm.value] == 0, "used before it was ready"
        self.sent.append((comm.value, count))
        return self.state[comm.value]

    def ncclCommAbort(self, comm):
        self.aborted.append(comm.value)
        return 0


@pytest.fixture
def nccl(monkeypatch):
    library = Nccl()
    monkeypatch.setattr(device_io, "_nccl", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    return library


class Stream:
    """What is queued on it is done once ``taken`` is set."""

    def __init__(self, device):
        self.cuda_stream = 0
        self.taken = threading.Event()
        STREAMS.append(self)

    def record_event(self):
        return SimpleNamespace(query=self.taken.is_set)


GPU = torch.device("cuda", 0)
STREAMS: list[Stream] = []


def begun(call, *args):
    """A thread that runs it, and where its error comes."""
    errors = []

    def run():
        try:
            call(*args)
        except StrettoError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def ended(thread, within):
    began = time.monotonic()
    thread.join(within)
    assert not thread.is_alive()
    return time.monotonic() - began


def sender_with(versions=1):
    model, snapshots = tiny.model(0), Snapshots(2, torch.float32)
    return Sender(snapshots, GPU), [snapshots.take(named(model), v) for v in range(versions)], snapshots


def test_joining_has_a_limit_on_both_sides_and_gives_the_group_up_at_it(nccl, monkeypatch):
    nccl.there = False
    monkeypatch.setattr(device_weights, "JOIN_S", 0.2)
    monkeypatch.setattr(device_receiver, "JOIN_S", 0.2)
    sender, _, _ = sender_with()
    group = sender.invite(0)
    thread, errors = begun(sender.join, 0, group, 2)
    assert ended(thread, 10) >= 0.15
    (error,) = errors
    assert error.startswith("rollout engine 0 did not join the actor: NCCL could not join the group that sends weights")
    with pytest.raises(StrettoError, match=r"could not join .* \(rank 1 of 2\) in time"):
        Receiver(GPU, 0).join(group, 2)
    assert nccl.aborted == [1, 2]


def test_a_member_that_fails_while_it_joins_ends_the_wait_at_once(nccl):
    nccl.there = False
    sender, _, _ = sender_with()
    thread, errors = begun(sender.join, 0, sender.invite(0), 2)
    time.sleep(0.05)
    nccl.state[1] = 6
    assert ended(thread, 10) < 5
    assert "remote process exited" in errors[0] and nccl.aborted == [1]


@pytest.mark.parametrize("doing", ["join", "send"])
def test_a_new_invitation_gives_up_the_one_before_at_once_whatever_it_waits_for(nccl, doing):
    sender, (weights,), _ = sender_with()
    group = sender.invite(0)
    if doing == "join":
        nccl.there = False
        thread, errors = begun(sender.join, 0, group, 2)
        expected = "rollout engine 0 did not join the actor: the group that sends weights was given up"
    else:
        sender.join(0, group, 2)
        thread, errors = begun(sender.send, 0, group, weights)
        expected = "rollout engine 0 did not take the weights that it asked for: the group that sends weights was given"
    time.sleep(0.05)
    assert thread.is_alive()
    again = sender.invite(0)
    assert ended(thread, 10) < 5 and errors[0].startswith(expected)
    assert nccl.aborted == [1]
    # Calls of the dead engine that come late do not reach its successor.
    for call in (lambda: sender.join(0, group, 2), lambda: sender.send(0, group, weights)):
        with pytest.raises(StrettoError, match="engine 0 was replaced"):
            call()
    nccl.there = True
    sender.join(0, again, 2)
    thread, errors = begun(sender.send, 0, again, weights)
    STREAMS[-1].taken.set()
    ended(thread, 10)
    assert not errors and nccl.aborted == [1] and nccl.sent[-1] == (2, weights.size)


def test_one_that_does_not_take_its_weights_holds_up_no_other_and_is_given_up_at_the_limit(nccl, monkeypatch):
    monkeypatch.setattr(device_weights, "SEND_S", 3.0)
    sender, (weights,), snapshots = sender_with()
    groups = [sender.invite(replica) for replica in range(2)]
    streams = []
    for replica, group in enumerate(groups):
        sender.join(replica, group, 2)
        streams.append(STREAMS[-1])
    stuck, errors = begun(sender.send, 0, groups[0], weights)
    time.sleep(0.05)
    well, none = begun(sender.send, 1, groups[1], weights)  # the same version
    streams[1].taken.set()
    ended(well, 2)
    assert stuck.is_alive() and not none
    ended(stuck, 10)
    assert errors == [
        "rollout engine 0 did not take the weights that it asked for: NCCL could not send weights in time"
    ]
    assert nccl.aborted == [1] and [count for _, count in nccl.sent] == [weights.size] * 2
    for version in range(1, 5):  # nobody reads any more
        snapshots.take(named(tiny.model(0)), version)
