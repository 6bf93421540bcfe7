"""Your own data: JSONL and Parquet files as a source, every row of them checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Any

from stretto.config import DataConfig
from stretto.data import rowcache
from stretto.data.check import Gauge, Note, RowCheck, cautions, check_rows, problems, silent
from stretto.data.rows import columns, row_id, to_prompt
from stretto.data.tables import LARGE_GROUP_BYTES, BadRow, Table, open_table
from stretto.types import ConfigError, Prompt, Split, StrettoError
from stretto.wording import nearest, shown

VERSION = 1
"""Of how rows become prompts; part of the fingerprint."""
MAPPING = ("prompt_column", "images_column", "answer_column", "source_column", "id_column", "max_prompt_tokens")
"""Options that decide the content of rows, or which of them are used."""
ALIKE = 0.6
"""How much of two column names agrees where one is taken for a misspelling of the other."""


class Rows:
    """All rows of a split's files, one after the other, whether they can be used or not."""

    def __init__(self, cfg: DataConfig, tables: Sequence[Table]):
        self.cfg, self.tables = cfg, tables
        self._ends = list(accumulate(len(table) for table in tables))
        self._names = _names([table.path for table in tables])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """Which table, and which of its rows."""
        table = bisect_right(self._ends, index)
        return table, index - (self._ends[table - 1] if table else 0)

    def name(self, index: int) -> str:
        """``train.jsonl:17``: the file and the number of the row in it, from 1."""
        table, row = self.locate(index)
        return f"{self._names[table]}:{self.tables[table].number(row)}"

    def read(self, index: int, seen: _Seen | None = None) -> Prompt:
        """The prompt of row ``index``; its images are decoded when they are asked for.

        Raises:
            BadRow: it cannot be used; names it.
            Changed: the file is not the one that was opened.
        """
        table_index, inner = self.locate(index)
        table = self.tables[table_index]
        name = self.name(index)
        try:
            row = table.row(inner)
            own = row_id(row, self.cfg)
            if own is not None:
                name = own
                if seen is not None:
                    seen.add_id(own, index)
            folder = Path(self.cfg.image_folder or table.path.parent)
            return to_prompt(row, self.cfg, name, self._names[table_index], folder)
        except BadRow as error:
            raise BadRow(error.reason, name) from error


def _names(paths: Sequence[Path]) -> list[str]:
    """File names; whole paths for those that share a name."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


class _Seen:
    """What a check learns beside the rows: ids that are given twice."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add_id(self, own: str, index: int) -> None:
        with self._lock:
            self.ids.setdefault(own, []).append(index)


