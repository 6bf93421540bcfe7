"""The data: can it be read, and does the model take it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stretto.data.check import Gauge, check_rows, few
from stretto.data.files import Files, missing_columns, open_rows
from stretto.data.source import open_source
from stretto.machine_checks import data_files
from stretto.preflight.case import Case, Caution, Fact, Line, problems_of
from stretto.problems import Problem
from stretto.settings import OPTIONS
from stretto.types import ConfigError, ProcessedPrompt, Split, StrettoError

if TYPE_CHECKING:
    from stretto.models.qwen3_vl import Qwen3VL
    from stretto.types import Prompt

SAMPLED_ROWS = 16
PATCHES_PROCESSED = 65536
"""Patches of all processed prompts together: a check takes seconds, whatever the size of images."""
PATCHES_TRIED = 4096
"""Patches up to which the trial forward takes a moment; attention needs time and memory by their square."""


def data(case: Case) -> Iterator[Line]:
    """At a start, a few rows: a run looks at all of them before its processes start, in a folder that it has locked.
    Where thorough, every row of the splits that a run reads.
    """
    try:
        if case.config.seams.replay:
            yield from _recorded(case)
            return
        missing = list(data_files(case.config, case.reader))
        missing = missing or list(_columns(case))
        yield from missing
        if missing:
            case.no_prompts = f"there is a problem with {missing[0].names[0]}"
            return
        if case.config.data.source == "digits":
            case.source = open_source(case.config.data, "train")
        elif case.thorough and case.training and case.family is not None:
            yield from _whole(case)
        else:
            yield from _few(case)
        if case.source is not None:
            case.prompts = [case.source[row] for row in _spread(len(case.source))]
        if case.family is not None:
            case.processed = _processed(case.family, case.prompts)
    except StrettoError as error:
        texts = error.problems if isinstance(error, ConfigError) else [str(error)]  # else one row, which it names
        found = [Problem((_option(text),), text) for text in texts]
        case.no_prompts = f"there is a problem with {found[0].names[0]}"
        yield from found
    else:
        yield from _counted(case)


def _recorded(case: Case) -> Iterator[Line]:
    """The prompts of a recording, in place of data."""
    from stretto.build import source

    case.source = source(case.config, "train", keep=False)
    case.prompts = [case.source[row] for row in _spread(len(case.source))]
    if case.family is not None:
        case.processed = _processed(case.family, case.prompts)
    yield Fact(f"recording {case.config.seams.replay}: {len(case.source):,} prompts")


def _option(text: str) -> str:
    """The option that a problem of the data begins with."""
    name = re.match(r"[\w.]*", text)
    return name[0] if name and name[0] in OPTIONS else "data.train_files"


def _columns(case: Case) -> Iterator[Problem]:
    """Needs no model, and says where the value came from; the check of all rows can not."""
    if case.config.data.source == "digits":
        return
    splits: list[Split] = ["train"]
    if case.training and case.config.eval.every > 0:
        splits.append("validation")
    for split in splits:
        for name, why in missing_columns(open_rows(case.config.data, split), split):
            yield case.reader.problem(f"data.{name}", why=why)


def _spread(rows: int) -> list[int]:
    """Rows to look at: not at equal distances, lest all of them be of one kind."""
    step = max(1, rows // SAMPLED_ROWS)
    return sorted({min(at + i * (step > 1), rows - 1) for i, at in enumerate(range(0, rows, step))})


def _whole(case: Case) -> Iterator[Line]:
    """As a run opens its data, but nothing is kept.

    Raises:
        ConfigError: what is wrong with all splits.
    """
    from stretto.run_data import open_splits

    sources = open_splits(case.config, case.family, keep=False, note=case.note)
    case.source = sources["train"]
    for source in sources.values():
        if isinstance(source, Files):
            yield from map(Caution, source.cautions)


def _few(case: Case) -> Iterator[Line]:
    """Whether a row that can not be read ends a run is decided where all of them are looked at."""
    from stretto.build import gauge

    rows = open_rows(case.config.data, "train")
    tried = _spread(len(rows))
    anything = Gauge(tokens=lambda _: 0, patches=lambda _: 0, key="")
    measure = anything if case.family is None else gauge(case.config, case.family, "train")
    found = check_rows(len(tried), lambda i: rows.read(tried[i]), lambda i: rows.name(tried[i]), measure)
    case.prompts = [rows.read(tried[i]) for i in found.usable]
    bad = [refusal for refusal in found.refused if refusal.kind == "bad"]
    yield Fact(f"{len(rows):,} rows in files; {len(tried) - len(bad)} of {len(tried)} tried can be read")
    if bad:
        case.no_prompts = f"none of {len(tried)} rows that were tried can be read"
        refuses = ', and data.bad_rows = "fail" refuses them' if case.config.data.bad_rows == "fail" else ""
        yield Caution(f"{len(bad)} of {len(tried)} rows that were tried can not be used{refuses}{few(bad)}")


def _counted(case: Case) -> Iterator[Line]:
    if case.source is not None:
        rows = len(case.source)
        updates, used = case.config.updates_to_train, case.config.partitions * case.config.rollout.prompts_per_partition
        refilled = case.config.rollout.refill_rounds > 0
        yield Fact(
            f"{case.config.data.source}: {rows:,} training prompts; {updates} updates take {used:,}, "
            f"which is {used / rows:.2g} epochs{'; groups that are dropped come on top' if refilled else ''}"
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
        yield Fact(f"not tried, since {'there is no prompt of a size for it' if case.prompts else case.no_prompts}")
        return
    try:
        try_forward(case.config.model, case.family, min(shown, key=lambda p: len(p.pixel_values)))
    except ConfigError as error:
        yield from problems_of(error, case.model_name)
    else:
        yield Fact("a layer of each kind takes a prompt of the data")
