"""Prompt groups for tests of the data plane, with values that follow from their indexes."""

from __future__ import annotations

import numpy as np

from stretto.types import GroupFields, GroupRecord

VALUES_PER_PATCH = 12


def make_record(
    partition: int, group: int, response_tokens=(3, 0, 5), prompt_tokens=7, grid=((1, 2, 4),)
) -> GroupRecord:
    n = len(response_tokens)
    return GroupRecord(
        partition=partition,
        group=group,
        row_id=f"row-{group}",
        prompt_tokens=prompt_tokens,
        patches=sum(t * h * w for t, h, w in grid),
        images=len(grid),
        response_tokens=tuple(response_tokens),
        rewards=(0.0,) * n,
        valid=(True,) * n,
        truncated=(False,) * n,
        version_start=(0,) * n,
        version_end=(0,) * n,
    )


def make_group(
    partition: int, group: int, response_tokens=(3, 0, 5), prompt_tokens=7, grid=((1, 2, 4),), values=VALUES_PER_PATCH
) -> tuple[GroupRecord, GroupFields]:
    """A record and fields that agree. Response ids start at 1000 * global_index; log-probs are their negatives."""
    record = make_record(partition, group, response_tokens, prompt_tokens, grid)
    ids = [
        np.arange(1000 * sample, 1000 * sample + tokens, dtype=np.int32)
        for sample, tokens in zip(record.global_indexes, response_tokens, strict=True)
    ]
    fields: GroupFields = {
        "prompt_ids": np.arange(prompt_tokens, dtype=np.int32) + 100 * group,
        "mm_token_type_ids": np.zeros(prompt_tokens, dtype=np.int8),
        "pixel_values": np.full((record.patches, values), 0.5 + group, dtype=np.float32),
        "image_grid_thw": np.array(grid, dtype=np.int32).reshape(-1, 3),
        "response_ids": ids,
        "rollout_logprobs": [-array.astype(np.float32) for array in ids],
    }
    return record, fields


def assert_same_group(found: GroupFields, put: GroupFields) -> None:
    assert found.keys() == put.keys()
    for name, value in put.items():
        if isinstance(value, list):
            assert len(found[name]) == len(value)
            for a, b in zip(found[name], value, strict=True):
                np.testing.assert_array_equal(a, b, strict=True)
        else:
            np.testing.assert_array_equal(found[name], value, strict=True)
