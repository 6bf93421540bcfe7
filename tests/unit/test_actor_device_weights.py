"""Snapshots of published versions and how they travel. On the CPU: what the bytes are, not how they move."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import actor_case
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.actor.device_weights import Snapshots
from stretto.actor.publishing import Publisher
from stretto.actor.weights import iter_buckets
from stretto.models import device_io
from stretto.models.device_io import layout, meta_bytes, pieces, stamp, view
from stretto.models.weight_sample import sample
from stretto.models.weights_io import load_buckets
from stretto.rollout import device_receiver
from stretto.rollout.device_receiver import Receiver
from stretto.rollout.device_transfer import DeviceTransfer
from stretto.types import DeviceWeights, StrettoError, TensorMeta


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

    def broadcast(self, buffer, root, stream):
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
        invite=lambda: note("invite"), admit=lambda world: note(("admit", world)), send=lambda: note("send")
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
    joined = ["invite", ("admit", 3), ("group", "world")]
    assert calls == [*joined, "send", update, "send", update, update, ("path", "size", "tensors")]


def test_weights_of_another_model_are_refused_before_anything_is_touched():
    model, snapshots = tiny.model(0), Snapshots(1, torch.float32)
    weights = snapshots.take(named(model), 3)
    shapes = {name: tuple(p.shape) for name, p in named(model).items()}
    with pytest.raises(StrettoError, match="lack 1 parameters, the first is 'more'"):
        DeviceTransfer(shapes | {"more": (2,)}, workers=1).check(3, [weights])
    with pytest.raises(StrettoError, match="has shape"):
        DeviceTransfer(shapes | {weights.metas[0].name: (2,)}, workers=1).check(3, [weights])
