"""The data: can it be read, and does the model take it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stretto.checks import Problem
from stretto.preflight.case import Case, Caution, Fact, Line, problems_of
from stretto.types import ConfigError, ProcessedPrompt, StrettoError

if TYPE_CHECKING:
    from stretto.models.qwen3_vl import Qwen3VL
    from stretto.types import Prompt

SAMPLED_ROWS = 16
PATCHES_PROCESSED = 65536
"""Patches of all processed prompts together: a check takes seconds, whatever the size of images."""
PATCHES_TRIED = 4096
"""Patches up to which the trial forward takes a moment; attention needs time and memory by their square."""


def data(case: Case) -> Iterator[Line]:
    from stretto.data.source import open_source

    if case.family is None:
        yield Fact("not looked at, since there is no model to read it for")
        return
    try:
        case.source = open_source(case.config.data, "train")
        step = max(1, len(case.source) // SAMPLED_ROWS)
        case.prompts = [case.source[row] for row in range(0, len(case.source), step)]
        case.processed = _processed(case.family, case.prompts)
    except ConfigError as error:
        yield from problems_of(error, "data.source")
    except StrettoError as error:  # one row, which it names
        yield Problem(("data.source",), str(error))
    else:
        yield from _counted(case, len(case.source))


def _counted(case: Case, rows: int) -> Iterator[Line]:
    used = case.config.run.updates * case.config.rollout.prompts_per_partition
    yield Fact(
        f"{case.config.data.source}: {rows:,} training prompts; {case.config.run.updates} updates take {used:,}, which "
        f"is {used / rows:.2g} epochs"
    )
    if case.processed:
        tokens = [len(p.prompt_ids) for p in case.processed]
        patches = [len(p.pixel_values) for p in case.processed]
        yield Fact(f"{len(tokens)} prompts tried: {_span(tokens)} tokens, {_span(patches)} image patches")
    if case.training and case.config.eval.every == 0:
        yield Caution("eval.every = 0: nothing is measured on prompts that training never saw")


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _processed(family: Qwen3VL, prompts: list[Prompt]) -> list[ProcessedPrompt]:
    """The largest first, as long as they stay within ``PATCHES_PROCESSED``; none where one alone exceeds it."""
    from stretto.models.loading import image_patches

    result: list[ProcessedPrompt] = []
    total = 0
    for prompt in sorted(prompts, key=lambda p: image_patches(family, p.images), reverse=True):
        total += image_patches(family, prompt.images)
        if total > PATCHES_PROCESSED:
            break
        result.append(family.process(prompt))
    return result


def forward(case: Case) -> Iterator[Line]:
    """One forward of one prompt through one layer of each kind."""
    from stretto.models.loading import try_forward

    shown = [p for p in case.processed if 0 < len(p.pixel_values) <= PATCHES_TRIED]
    shown = shown or [p for p in case.processed if not len(p.pixel_values)]
    if case.family is None or not shown:
        yield Fact("not tried, since there is no prompt of a size for it")
        return
    try:
        try_forward(case.config.model, case.family, min(shown, key=lambda p: len(p.pixel_values)))
    except ConfigError as error:
        yield from problems_of(error, case.model_name)
    else:
        yield Fact("a layer of each kind takes a prompt of the data")
