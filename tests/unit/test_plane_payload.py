import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plane_case import assert_same_group, make_group, make_record

from stretto.plane.payload import (
    check_group,
    estimate_group_bytes,
    logical_bytes,
    pack_group,
    payload_bytes,
    unpack_group,
)
from stretto.plane.protocol import (
    FieldError,
    Lease,
    MissingField,
    Overfilled,
    Underfilled,
    UnknownField,
    WrongDtype,
    WrongShape,
    check_capacity,
    mib,
    spans,
)
from stretto.types import ConfigError, StrettoError

PLACE = "partition 3, mini 0, chunk 1, group 2"


def refused(kind, record, fields, *words):
    with pytest.raises(kind) as caught:
        check_group(record, fields, PLACE)
    for word in (PLACE, *words):
        assert word in str(caught.value)


def test_a_whole_group_passes():
    check_group(*make_group(3, 2), PLACE)


def test_a_group_without_images_and_with_empty_responses_passes():
    check_group(*make_group(3, 2, response_tokens=(0, 0), grid=()), PLACE)


def test_a_misspelled_field_is_refused_with_the_nearest_name():
    record, fields = make_group(3, 2)
    fields["pixel_value"] = fields.pop("pixel_values")
    refused(UnknownField, record, fields, "'pixel_value'", "did you mean 'pixel_values'?")


def test_a_missing_field_is_refused_by_name():
    record, fields = make_group(3, 2)
    del fields["image_grid_thw"]
    refused(MissingField, record, fields, "'image_grid_thw' is missing")


def test_another_dtype_is_refused_and_never_cast():
    record, fields = make_group(3, 2)
    fields["pixel_values"] = fields["pixel_values"].astype(np.float64)
    refused(WrongDtype, record, fields, "'pixel_values'", "float64", "float32")


def test_one_sample_of_another_dtype_is_refused_with_its_global_index():
    record, fields = make_group(3, 2)
    fields["response_ids"][1] = fields["response_ids"][1].astype(np.int64)
    refused(WrongDtype, record, fields, "'response_ids'", "sample 7", "int64", "int32")


def test_a_value_that_is_no_numpy_array_is_refused():
    record, fields = make_group(3, 2)
    fields["prompt_ids"] = [1, 2, 3, 4, 5, 6, 7]
    refused(WrongDtype, record, fields, "'prompt_ids'", "a list")


@pytest.mark.parametrize(
    ("name", "shape"), [("pixel_values", (96,)), ("image_grid_thw", (1, 4)), ("prompt_ids", (7, 1))]
)
def test_another_shape_is_refused(name, shape):
    record, fields = make_group(3, 2)
    fields[name] = np.zeros(shape, fields[name].dtype)
    refused(WrongShape, record, fields, repr(name), str(list(shape)))


@pytest.mark.parametrize(("count", "kind"), [(2, Underfilled), (4, Overfilled)])
def test_a_column_with_another_number_of_samples_is_refused(count, kind):
    record, fields = make_group(3, 2)
    fields["rollout_logprobs"] = [np.zeros(0, np.float32)] * count
    refused(kind, record, fields, "'rollout_logprobs'", f"{count} samples")


def test_a_per_sample_column_must_be_a_list():
    record, fields = make_group(3, 2)
    fields["response_ids"] = np.zeros((3, 5), np.int32)
    refused(WrongShape, record, fields, "'response_ids'", "list")


@pytest.mark.parametrize("name", ["response_ids", "rollout_logprobs"])
def test_a_response_that_disagrees_with_its_record_is_refused(name):
    record, fields = make_group(3, 2)
    fields[name][2] = fields[name][2][:-1]
    refused(WrongShape, record, fields, repr(name), "sample 8", "4 entries", "5 response tokens")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_tokens": 8}, ("'prompt_ids'", "7 prompt tokens", "has 8")),
        ({"patches": 9}, ("'pixel_values'", "8 patches", "has 9")),
        ({"images": 2}, ("'image_grid_thw'", "1 images", "has 2")),
    ],
)
def test_a_record_that_disagrees_with_the_arrays_is_refused(change, words):
    record, fields = make_group(3, 2)
    refused(WrongShape, dataclasses.replace(record, **change), fields, *words)


