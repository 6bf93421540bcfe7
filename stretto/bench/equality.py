"""What was the same in all cells of a block, update by update: whether what is compared did the same work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stretto.bench.read_cells import Read, Row

METRICS = ("samples", "images", "tokens", "response_tokens", "reward_mean", "loss", "grad_norm")
FINGERPRINTS = (
    "inputs.prompt_ids",
    "inputs.pixel_values",
    "inputs.response_ids",
    "inputs.rewards",
    "schedule",
    "gradients",
    "parameters",
)
"""Collections of fingerprints.jsonl: equal hashes are equal bits."""


def equality(blocks: Sequence[Sequence[Read]]) -> tuple[str, ...]:
    """A line for each quantity, over the accepted cells of every block, in the order in which they ran."""
    compared = [block for block in blocks if len(block) > 1]
    if not compared:
        return ("nothing is compared: no block has two accepted cells",)
    lines = [_line(name, compared, "rows") for name in METRICS]
    lines += [_line(f"{name} (fingerprint)", compared, "fingerprints", name) for name in FINGERPRINTS]
    return tuple(line for line in lines if line)


def _line(title: str, blocks: Sequence[Sequence[Read]], source: str, key: str = "") -> str:
    """Empty where no run has the quantity."""
    name = key or title
    rows = {read.attempt.path: getattr(read, source) for block in blocks for read in block}
    if not any(name in row for found in rows.values() for row in found):
        return ""
    cells, updates = sum(len(block) for block in blocks), min(len(found) for found in rows.values())
    differing = [difference for block in blocks for difference in _differences(name, block, source)]
    if updates == 0:
        return f"{title}: not every cell has written it"
    if not differing:
        return f"{title}: the same in all cells of every block, at all {updates} updates"
    unequal = dict.fromkeys(read for read, *_ in differing)
    read, first, update, mine, theirs = differing[0]
    conditions = ", ".join(dict.fromkeys(name.split("-", 2)[2] for name in unequal))
    return (
        f"{title}: {len(unequal)} of {cells} cells ({conditions}) differ from the first of their block; "
        f"{read} from update {update} on: {mine} against {theirs} in {first}"
    )


def _differences(name: str, block: Sequence[Read], source: str) -> Iterator[tuple[str, str, int, Any, Any]]:
    """Of each cell that differs from the first: where it first does."""
    first = block[0]
    theirs: Sequence[Row] = getattr(first, source)
    for read in block[1:]:
        for update, (mine, other) in enumerate(zip(getattr(read, source), theirs, strict=False)):
            if mine.get(name) != other.get(name):
                yield read.name, first.name, update, mine.get(name), other.get(name)
                break