class Files:
    """One split: the usable rows of its files, in the order of files and rows. Made by ``open_files``."""

    def __init__(
        self, rows: Rows, split: Split, found: RowCheck, contents: Sequence[str], cautions: Sequence[str] = ()
    ):
        self.rows, self.split, self.found = rows, split, found
        self.cautions = tuple(cautions)
        self._contents = contents

    def __len__(self) -> int:
        return len(self.found.usable)

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self.split}, which has rows 0 to {len(self) - 1}")
        try:
            return self.rows.read(self.found.usable[row])
        except BadRow as error:
            raise StrettoError(f"{error}; it could be used when the run began: put it back as it was") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the rows: content of the data files; name, size and time of image files outside
        them; how columns are read; and which rows are used. Folders may move.
        """
        options = {name: getattr(self.rows.cfg, name) for name in MAPPING}
        files = sorted((os.path.basename(path), size, changed) for path, size, changed in self.found.files)
        parts = (VERSION, list(self._contents), options, files, self.found.usable)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """For the manifest: how many rows there are, and how many of them are left out and why."""
        return {
            "rows": len(self),
            "fingerprint": self.fingerprint(),
            "rows_in_files": self.found.rows,
            "bad": self.found.count("bad"),
            "overlong": self.found.count("overlong"),
            "longest_prompt_tokens": self.found.tokens,
            "most_patches": self.found.patches,
            "longest_answer_tokens": self.found.answer,
        }


def open_rows(cfg: DataConfig, split: Split) -> Rows:
    """The rows of a split's files, unchecked.

    Raises:
        ConfigError: the split has no files, or files that are not there or not what their names say; all at once.
    """
    option = "train" if split == "labelled" else split
    names = getattr(cfg, f"{option}_files")
    if not names:
        raise ConfigError([f"data.{option}_files = []: name the .jsonl or .parquet files of the {split} split"])
    tables, told = [], []
    for name in names:
        try:
            tables.append(open_table(Path(name), columns(cfg), cfg.images_column))
        except StrettoError as error:
            told.append(f"data.{option}_files: {error}")
    if told:
        raise ConfigError(told, exit_code=1)
    return Rows(cfg, tables)


def open_files(cfg: DataConfig, split: Split, gauge: Gauge, folder: Path | None = None, note: Note = silent) -> Files:
    """The usable rows of a split: checked one by one, or as a check of the same files left it in ``folder``.

    ``folder`` (``<run.dir>/data``) gets ``<split>-<hash>.json`` and, where rows are left out, ``skipped.jsonl``; with
    None nothing is written. ``note`` is told what is done and found.

    Raises:
        ConfigError: files or columns that are not there, an id given twice, rows that are refused under
            ``data.bad_rows`` or ``data.overlong_prompts``, or no usable row; all of a kind at once.
    """
    rows = open_rows(cfg, split)
    key = _key(cfg, rows.tables, gauge)
    kept = rowcache.load(folder, split, key) if folder else None
    if kept is None:
        found = _checked(rows, split, gauge, note)
        kept = rowcache.Kept(found, tuple(_content(table.path) for table in rows.tables))
        if folder:
            rowcache.store(folder, split, key, kept)
    note(_counts(split, kept.found), stays=True)
    for table in rows.tables if cfg.shuffle and split in ("train", "labelled") else ():
        if table.step_bytes > LARGE_GROUP_BYTES:
            note(
                f"data        {table.path} has row groups of {table.step_bytes >> 20} MiB, and one of them is read for "
                "each shuffled row; training is faster where it is written with about 100 rows a group",
                stays=True,
            )
    policies = {"bad": cfg.bad_rows, "overlong": cfg.overlong_prompts}
    told = problems(split, kept.found, policies, gauge.max_answer)
    if told:
        raise ConfigError(told, exit_code=1)
    warned = cautions(split, kept.found, gauge.max_answer)
    for text in warned:
        note(f"warning     {text}", stays=True)
    return Files(rows, split, kept.found, kept.contents, warned)


def _checked(rows: Rows, split: Split, gauge: Gauge, note: Note) -> RowCheck:
    missing = [f"data.{n} = {shown(getattr(rows.cfg, n))}: {why}" for n, why in missing_columns(rows, split)]
    if missing:
        raise ConfigError(missing, exit_code=1)
    seen = _Seen()

    def report(done: int, total: int) -> None:
        note(f"checked {done:,} of {total:,} {split} rows")

    found = check_rows(len(rows), lambda i: rows.read(i, seen), rows.name, gauge, report)
    if told := _double_ids(rows, seen):
        raise ConfigError(told, exit_code=1)
    return found


def _counts(split: Split, found: RowCheck) -> str:
    bad, overlong = found.count("bad"), found.count("overlong")
    counts = ((bad, "bad"), (overlong, "too long"))
    left_out = "; " + ", ".join(f"{n:,} {what}" for n, what in counts if n) if found.refused else ""
    return f"data        {len(found.usable):,} of {found.rows:,} {split} rows can be used{left_out}"


def missing_columns(rows: Rows, split: Split) -> list[tuple[str, str]]:
    """Options that ask for a column that no row has, each with what is wrong; none where no row can be read at all.

    Rows are read only up to the one that has the last of the columns.
    """
    cfg = rows.cfg
    optional = {"images_column": type(cfg).model_fields["images_column"].default}
    wanted = {name: getattr(cfg, name) for name in MAPPING if name.endswith("_column")}
    wanted = {name: column for name, column in wanted.items() if column and optional.get(name) != column}
    there: set[str] = set()
    for names in _column_names(rows.tables):
        there.update(names)
        if there.issuperset(wanted.values()):
            return []
    gone = {name: column for name, column in wanted.items() if there and column not in there}
    return [(name, _no_column(column, there, split)) for name, column in gone.items()]


def _column_names(tables: Sequence[Table]) -> Iterator[Iterable[str]]:
    """Of whole files where these name their columns, else of one row after the other."""
    for table in tables:
        known = tuple(table.names({}))
        if known:
            yield known
            continue
        for row in range(len(table)):
            with suppress(BadRow):
                yield table.names(table.row(row))


def _no_column(column: str, there: Iterable[str], split: Split) -> str:
    near = nearest(column, there)
    alike = SequenceMatcher(None, column.lower(), near.lower()).ratio() >= ALIKE
    meant = f"; did you mean {near}?" if alike else ""
    return f"no {split} row has such a column; there are {', '.join(sorted(there))}{meant}"


def _double_ids(rows: Rows, seen: _Seen) -> list[str]:
    double = {own: sorted(places) for own, places in seen.ids.items() if len(places) > 1}
    if not double:
        return []
    own, places = min(double.items(), key=lambda item: item[1])
    where = ", ".join(rows.name(i) for i in places[:5])
    return [
        f'data.id_column = "{rows.cfg.id_column}": {len(double)} id(s) are given to more than one row, such as {own!r} '
        f'({where}); give each row its own, or set data.id_column to "" for file names and row numbers'
    ]


def _key(cfg: DataConfig, tables: Sequence[Table], gauge: Gauge) -> str:
    """Of everything that a check depends on, but for the image files outside the rows, which the check lists."""
    answer = gauge.max_answer
    limits = [asdict(limit) for limit in (*gauge.max_tokens, *gauge.max_patches, *([answer] if answer else []))]
    files = [(str(table.path), *table.identity) for table in tables]
    options = [getattr(cfg, name) for name in (*MAPPING, "image_folder")]
    return hashlib.sha256(json.dumps([VERSION, files, options, limits, gauge.key]).encode()).hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
