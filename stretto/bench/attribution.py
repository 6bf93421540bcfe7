"""How much of a gain belongs to which switch: factorial where the cells allow it, and else sequential, called so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.bench.arithmetic import BlockValues, Estimate, estimate, paired
from stretto.bench.plan import BASE, Contrast

FACTORIALS = (("P", "R"), ("P", "S"))
"""No share is told across R and S, which are never on together."""


@dataclass(frozen=True, kw_only=True)
class Factorial:
    """{first off, on} x {second off, on}, in logs, each with its own interval over the blocks that have all four cells.

    With b, f, s, fs the log values of a block (neither, first, second, both):

    first        ((f - b) + (fs - s)) / 2   main effect, the mean over the other switch being off and on
    second       ((s - b) + (fs - f)) / 2
    interaction  fs - f - s + b             what both bring beyond the sum of each alone
    total        fs - b

    The main effects are the Shapley shares (1953): of two players each share is the mean over both orders of joining.
    They sum to ``total``, in every block. Intervals are of each quantity alone; none of them is a verdict.
    """

    names: tuple[str, str]
    first: Estimate
    second: Estimate
    interaction: Estimate
    total: Estimate


@dataclass(frozen=True, kw_only=True)
class Increment:
    """What a switch adds to what was on before. It depends on the order, and is no share."""

    switch: str
    contrast: Contrast
    estimate: Estimate

    @property
    def name(self) -> str:
        return f"sequential: {self.switch} after {self.contrast.base}"


def factorial(blocks: Sequence[BlockValues], names: tuple[str, str]) -> Factorial | None:
    """None: no block has all four cells."""
    conditions = (BASE, *names, "+".join(names))
    rows = []
    for block in blocks:
        logs = [block.log(condition) for condition in conditions]
        row = [value for value in logs if value is not None]
        if len(row) == len(conditions):
            rows.append(row)
    if not rows:
        return None
    return Factorial(
        names=names,
        first=estimate([((f - b) + (fs - s)) / 2 for b, f, s, fs in rows]),
        second=estimate([((s - b) + (fs - f)) / 2 for b, f, s, fs in rows]),
        interaction=estimate([fs - f - s + b for b, f, s, fs in rows]),
        total=estimate([fs - b for b, _, _, fs in rows]),
    )


def factorials(blocks: Sequence[BlockValues]) -> tuple[Factorial, ...]:
    """Those of {P} x {R} and {P} x {S} whose cells are there."""
    return tuple(found for names in FACTORIALS if (found := factorial(blocks, names)) is not None)


def increments(blocks: Sequence[BlockValues]) -> tuple[Increment, ...]:
    """P after B, then R and S after P, of those whose factorial cannot be told; each over the blocks that have both."""
    told = {found.names for found in factorials(blocks)}
    steps = [("P", Contrast("P", BASE))] if len(told) < len(FACTORIALS) else []
    steps += [
        (second, Contrast(f"{first}+{second}", first)) for first, second in FACTORIALS if (first, second) not in told
    ]
    found = [(switch, contrast, paired(blocks, contrast)) for switch, contrast in steps]
    return tuple(
        Increment(switch=switch, contrast=contrast, estimate=estimate(values))
        for switch, contrast, values in found
        if values
    )
