"""Rows of JSONL and Parquet files, read when asked for: a file of any size takes an index of its rows, no more."""

from __future__ import annotations

import array
import bisect
import itertools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from stretto.types import StrettoError

LARGE_GROUP_BYTES = 64 * 2**20
"""Parquet row groups above this make rows in random order slow to read: each costs its whole group."""
CACHED_BYTES = 256 * 2**20
"""Parquet row groups kept decoded: the newest ones, as long as they take no more than this together."""

Identity = tuple[int, int]
"""Size in bytes and time of the last change in ns: while neither differs, a file is taken to be the same."""


class BadRow(StrettoError):
    """A row that cannot be used, and why; ``row_id`` is its name where it is known by then."""

    def __init__(self, reason: str, row_id: str = ""):
        self.reason, self.row_id = reason, row_id
        super().__init__(f"row {row_id}: {reason}" if row_id else reason)


class Changed(StrettoError):
    """A file is not the one that was opened: no row of it can be told any more."""


class Table(Protocol):
    """The rows of one file. Reading is safe from several threads and changes nothing."""

    path: Path
    identity: Identity
    step_bytes: int
    """The most that is read for one row, where it is not the row alone; else 0."""

    def __len__(self) -> int: ...

    def number(self, index: int) -> int:
        """What a person calls row ``index``: its line in a JSONL file, its count from 1 in a Parquet file."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Column -> value, at least of the columns asked for. Raises BadRow where there is no such mapping,
        Changed where the file has changed.
        """
        ...

    def names(self, row: Mapping[str, Any]) -> Iterable[str]:
        """Every column that the file has as far as ``row`` shows, asked for or not."""
        ...


def open_table(path: Path, columns: frozenset[str], images_column: str) -> Table:
    """A table of the kind that the name says; ``columns`` are those that will be asked of it.

    Raises:
        StrettoError: not there, not readable, or not what its name says.
    """
    try:
        kind = JsonLines if path.suffix.lower() == ".jsonl" else Parquet
        return kind(path, columns, images_column)
    except (OSError, pa.ArrowException) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StrettoError(f"{path}: cannot be read ({why})") from error


def identity(path: Path) -> Identity:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _unchanged(path: Path, known: Identity) -> None:
    try:
        now = identity(path)
    except OSError as error:
        raise Changed(f"{path} was there when the run began, and is not any more ({error.strerror})") from error
    if now != known:
        raise Changed(f"{path} has changed since the run began; put it back, or start a new run")


class JsonLines:
    """One JSON object a line, UTF-8, with or without a byte order mark. Blank lines are no rows."""

    step_bytes = 0

    def __init__(self, path: Path, columns: frozenset[str], images_column: str):
        self.path, self.identity = path, identity(path)
        self._starts, self._lengths, self._lines = array.array("Q"), array.array("Q"), array.array("Q")
        at = 0
        with path.open("rb") as file:
            if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise StrettoError(f"{path}: cannot be read (it is UTF-16; save it as UTF-8)")
            file.seek(0)
            if file.readline().removeprefix(b"\xef\xbb\xbf").strip() == b"[":
                raise StrettoError(f"{path}: cannot be read (it is one JSON list; write one object a line)")
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip() and line.strip() != b"\xef\xbb\xbf":
                    self._starts.append(at)
                    self._lengths.append(len(line))
                    self._lines.append(number)
                at += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, index: int) -> int:
        return self._lines[index]

    def row(self, index: int) -> Mapping[str, Any]:
        _unchanged(self.path, self.identity)
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.read(self._lengths[index])
        try:
            value = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise BadRow(f"not a line of JSON ({error})") from error
        if not isinstance(value, dict):
            raise BadRow(f"a JSON {type(value).__name__} where an object is due: one {{...}} a line")
        return value

    def names(self, row: Mapping[str, Any]) -> Iterable[str]:
        return row


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


class Parquet:
    """Row groups are decoded on demand, the columns that are asked for only, and the newest ones kept.

    An images column of a struct type is one image a row, as ``datasets`` writes its ``Image`` feature: it comes as a
    list of one.
    """

    def __init__(self, path: Path, columns: frozenset[str], images_column: str):
        self.path, self.identity, self.images_column = path, identity(path), images_column
        self._file = pq.ParquetFile(path)
        schema = self._file.schema_arrow
        self._names = tuple(schema.names)
        self._columns = [name for name in self._names if name in columns]
        self._single = _is_image(schema, images_column)
        sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._ends = list(itertools.accumulate(sizes))
        self.step_bytes = max((self._group_bytes(group) for group in range(len(sizes))), default=0)
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def number(self, index: int) -> int:
        return index + 1

    def row(self, index: int) -> Mapping[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        first = self._ends[group - 1] if group else 0
        try:
            (value,) = self._group(group).slice(index - first, 1).to_pylist()
        except (ValueError, pa.ArrowException) as error:  # text that is not UTF-8, dates out of range
            raise BadRow(f"its values cannot be read ({error})") from error
        if self._single and value[self.images_column] is not None:
            value[self.images_column] = [value[self.images_column]]
        return value

    def names(self, row: Mapping[str, Any]) -> Iterable[str]:
        return self._names

    def _group_bytes(self, group: int) -> int:
        """Of the columns that are read, once decompressed."""
        meta = self._file.metadata.row_group(group)
        parts = [meta.column(i) for i in range(meta.num_columns)]
        return sum(p.total_uncompressed_size for p in parts if p.path_in_schema.split(".")[0] in self._columns)

    def _group(self, group: int) -> pa.Table:
        with self._lock:
            if group not in self._groups:
                _unchanged(self.path, self.identity)
                try:
                    self._groups[group] = self._file.read_row_group(group, columns=self._columns)
                except (OSError, pa.ArrowException) as error:
                    raise BadRow(f"row group {group} of the file cannot be read ({error})") from error
                while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > CACHED_BYTES:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            return self._groups[group]


def _is_image(schema: pa.Schema, column: str) -> bool:
    if column not in schema.names or not pa.types.is_struct(schema.field(column).type):
        return False
    kind = schema.field(column).type
    return {kind.field(i).name for i in range(kind.num_fields)} <= {"bytes", "path"}
