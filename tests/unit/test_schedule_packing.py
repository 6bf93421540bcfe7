"""Chunk schedules: whole, within budget, balanced, and a function of the chunk alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.config import AlgorithmConfig
from stretto.schedule import loss_normaliser, schedule_chunk
from stretto.types import ChunkSchedule, GroupRecord, StrettoError


def record(group: int, responses: list[int], prompt: int = 5, patches: int = 8, valid: list[bool] | None = None):
    n = len(responses)
    return GroupRecord(
        partition=3,
        group=group,
        row_id=f"row-{group}",
        prompt_tokens=prompt,
        patches=patches,
        images=1 if patches else 0,
        response_tokens=tuple(responses),
        rewards=(0.0,) * n,
        valid=tuple(valid or [True] * n),
        truncated=(False,) * n,
        version_start=(0,) * n,
        version_end=(0,) * n,
    )


@st.composite
def chunks(draw: st.DrawFn) -> list[GroupRecord]:
    n = draw(st.integers(1, 5))
    groups = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True))
    return [
        record(
            group,
            draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)),
            prompt=draw(st.integers(1, 20)),
            patches=draw(st.sampled_from([0, 4, 8, 16])),
            valid=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        )
        for group in groups
    ]


def lengths(records: list[GroupRecord]) -> dict[int, int]:
    return {
        index: r.prompt_tokens + tokens
        for r in records
        for index, tokens in zip(r.global_indexes, r.response_tokens, strict=True)
    }


@settings(max_examples=150, deadline=None)
@given(chunks(), st.integers(1, 4), st.integers(50, 200), st.integers(16, 40), st.sampled_from(["padded", "shared"]))
def test_every_sample_is_laid_out_once_within_both_budgets(records, ranks, max_tokens, max_patches, layout):
    schedule = schedule_chunk(0, records, ranks, max_tokens, max_patches, layout)
    tokens = lengths(records)
    n = records[0].n
    patches = {r.group: r.patches for r in records}

    real = [i for rank in schedule.ranks for m in rank if not m.inert for i in m.samples]
    assert sorted(real) == sorted(tokens), "exactly once"
    assert real == sorted(real), "global_index order over ranks and microbatches"
    assert len({len(rank) for rank in schedule.ranks}) == 1
    assert len(schedule.ranks) == ranks
    for microbatch in (m for rank in schedule.ranks for m in rank):
        if layout == "padded":
            assert len(microbatch.samples) * max(tokens[i] for i in microbatch.samples) <= max_tokens
        else:
            prompts = {r.group: r.prompt_tokens for r in records if r.group in {i // n for i in microbatch.samples}}
            responses = [tokens[i] - prompts[i // n] for i in microbatch.samples]
            assert len(prompts) * max(prompts.values()) + len(responses) * max(responses) <= max_tokens
        assert sum(patches[g] for g in {i // n for i in microbatch.samples}) <= max_patches
        assert set(microbatch.samples) <= set(tokens), "inert microbatches hold a real sample of the same chunk"
    assert 0 < schedule.fill <= 1


@settings(max_examples=100, deadline=None)
@given(chunks(), st.integers(1, 3), st.randoms())
def test_the_order_of_records_changes_nothing(records, ranks, rng: random.Random):
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert schedule_chunk(1, records, ranks, 100, 40) == schedule_chunk(1, shuffled, ranks, 100, 40)


@settings(max_examples=50, deadline=None)
@given(chunks())
def test_a_chunk_is_scheduled_alike_whether_or_not_other_chunks_exist(records):
    ordered = sorted(records, key=lambda r: r.group)
    half = len(ordered) // 2 or 1
    together: list[ChunkSchedule] = []
    for c, part in enumerate(p for p in (ordered[:half], ordered[half:]) if p):
        together.append(schedule_chunk(c, part, 2, 120, 40))
    assert together[0] == schedule_chunk(0, ordered[:half], 2, 120, 40)


@settings(max_examples=100, deadline=None)
@given(chunks(), st.integers(1, 4))
def test_ranks_differ_by_at_most_two_samples_of_tokens(records, ranks):
    schedule = schedule_chunk(0, records, ranks, 400, 400)
    tokens = lengths(records)
    share = sum(tokens.values()) / ranks
    for rank in schedule.ranks:
        real = sum(tokens[i] for m in rank if not m.inert for i in m.samples)
        assert abs(real - share) <= max(tokens.values()), "each end of a run is off by at most half a sample"


def test_a_budget_of_three_rows_makes_microbatches_of_three_and_a_rest():
    # padded: every sample: 5 + 5 = 10 tokens; 30 tokens hold three rows
    schedule = schedule_chunk(0, [record(0, [5, 5, 5, 5]), record(1, [5, 5, 5, 5])], 1, 30, 100)
    assert [m.samples for m in schedule.ranks[0]] == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert schedule.fill == 1.0


def test_a_shared_prompt_counts_once_a_microbatch():
    # 5 prompt tokens and 4 responses of 5: 25 tokens for a group; 50 hold two groups, where padded rows take 80
    records = [record(0, [5, 5, 5, 5]), record(1, [5, 5, 5, 5])]
    assert [len(m.samples) for m in schedule_chunk(0, records, 1, 50, 100, "shared").ranks[0]] == [8]
    schedule = schedule_chunk(0, records, 1, 30, 100, "shared")  # 25, then one more row is 30, with its prompt 35
    assert [m.samples for m in schedule.ranks[0]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert schedule.fill == 1.0 and schedule.layout == "shared"
    uneven = schedule_chunk(0, [record(0, [5, 1]), record(1, [3, 3], prompt=2)], 1, 100, 100, "shared")
    assert uneven.fill == (5 + 5 + 1 + 2 + 3 + 3) / (2 * 5 + 4 * 5)


def test_patches_of_a_group_count_once_in_a_microbatch():
    one_group = schedule_chunk(0, [record(0, [5] * 4, patches=8)], 1, 1000, 8)
    assert [m.samples for m in one_group.ranks[0]] == [(0, 1, 2, 3)]
    two_groups = schedule_chunk(0, [record(0, [5] * 4), record(1, [5] * 4)], 1, 1000, 8)
    assert [m.samples for m in two_groups.ranks[0]] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_uneven_ranks_are_filled_up_by_inert_microbatches_of_the_shortest_sample():
    # D2: rank 0 holds 900, 900, 900, rank 1 one sample of 10 at the end; token cap 1000
    records = [record(0, [895]), record(1, [895]), record(2, [895]), record(3, [5])]
    schedule = schedule_chunk(0, records, 2, 1000, 100)
    counts = [[m.inert for m in rank] for rank in schedule.ranks]
    assert len(counts[0]) == len(counts[1])
    assert all(m.samples == (3,) for rank in schedule.ranks for m in rank if m.inert)


def test_more_ranks_than_samples_still_gives_every_rank_a_microbatch():
    schedule = schedule_chunk(0, [record(0, [5])], 3, 100, 100)
    assert [len(rank) for rank in schedule.ranks] == [1, 1, 1]
    assert sum(not m.inert for rank in schedule.ranks for m in rank) == 1


def test_failed_and_empty_samples_keep_their_rows():
    schedule = schedule_chunk(0, [record(2, [0, 3], valid=[True, False])], 1, 100, 100)
    assert [m.samples for m in schedule.ranks[0]] == [(4, 5)]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"responses": [96], "prompt": 5}, ["sample 7", "101 tokens", "actor.max_tokens_per_microbatch = 100", "101"]),
        ({"responses": [5], "patches": 51}, ["sample 7", "51 image patches", "actor.max_patches_per_microbatch = 50"]),
    ],
)
def test_a_sample_over_budget_is_an_error_that_names_it_and_the_key(kwargs, words):
    with pytest.raises(StrettoError) as caught:
        schedule_chunk(0, [record(7, **kwargs)], 1, 100, 50)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_chunk_and_a_doubled_group_are_errors():
    with pytest.raises(StrettoError, match="no prompt groups"):
        schedule_chunk(0, [], 1, 100, 100)
    with pytest.raises(StrettoError, match=r"prompt groups \[1\] twice"):
        schedule_chunk(0, [record(1, [1]), record(1, [1])], 1, 100, 100)


def test_normaliser_counts_tokens_or_samples_that_carry_loss():
    # B5: 3, 6, 1, 0, 2 loss tokens; one more sample that failed
    records = [record(0, [3, 6, 1]), record(1, [0, 2, 9], valid=[True, True, False])]
    assert normaliser(records) == 12
    assert normaliser(records, aggregation="sequence_mean") == 4


def normaliser(records: list[GroupRecord], **options: str) -> int:
    return loss_normaliser(records, AlgorithmConfig.model_validate(options), 16)


def test_a_constant_normaliser_counts_every_sample_at_full_length():
    # Dr. GRPO: 6 samples of at most 16 tokens, one failed and one empty
    records = [record(0, [3, 6, 1]), record(1, [0, 2, 9], valid=[True, True, False])]
    assert normaliser(records, aggregation="constant_length") == 6 * 16
    failed = [record(0, [3, 6, 1], valid=[False] * 3), record(1, [0, 0, 0])]
    assert normaliser(failed, aggregation="constant_length") == 0  # nothing to train: no update


@pytest.mark.parametrize("truncated", ["train", "mask", "drop"])
def test_the_normaliser_counts_truncated_responses_where_they_are_trained(truncated):
    cut = dataclasses.replace(record(0, [3, 16, 2]), truncated=(False, True, False))
    tokens, samples = (21, 3) if truncated == "train" else (5, 2)
    assert normaliser([cut], truncated=truncated) == tokens
    assert normaliser([cut], truncated=truncated, aggregation="sequence_mean") == samples
    assert normaliser([cut], truncated=truncated, aggregation="constant_length") == 3 * 16
