"""Published buckets, loading them, and weight tags."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny
import torch

from stretto.actor.weights import WeightTags, iter_buckets
from stretto.models.weights_io import from_host, load_buckets, to_host
from stretto.types import StrettoError


def named(model):
    return dict(model.named_parameters())


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 2**26])
def test_published_weights_load_bit_for_bit_into_another_model(dtype, bucket_bytes):
    source, target = tiny.model(0, dtype), tiny.model(1, dtype)
    buckets = list(iter_buckets(named(source), 7, getattr(torch, dtype), bucket_bytes))
    assert not same(bits(source), bits(target))
    assert load_buckets(target, iter(buckets)) == 7
    assert same(bits(source), bits(target))
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert {b.count for b in buckets} == {len(buckets)}
    for bucket in buckets:
        assert len(bucket.data) == 1 or sum(a.nbytes for a in bucket.data) <= bucket_bytes
        for meta, array in zip(bucket.metas, bucket.data, strict=True):
            assert array.flags.c_contiguous
            assert array.shape == meta.shape
            assert meta.dtype == dtype
            assert array.dtype == {"float32": np.float32, "bfloat16": np.uint16}[dtype]


def test_tied_weights_are_published_once_under_a_name_of_the_state_dict_and_stay_tied():
    source, target = tiny.model(0), tiny.model(1)
    names = [meta.name for b in iter_buckets(named(source), 0, torch.float32) for meta in b.metas]
    state = source.state_dict()
    assert len(names) == len(set(names)) == len(state) - 1
    assert set(names) < state.keys()
    load_buckets(target, iter_buckets(named(source), 0, torch.float32))
    assert target.lm_head.weight is target.model.language_model.embed_tokens.weight
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)


def test_a_bucket_is_a_copy_that_later_training_does_not_change():
    model = tiny.model()
    (bucket,) = iter_buckets(named(model), 0, torch.float32)
    kept = [array.copy() for array in bucket.data]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert all(np.array_equal(a, b) for a, b in zip(bucket.data, kept, strict=True))


def test_read_only_arrays_load_without_a_warning(recwarn):
    buckets = list(iter_buckets(named(tiny.model(0)), 0, torch.float32))
    for array in buckets[0].data:
        array.flags.writeable = False
    load_buckets(tiny.model(1), buckets)
    assert not recwarn.list


def test_float32_masters_are_rounded_to_bfloat16_as_torch_rounds():
    x = torch.randn(3, 5)
    assert torch.equal(from_host(to_host(x, torch.bfloat16), "bfloat16"), x.to(torch.bfloat16))
    scalar = from_host(to_host(torch.tensor(1.5), torch.bfloat16), "bfloat16")
    assert scalar.shape == ()
    assert float(scalar) == 1.5


def test_mixed_missing_and_ill_fitting_weights_are_errors():
    source = tiny.model(0)
    buckets = list(iter_buckets(named(source), 3, torch.float32, 20_000))
    other = list(iter_buckets(named(source), 4, torch.float32, 20_000))
    with pytest.raises(StrettoError, match=r"version 3 .* mixed with bucket 1 of version 4"):
        load_buckets(tiny.model(1), [buckets[0], *other[1:]])
    with pytest.raises(StrettoError, match=r"got buckets .* of"):
        load_buckets(tiny.model(1), buckets[:-1])
    with pytest.raises(StrettoError, match="got buckets"):
        load_buckets(tiny.model(1), [*buckets, buckets[0]])
    meta = buckets[0].metas[0]
    renamed = dataclasses.replace(buckets[0], metas=(dataclasses.replace(meta, name="x"), *buckets[0].metas[1:]))
    with pytest.raises(StrettoError, match="'x' is not a parameter"):
        load_buckets(tiny.model(1), [renamed, *buckets[1:]])
    partial = {name: p for name, p in named(source).items() if "norm.weight" not in name}
    with pytest.raises(StrettoError, match="lack"):
        load_buckets(tiny.model(1), iter_buckets(partial, 0, torch.float32))
    wide = {name: torch.zeros(*p.shape, 2) for name, p in named(source).items()}
    with pytest.raises(StrettoError, match="different model configs"):
        load_buckets(tiny.model(1), iter_buckets(wide, 0, torch.float32))


# Tags ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tags_swap_in_and_back_bit_for_bit_even_when_the_body_raises(dtype):
    model = tiny.model(0, dtype)
    tags = WeightTags(model)
    tags.save("ref")
    ref = bits(model)
    load_buckets(model, iter_buckets(named(tiny.model(1, dtype)), 0, getattr(torch, dtype)))
    actor = bits(model)
    with tags.active("ref"):
        assert same(bits(model), ref)
        assert tags.resident == "ref"
        with tags.active("actor"):
            assert same(bits(model), actor)
        assert same(bits(model), ref)
    assert same(bits(model), actor)
    assert tags.resident == "actor"
    with pytest.raises(RuntimeError), tags.active("ref"):
        raise RuntimeError
    assert same(bits(model), actor)


def test_a_resident_tag_is_not_copied():
    model = tiny.model()
    tags = WeightTags(model)
    versions = {name: p._version for name, p in model.named_parameters()}
    with tags.active("actor"):
        pass
    assert versions == {name: p._version for name, p in model.named_parameters()}


def test_a_tag_that_was_never_saved_is_an_error():
    with pytest.raises(StrettoError, match="'teacher' was never saved"), WeightTags(tiny.model()).active("teacher"):
        pass
