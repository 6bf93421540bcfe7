"""The order of cells: balanced by Williams rows, B at both ends of a block, the historical pairs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from stretto.bench.design import design, williams_rows

FIVE = ("B", "P", "P+R", "P+S", "B(c=1)")


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_a_square_has_every_condition_at_every_place_and_after_every_other_one_equally_often(n):
    rows = williams_rows(n)
    times = 2 if n % 2 else 1
    assert len(rows) == times * n
    places = Counter((place, value) for row in rows for place, value in enumerate(row))
    assert places == Counter({(place, value): times for place in range(n) for value in range(n)})
    neighbours = Counter(pair for row in rows for pair in pairwise(row))
    assert neighbours == Counter({(a, b): times for a in range(n) for b in range(n) if a != b})


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_every_second_row_mirrors_the_one_before(n):
    rows = williams_rows(n)
    assert all(b == a[::-1] for a, b in zip(rows[::2], rows[1::2], strict=True))


def test_rows_by_hand():
    # n = 4: 0 3 1 2 and its mirror image; then 1 more, modulo 4: 1 0 2 3 and its mirror image.
    assert williams_rows(4) == ((0, 3, 1, 2), (2, 1, 3, 0), (1, 0, 2, 3), (3, 2, 0, 1))
    assert williams_rows(1) == ((0,),)


def test_a_block_is_one_seed_with_b_at_both_ends():
    found = design(FIVE, seeds=(11, 12, 13, 14), repetitions=1)
    assert [block.order for block in found.blocks] == [
        ("B", "P", "B(c=1)", "P+R", "P+S", "B"),
        ("B", "P+S", "P+R", "B(c=1)", "P", "B"),
        ("B", "P+R", "P", "P+S", "B(c=1)", "B"),
        ("B", "B(c=1)", "P+S", "P", "P+R", "B"),
    ]
    assert found.complete and found.period == 4
    assert [block.seed for block in found.blocks] == [11, 12, 13, 14]
    assert [cell.name for cell in found.blocks[3].cells][:2] == ["03-0-B", "03-1-B(c=1)"]
    assert len({cell.name for cell in found.cells}) == 24


def test_two_other_conditions_run_abba():
    found = design(("B", "P", "P+S"), seeds=(1, 2), repetitions=1)
    assert [block.order[1:-1] for block in found.blocks] == [("P", "P+S"), ("P+S", "P")]
    assert found.complete


def test_blocks_that_are_no_whole_square_are_said():
    assert not design(FIVE, seeds=(1, 2, 3), repetitions=1).complete
    assert design(FIVE, seeds=(1, 2), repetitions=2).complete
    assert design(("B", "P"), seeds=(1,), repetitions=1).complete


def test_repetitions_go_through_all_seeds_again():
    found = design(("B", "P"), seeds=(7, 8), repetitions=2)
    assert [(block.seed, block.repetition) for block in found.blocks] == [(7, 0), (8, 0), (7, 1), (8, 1)]


def test_the_historical_first_step_design_runs_abbaabba_over_four_seeds():
    found = design(("B", "P+S"), seeds=(1, 2, 3, 4), repetitions=1, order="pairs")
    letters = "".join("A" if cell.condition == "B" else "B" for cell in found.cells)
    assert letters == "ABBAABBA"
    assert [cell.seed for cell in found.cells] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert found.complete
