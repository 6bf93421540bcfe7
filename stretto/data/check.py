"""Every row of a split, looked at before a run starts: read, its images decoded, its tokens counted.

What is found is kept in the run folder, so that a resumed run and the rollout process need not look again.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from stretto.data.images import Images
from stretto.data.tables import BadRow, Changed
from stretto.types import Prompt, StrettoError

ROWS_AT_ONCE = 32
SHOWN = 20
"""Refused rows that an error lists."""
SHOWN_ALIKE = 5
"""Those of them whose reasons differ in numbers and file names only."""
REPORT_S = 5.0
"""Seconds between two reports of how far the check is."""

Report = Callable[[int, int], None]
"""Told how many rows of how many have been checked, every few seconds."""


class Note(Protocol):
    """Tells the user something; ``stays``: it is a result, and not only how far something is."""

    def __call__(self, message: str, *, stays: bool = False) -> None: ...


def silent(message: str, *, stays: bool = False) -> None:
    """A ``Note`` that nobody reads."""


FileState = tuple[str, int, int]
"""Path as it was looked up, size in bytes, time of the last change in ns."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A largest number, and the options that set it in words.

    ``option`` is the one to raise, and ``beyond`` what its value is more than ``most``.
    """

    most: int
    set_by: str
    option: str = ""
    beyond: int = 0


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """What a model makes of prompts: how long they are, and how long they may be.

    ``tokens`` and ``patches`` see images as arrays of the right shape without content; ``answer`` counts the tokens of
    the right answer with its end. Above ``max_answer`` a row is used all the same: nobody can give its answer. ``key``
    names the model's way of reading: equal keys, equal counts.
    """

    tokens: Callable[[Prompt], int]
    patches: Callable[[Prompt], int]
    answer: Callable[[Prompt], int] = lambda _: 0
    max_tokens: tuple[Limit, ...] = ()
    max_patches: tuple[Limit, ...] = ()
    max_answer: Limit | None = None
    key: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A row that is not used. ``overlong``: sound, but above a limit; ``bad``: anything else.

    ``wants``: options -> the values under which a row would not be overlong.
    """

    row_id: str
    kind: Literal["bad", "overlong"]
    reason: str
    wants: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row that can be used: its prompt's tokens, its image patches, the tokens of its answer with their end, and the
    files that its images come from.
    """

    tokens: int
    patches: int
    answer: int
    files: tuple[FileState, ...]


@dataclass(frozen=True, kw_only=True)
class RowCheck:
    """What became of every row: ``usable`` row numbers in order (from 0, over all files of the split), and the others.

    ``files`` are the image files outside the rows, each once; ``tokens``, ``patches`` and ``answer`` the most of any
    usable row; ``long_answers`` how many of these have an answer above the gauge's ``max_answer``.
    """

    rows: int
    usable: tuple[int, ...]
    refused: tuple[Refusal, ...]
    files: tuple[FileState, ...]
    tokens: int
    patches: int
    answer: int
    long_answers: int

    def count(self, kind: str) -> int:
        return sum(refusal.kind == kind for refusal in self.refused)


ReadRow = Callable[[int], Prompt]


def check_rows(
    rows: int,
    read: ReadRow,
    row_id: Callable[[int], str],
    gauge: Gauge,
    report: Report = lambda *_: None,
    threads: int | None = None,
) -> RowCheck:
    """Look at rows 0 to ``rows`` - 1 as ``read`` gives them. Changes nothing; twice gives the same.

    Args:
        row_id: the name of a row that cannot be read.
        threads: at work together; images are decoded without the interpreter's lock. Default: the cores of this
            process, at most 8.
    """
    lock = threading.Lock()  # tokenizers are not made for several threads
    tracker = _Reporter(rows, report)
    stopped = threading.Event()

    def chunk(first: int) -> list[Measured | Refusal]:
        numbers = range(first, min(first + ROWS_AT_ONCE, rows))
        found = [_looked_at(read, row_id, i, gauge, lock) for i in numbers if not stopped.is_set()]
        tracker.done(len(found))
        return found

    pool = ThreadPoolExecutor(threads or min(8, len(os.sched_getaffinity(0))), thread_name_prefix="rows")
    try:
        found = [row for part in pool.map(chunk, range(0, rows, ROWS_AT_ONCE)) for row in part]
    finally:  # Ctrl-C, or a file that has changed: nobody waits for the rest
        stopped.set()
        pool.shutdown(cancel_futures=True)
    good = [(i, row) for i, row in enumerate(found) if isinstance(row, Measured)]
    return RowCheck(
        rows=rows,
        usable=tuple(i for i, _ in good),
        refused=tuple(row for row in found if isinstance(row, Refusal)),
        files=tuple(sorted({file for _, row in good for file in row.files})),
        tokens=max((row.tokens for _, row in good), default=0),
        patches=max((row.patches for _, row in good), default=0),
        answer=max((row.answer for _, row in good), default=0),
        long_answers=sum(gauge.max_answer is not None and row.answer > gauge.max_answer.most for _, row in good),
    )


def _looked_at(
    read: ReadRow, row_id: Callable[[int], str], index: int, gauge: Gauge, lock: threading.Lock
) -> Measured | Refusal:
    name = ""
    try:
        prompt = read(index)
        name = prompt.row_id
        files = tuple(file_states(prompt.images)) if isinstance(prompt.images, Images) else ()
        sized = replace(prompt, images=[_shape_of(image) for image in prompt.images])
        patches = gauge.patches(sized)
        with lock:
            tokens, answer = gauge.tokens(sized), gauge.answer(sized)
    except (Changed, MemoryError):  # these say nothing of the row
        raise
    except StrettoError as error:
        name = name or getattr(error, "row_id", "") or row_id(index)
        return Refusal(row_id=name, kind="bad", reason=_without_name(str(error), name))
    except Exception as error:  # whatever a library raises, it says that this row cannot be used
        return Refusal(row_id=name or row_id(index), kind="bad", reason=f"{type(error).__name__}: {error}")
    with_images = ", image tokens included" if len(prompt.images) else ""
    exceeded = [
        (f"{count} {unit}; the limit is {limit.most} ({limit.set_by})", limit, count)
        for count, limits, unit in (
            (tokens, gauge.max_tokens, f"tokens{with_images}"),
            (patches, gauge.max_patches, "image patches"),
        )
        for limit in sorted(limits, key=lambda limit: limit.most)
        if count > limit.most
    ]
    if exceeded:
        wants = {limit.option: count + limit.beyond for _, limit, count in exceeded}
        return Refusal(row_id=name, kind="overlong", reason=exceeded[0][0], wants=wants)
    return Measured(tokens=tokens, patches=patches, answer=answer, files=files)


def _shape_of(image: np.ndarray) -> np.ndarray:
    """The same shape without the memory."""
    return np.broadcast_to(np.uint8(0), image.shape)


def _without_name(message: str, row_id: str) -> str:
    return message.removeprefix(f"row {row_id}").removeprefix(",").removeprefix(":").strip()


def file_states(images: Images) -> Iterator[FileState]:
    """Of the files that images of a row are read from. Raises StrettoError where one is not there."""
    for path in images.files():
        yield file_state(path)


def file_state(path: Path) -> FileState:
    try:
        status = path.stat()
    except OSError as error:
        raise BadRow(f"{path}: {error.strerror}") from error
    return str(path), status.st_size, status.st_mtime_ns


class _Reporter:
    def __init__(self, rows: int, report: Report):
        self._rows, self._report = rows, report
        self._done, self._due = 0, time.monotonic() + REPORT_S
        self._lock = threading.Lock()

    def done(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + REPORT_S
                self._report(self._done, self._rows)


def problems(split: str, found: RowCheck, policies: Mapping[str, str], limit: Limit | None = None) -> list[str]:
    """Why no run may start with what was found, under the policy ("fail" or "skip") of each kind of refusal, and under
    the ``limit`` of answers.
    """
    told = []
    for kind, option in (("bad", "data.bad_rows"), ("overlong", "data.overlong_prompts")):
        rows = [r for r in found.refused if r.kind == kind]
        if rows and policies[kind] == "fail":
            what = "cannot be used; mend them" if kind == "bad" else f"have a prompt that is too long; {keeping(rows)}"
            told.append(
                f'{option} = "fail": {len(rows):,} of {found.rows:,} {split} rows {what}, or leave them out '
                f'with {option} = "skip"{few(rows)}'
            )
    if not told and not found.usable:
        remedy = keeping(found.refused)
        told.append(
            f"none of {found.rows:,} {split} rows can be used; a run needs at least one"
            f"{'; ' + remedy if remedy else ''}{few(found.refused)}"
        )
    if found.usable and found.long_answers == len(found.usable):
        told.append(_long_answers(split, found, limit))
    return told


def cautions(split: str, found: RowCheck, limit: Limit | None) -> list[str]:
    """What stops no run, and its user may not want."""
    told = [*_left_out(split, found)]
    if 0 < found.long_answers < len(found.usable):
        told.append(_long_answers(split, found, limit))
    return told


def _left_out(split: str, found: RowCheck) -> Iterator[str]:
    bad, overlong = ([r for r in found.refused if r.kind == kind] for kind in ("bad", "overlong"))
    if bad:
        yield f"{len(bad):,} of {found.rows:,} {split} rows can not be used and are left out (data.bad_rows){few(bad)}"
    if overlong:
        yield (
            f"{len(overlong):,} of {found.rows:,} {split} rows are too long and are left out (data.overlong_prompts); "
            f"to keep all, {keeping(overlong)}{few(overlong)}"
        )


def _long_answers(split: str, found: RowCheck, limit: Limit | None) -> str:
    """A response never equals an answer that is longer than it may be."""
    assert limit is not None  # else no answer is counted as long
    every = found.long_answers == len(found.usable)
    many = f"all {found.long_answers:,}" if every else f"{found.long_answers:,} of {len(found.usable):,}"
    what = "nothing can be learned" if every else "they are never scored as right"
    return (
        f"{limit.set_by} = {limit.most}: {many} {split} rows have a longer answer, the longest {found.answer:,} tokens "
        f"with its end, and exact match needs all of it: {what}; raise {limit.set_by} to at least {found.answer}"
    )


def keeping(rows: Iterable[Refusal]) -> str:
    """``raise A to 700 and B to 64``: what keeps all that are too long; empty where none is."""
    most: dict[str, int] = {}
    for option, value in (want for row in rows for want in row.wants.items()):
        most[option] = max(value, most.get(option, 0))
    return "raise " + " and ".join(f"{option} to {value}" for option, value in most.items()) if most else ""


def few(rows: Sequence[Refusal]) -> str:
    """The first of them, a line each; of those with the same reason but for numbers and names, fewer."""
    alike: dict[str, list[Refusal]] = {}
    for row in rows:
        alike.setdefault(re.sub(r"\S*[\d/]\S*", "", row.reason), []).append(row)
    lines: list[str] = []
    left = len(rows)
    for same in alike.values():
        told = same[: min(SHOWN_ALIKE, SHOWN - len(lines))]
        lines += [f"row {row.row_id}: {row.reason}" for row in told]
        left -= len(told)
    if left:
        lines.append(f"and {left:,} more")
    return "".join(f"\n    {line}" for line in lines)
