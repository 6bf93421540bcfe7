"""The data cursor is the number of the partition (case G1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.cursor import permutation, rows_of_partition


def walk(partitions: int, prompts: int, length: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """(epoch, row) of every position, partition after partition."""
    out: list[tuple[int, int]] = []
    for k in range(partitions):
        epochs, rows = rows_of_partition(k, prompts, length, seed, shuffle)
        out += zip(epochs, rows, strict=True)
    return out


@given(
    prompts=st.integers(1, 40), length=st.integers(1, 60), seed=st.integers(0, 2**31 - 1), partitions=st.integers(1, 12)
)
def test_every_epoch_has_each_row_exactly_once(prompts: int, length: int, seed: int, partitions: int) -> None:
    positions = walk(partitions, prompts, length, seed)
    assert len(positions) == partitions * prompts
    for epoch in range(len(positions) // length):
        rows = [row for e, row in positions if e == epoch]
        assert sorted(rows) == list(range(length))
    assert [e for e, _ in positions] == sorted(e for e, _ in positions)
    assert len(set(positions)) == len(positions)


@given(k=st.integers(0, 1000), prompts=st.integers(1, 64), length=st.integers(1, 100), seed=st.integers(0, 2**31 - 1))
def test_a_partition_does_not_depend_on_what_was_asked_before(k: int, prompts: int, length: int, seed: int) -> None:
    first = rows_of_partition(k, prompts, length, seed, True)
    permutation.cache_clear()
    assert rows_of_partition(k, prompts, length, seed, True) == first


def test_unshuffled_epochs_are_in_row_order() -> None:
    assert rows_of_partition(2, 4, 10, 0, False) == ((0, 0, 1, 1), (8, 9, 0, 1))
    assert rows_of_partition(0, 5, 2, 7, False) == ((0, 0, 1, 1, 2), (0, 1, 0, 1, 0))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(permutation(10, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_stopped_run_goes_on_where_it_ended_also_at_the_end_of_an_epoch() -> None:
    whole = walk(4, 5, 10, seed=3)
    resumed = [rows_of_partition(k, 5, 10, 3, True) for k in (2, 3)]  # partitions 0 and 1 are epoch 0
    assert [r for _, rows in resumed for r in rows] == [row for _, row in whole[10:]]
    assert sorted(row for _, row in whole[10:]) == list(range(10))
    assert [row for _, row in whole[10:]] != [row for _, row in whole[:10]]


def test_every_position_of_a_row_is_about_equally_likely() -> None:
    """Chi-square over 10 positions of row 0 in 2,000 epochs; 27.9 is the 0.1 % point at 9 degrees of freedom."""
    at = np.bincount([int(np.flatnonzero(permutation(10, 1, e) == 0)[0]) for e in range(2000)], minlength=10)
    assert ((at - 200) ** 2 / 200).sum() < 27.9


@pytest.mark.parametrize(("k", "prompts", "length"), [(-1, 4, 10), (0, 0, 10), (0, 4, 0)])
def test_impossible_partitions_are_refused(k: int, prompts: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"no partition {k} of {prompts} prompts from a source of {length} rows"):
        rows_of_partition(k, prompts, length, 0, True)