def test_a_grid_that_does_not_cover_the_patches_is_refused():
    record, fields = make_group(3, 2)
    fields["image_grid_thw"] = np.array([[1, 2, 2]], np.int32)
    refused(WrongShape, record, fields, "'image_grid_thw'", "4 patches", "has 8")


def test_field_errors_end_a_run_with_a_message():
    assert issubclass(FieldError, StrettoError)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    prompt_tokens=st.integers(1, 9),
    grid=st.lists(st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 3)), max_size=3),
)
def test_unpacking_gives_back_what_was_packed_as_views(lengths, prompt_tokens, grid):
    record, fields = make_group(1, 4, lengths, prompt_tokens, grid)
    check_group(record, fields, PLACE)
    payload = pack_group(fields)
    found = unpack_group(payload)
    assert_same_group(found, fields)
    assert all(np.shares_memory(view, payload["response_ids"]) for view in found["response_ids"] if view.size)


def test_eight_samples_that_share_an_image_hold_one_copy_of_it():
    record, fields = make_group(0, 0, response_tokens=(4,) * 8, prompt_tokens=10, grid=((1, 4, 4),), values=1536)
    payload = pack_group(fields)
    image, ids, grid = 16 * 1536 * 4, 10 * 4 + 10, 3 * 4
    responses = 8 * 4 * (4 + 4) + 2 * 8 * 4  # ids and log-probs, and the lengths of both columns
    assert payload_bytes(payload) == image + ids + grid + responses
    assert logical_bytes(payload, record.n) == 8 * (image + ids + grid) + responses


def test_the_estimate_at_start_up_is_the_size_of_a_packed_group():
    _, fields = make_group(0, 0, response_tokens=(4,) * 8, prompt_tokens=10, grid=((1, 4, 4), (1, 2, 2)), values=1536)
    estimate = estimate_group_bytes(
        prompt_tokens=10, patches=20, images=2, n_samples=8, response_tokens=4, values_per_patch=1536
    )
    assert payload_bytes(pack_group(fields)) == estimate


def test_a_capacity_below_the_partitions_in_flight_is_refused_with_the_capacity_to_set():
    check_capacity(2 * 100 * 2**20, 100 * 2**20, staleness=1)
    with pytest.raises(ConfigError, match=r"plane\.capacity_mib.*199\.0 MiB.*raise plane\.capacity_mib to 200"):
        check_capacity(199 * 2**20, 100 * 2**20, staleness=1)


def test_messages_join_runs_of_indexes():
    assert spans([9, 0, 1, 2, 3, 7, 10]) == "0-3, 7, 9-10"
    assert spans(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 40 more"
    assert (mib(1023), mib(3 * 2**20)) == ("1,023 bytes", "3.0 MiB")


def test_global_indexes_of_a_group_start_at_group_times_n():
    assert list(make_record(0, 2).global_indexes) == [6, 7, 8]


def test_a_part_of_a_lease_holds_only_what_a_reader_of_its_groups_needs():
    records = tuple(make_record(0, group) for group in range(4))
    refs = {group: f"ref{group}" for group in range(4)}
    lease = Lease(id="a", partition=0, consumer="actor", groups=(0, 1, 2, 3), records=records, refs=refs)
    part = lease.part(range(2, 4), chunk=1)
    assert (part.id, part.groups, part.chunk) == ("a", (2, 3), 1)
    assert part.records == records[2:] and part.refs == {2: "ref2", 3: "ref3"}
    with pytest.raises(KeyError):
        lease.part([4], chunk=0)
