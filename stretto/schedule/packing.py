"""Packing of one chunk into microbatches: a pure function of that chunk's own records.

Samples are taken in ``global_index`` order and cut into contiguous runs, first one run a data-parallel rank
(balanced by real tokens), then one run a microbatch. Contiguous runs keep the samples of a prompt group
together, so that they share one vision forward, and make the result independent of every other chunk.

Cost of a microbatch in the ``padded`` layout:

* tokens: rows * (longest prompt + response among them), padding included;
* patches: those of each *distinct* group in it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.types import ChunkSchedule, GroupRecord, Microbatch, StrettoError


@dataclass(frozen=True)
class _Item:
    """One sample as the packer sees it: ``tokens`` is prompt + response, ``patches`` those of its whole group."""

    index: int
    group: int
    tokens: int
    patches: int


def schedule_chunk(
    chunk: int, records: Sequence[GroupRecord], ranks: int, max_tokens: int, max_patches: int
) -> ChunkSchedule:
    """Lay the samples of one chunk out for ``ranks`` data-parallel ranks.

    ``max_tokens`` and ``max_patches`` bound one microbatch (``actor.max_tokens_per_microbatch``,
    ``actor.max_patches_per_microbatch``). Samples that failed or hold no response token keep their row: they
    have zero weight, but counts never change. The order of ``records`` has no effect.

    Raises StrettoError when the chunk is empty, a group occurs twice, or one sample alone exceeds a budget.
    """
    if not records:
        raise StrettoError(f"chunk {chunk} holds no prompt groups: rollout.prompts_per_partition is too small for it")
    ordered = sorted(records, key=lambda record: record.group)
    groups = tuple(record.group for record in ordered)
    if len(set(groups)) != len(groups):
        twice = sorted({g for g in groups if groups.count(g) > 1})
        raise StrettoError(f"chunk {chunk} of partition {ordered[0].partition} holds prompt groups {twice} twice")
    items = [
        _Item(index, record.group, record.prompt_tokens + response, record.patches)
        for record in ordered
        for index, response in zip(record.global_indexes, record.response_tokens, strict=True)
    ]
    _check_budgets(items, ordered, max_tokens, max_patches)

    per_rank = [_pack(run, max_tokens, max_patches) for run in _split_by_tokens(items, ranks)]
    microbatches = max(len(packed) for packed in per_rank)
    filler = min(items, key=lambda item: (item.tokens, item.patches, item.index))
    inert = Microbatch(samples=(filler.index,), inert=True)
    laid_out = sum(_padded_tokens(run) for packed in per_rank for run in packed)
    laid_out += filler.tokens * sum(microbatches - len(packed) for packed in per_rank)
    return ChunkSchedule(
        chunk=chunk,
        groups=groups,
        layout="padded",
        ranks=tuple(
            tuple(Microbatch(samples=tuple(item.index for item in run)) for run in packed)
            + (inert,) * (microbatches - len(packed))
            for packed in per_rank
        ),
        fill=sum(item.tokens for item in items) / max(laid_out, 1),
    )


def loss_normaliser(records: Sequence[GroupRecord], aggregation: Literal["token_mean", "sequence_mean"]) -> int:
    """What the loss sums of one optimizer mini are divided by, from its records alone.

    ``token_mean``: response tokens of valid samples, before any importance masking. ``sequence_mean``: valid
    samples with at least one response token. The number is global: it is the same on every rank.
    """
    lengths = [
        tokens
        for record in records
        for tokens, valid in zip(record.response_tokens, record.valid, strict=True)
        if valid and tokens > 0
    ]
    return sum(lengths) if aggregation == "token_mean" else len(lengths)


def _check_budgets(items: list[_Item], records: list[GroupRecord], max_tokens: int, max_patches: int) -> None:
    by_group = {record.group: record for record in records}
    for item in items:
        record = by_group[item.group]
        name = f"sample {item.index} (partition {record.partition}, group {item.group}, row {record.row_id!r})"
        if item.tokens > max_tokens:
            raise StrettoError(
                f"{name} has {item.tokens} tokens ({record.prompt_tokens} prompt + "
                f"{item.tokens - record.prompt_tokens} response), more than actor.max_tokens_per_microbatch = "
                f"{max_tokens}: raise it to at least {item.tokens}, or lower rollout.max_response_tokens or "
                f"model.max_pixels"
            )
        if item.patches > max_patches:
            raise StrettoError(
                f"{name} has {item.patches} image patches, more than actor.max_patches_per_microbatch = "
                f"{max_patches}: raise it to at least {item.patches}, or lower model.max_pixels"
            )


def _split_by_tokens(items: list[_Item], ranks: int) -> list[list[_Item]]:
    """Cut into ``ranks`` contiguous runs: a sample goes to the rank in whose share the middle of its tokens lies."""
    runs: list[list[_Item]] = [[] for _ in range(ranks)]
    total = max(sum(item.tokens for item in items), 1)
    before = 0
    for item in items:
        # integers only: rank = floor((before + tokens / 2) * ranks / total)
        rank = (2 * before + item.tokens) * ranks // (2 * total)
        runs[min(rank, ranks - 1)].append(item)
        before += item.tokens
    return runs


def _pack(items: list[_Item], max_tokens: int, max_patches: int) -> list[list[_Item]]:
    """Fewest contiguous microbatches within both budgets, by taking as many samples as fit each time."""
    packed: list[list[_Item]] = []
    longest = patches = 0
    for item in items:
        # items come by group, so only the last one's group can be this one's
        new_patches = 0 if packed and packed[-1][-1].group == item.group else item.patches
        rows = len(packed[-1]) + 1 if packed else 0
        if rows and rows * max(longest, item.tokens) <= max_tokens and patches + new_patches <= max_patches:
            packed[-1].append(item)
            longest, patches = max(longest, item.tokens), patches + new_patches
        else:
            packed.append([item])
            longest, patches = item.tokens, item.patches
    return packed


def _padded_tokens(items: list[_Item]) -> int:
    return len(items) * max(item.tokens for item in items)
