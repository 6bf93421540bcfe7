"""Packing of one chunk into microbatches: a pure function of that chunk's own records.

Samples are taken in ``global_index`` order and cut into contiguous runs, first one run a data-parallel rank
(balanced by real tokens), then one run a microbatch. Contiguous runs keep the samples of a prompt group
together, so that they share one vision forward, and make the result independent of every other chunk.

Cost of a microbatch, padding included; G distinct groups, B rows:

* tokens, ``padded`` layout: B * (longest prompt + response among them);
* tokens, ``shared`` layout, where the samples of a group share the forward of their prompt: G * longest prompt + B *
  longest response;
* patches: those of each distinct group in it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stretto.config import AlgorithmConfig
from stretto.types import ChunkSchedule, GroupRecord, Microbatch, StrettoError

Layout = Literal["padded", "shared"]


@dataclass(frozen=True)
class _Item:
    """One sample as the packer sees it; ``patches`` are those of its whole group, which has ``n`` samples."""

    index: int
    group: int
    n: int
    prompt: int
    response: int
    patches: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    def weight(self, layout: Layout) -> int:
        """Its share of the work, times ``n``: in the ``shared`` layout the prompt is the whole group's."""
        return self.n * self.tokens if layout == "padded" else self.prompt + self.n * self.response


@dataclass(frozen=True)
class _Size:
    """What samples laid out together come to; they arrive group by group."""

    rows: int = 0
    groups: int = 0
    last_group: int = -1
    prompt: int = 0
    response: int = 0
    tokens: int = 0
    patches: int = 0

    def plus(self, item: _Item) -> _Size:
        new = int(item.group != self.last_group)
        return _Size(
            rows=self.rows + 1,
            groups=self.groups + new,
            last_group=item.group,
            prompt=max(self.prompt, item.prompt),
            response=max(self.response, item.response),
            tokens=max(self.tokens, item.tokens),
            patches=self.patches + new * item.patches,
        )

    def laid_out(self, layout: Layout) -> int:
        """Tokens, padding included."""
        if layout == "padded":
            return self.rows * self.tokens
        return self.groups * self.prompt + self.rows * self.response


def schedule_chunk(
    chunk: int,
    records: Sequence[GroupRecord],
    ranks: int,
    max_tokens: int,
    max_patches: int,
    layout: Layout = "padded",
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
        _Item(index, record.group, record.n, record.prompt_tokens, response, record.patches)
        for record in ordered
        for index, response in zip(record.global_indexes, record.response_tokens, strict=True)
    ]
    _check_budgets(items, ordered, max_tokens, max_patches)

    per_rank = [_pack(run, max_tokens, max_patches, layout) for run in _split_by_work(items, ranks, layout)]
    microbatches = max(len(packed) for packed in per_rank)
    filler = min(items, key=lambda item: (item.tokens, item.patches, item.index))
    inert = Microbatch(samples=(filler.index,), inert=True)
    laid_out = sum(_size(run).laid_out(layout) for packed in per_rank for run in packed)
    laid_out += filler.tokens * sum(microbatches - len(packed) for packed in per_rank)
    real = sum(_real_tokens(run, layout) for packed in per_rank for run in packed)
    return ChunkSchedule(
        chunk=chunk,
        groups=groups,
        layout=layout,
        ranks=tuple(
            tuple(Microbatch(samples=tuple(item.index for item in run)) for run in packed)
            + (inert,) * (microbatches - len(packed))
            for packed in per_rank
        ),
        fill=real / max(laid_out, 1),
    )


def loss_normaliser(records: Sequence[GroupRecord], algorithm: AlgorithmConfig, max_response_tokens: int) -> int:
    """What the loss sums of one optimizer mini are divided by, from its records alone.

    ``token_mean``: response tokens of the samples that are trained (``GroupRecord.trained``), before any importance
    masking. ``sequence_mean``: those samples with at least one response token. ``constant_length``: all samples of the
    mini, trained or not, times ``max_response_tokens`` (``rollout.max_response_tokens``), so that no length and no
    failure changes the weight of a token (Dr. GRPO, arXiv:2503.20783). 0 where no token is trained. The number is
    global: it is the same on every rank.
    """
    lengths = [
        tokens
        for record in records
        for tokens, trained in zip(record.response_tokens, record.trained(algorithm.truncated), strict=True)
        if trained and tokens > 0
    ]
    if algorithm.aggregation == "constant_length" and lengths:
        return sum(record.n for record in records) * max_response_tokens
    return len(lengths) if algorithm.aggregation == "sequence_mean" else sum(lengths)


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


def _split_by_work(items: list[_Item], ranks: int, layout: Layout) -> list[list[_Item]]:
    """Cut into ``ranks`` contiguous runs: a sample goes to the rank in whose share the middle of its work lies."""
    runs: list[list[_Item]] = [[] for _ in range(ranks)]
    total = max(sum(item.weight(layout) for item in items), 1)
    before = 0
    for item in items:
        # integers only: rank = floor((before + weight / 2) * ranks / total)
        rank = (2 * before + item.weight(layout)) * ranks // (2 * total)
        runs[min(rank, ranks - 1)].append(item)
        before += item.weight(layout)
    return runs


def _pack(items: list[_Item], max_tokens: int, max_patches: int, layout: Layout) -> list[list[_Item]]:
    """Fewest contiguous microbatches within both budgets, by taking as many samples as fit each time."""
    packed: list[list[_Item]] = []
    size = _Size()
    for item in items:
        longer = size.plus(item)
        if packed and longer.laid_out(layout) <= max_tokens and longer.patches <= max_patches:
            packed[-1].append(item)
            size = longer
        else:
            packed.append([item])
            size = _Size().plus(item)
    return packed


def _size(items: list[_Item]) -> _Size:
    size = _Size()
    for item in items:
        size = size.plus(item)
    return size


def _real_tokens(items: list[_Item], layout: Layout) -> int:
    """As laid out, without padding."""
    if layout == "padded":
        return sum(item.tokens for item in items)
    prompts = {item.group: item.prompt for item in items}
    return sum(prompts.values()) + sum(item.response for item in items)
