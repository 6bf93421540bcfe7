"""Which cells a plan runs, in which blocks and in which order. Pure; nothing starts here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.bench.plan import BASE


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run in a fresh process: the ``position``-th of its block."""

    block: int
    position: int
    condition: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder: ``03-1-P+S``."""
        return f"{self.block:02d}-{self.position}-{self.condition}"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Cells that one machine runs in one boot, one after another, with one seed; ``order`` names their conditions."""

    index: int
    seed: int
    repetition: int
    order: tuple[str, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(block=self.index, position=position, condition=condition, seed=self.seed)
            for position, condition in enumerate(self.order)
        )


@dataclass(frozen=True, kw_only=True)
class Design:
    """The blocks of a campaign in the order in which they run.

    period    blocks after which every inner condition has stood equally often at each place and after each other one
    complete  whether the blocks are whole periods, so that a drift or a neighbour that slows what follows favours none
    """

    blocks: tuple[Block, ...]
    period: int

    @property
    def complete(self) -> bool:
        return len(self.blocks) % self.period == 0

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for block in self.blocks for cell in block.cells)


def williams_rows(n: int) -> tuple[tuple[int, ...], ...]:
    """Orders of 0 … n - 1 in which each stands equally often at every place and directly after each other one.

    Williams (1949), Aust. J. Sci. Res. A 2:149: the first row is 0, n-1, 1, n-2, …, the others add 1 modulo n. An even
    n needs n rows, which hold the mirror image of each row; an odd n needs 2n, the mirror images included. Every row is
    followed by its mirror image here, so that also after any even number of rows all have the same mean place.
    """
    if n < 2:
        return (tuple(range(n)),)
    first = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    shifted = [tuple((value + row) % n for value in first) for row in range(n if n % 2 else n // 2)]
    return tuple(order for row in shifted for order in (row, row[::-1]))


def design(
    conditions: Sequence[str], seeds: Sequence[int], repetitions: int, order: Literal["blocks", "pairs"] = "blocks"
) -> Design:
    """Blocks of all seeds, then again for each further repetition.

    ``blocks``: B, the other conditions by the rows of ``williams_rows``, B; with two others that is A B, B A, A B, … .
    ``pairs``: the two conditions alone, alternately mirrored; four seeds run ABBAABBA. No pair of equal cells is in a
    block then, so that nothing says how far two runs of one condition are apart.
    """
    others = [condition for condition in conditions if condition != BASE]
    inner = [BASE, *others] if order == "pairs" else others
    rows = williams_rows(len(inner))
    blocks = []
    for index in range(len(seeds) * repetitions):
        repetition, at = divmod(index, len(seeds))
        middle = tuple(inner[i] for i in rows[index % len(rows)])
        ordered = middle if order == "pairs" else (BASE, *middle, BASE)
        blocks.append(Block(index=index, seed=seeds[at], repetition=repetition, order=ordered))
    return Design(blocks=tuple(blocks), period=len(rows))
