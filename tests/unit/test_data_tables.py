"""JSONL and Parquet as they come: read on demand, in every dress that writers give them."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_case import PICTURE, encoded, jsonl, parquet
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import tables
from stretto.data.tables import BadRow, Changed, open_table
from stretto.types import StrettoError

COLUMNS = frozenset({"prompt", "images", "answer"})
PNG = encoded(PICTURE)


def open_(path):
    return open_table(path, COLUMNS, "images")


def read(table):
    return [table.row(i) for i in range(len(table))]


# JSONL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b'{"a": 1}\n{"a": 2}\n', [1, 2]),
        (b'{"a": 1}\n{"a": 2}', [1, 2]),
        (b'{"a": 1}\r\n{"a": 2}\r\n', [1, 2]),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', [1, 2]),
        (b'\n\n{"a": 1}\n   \n\t\r\n{"a": 2}\n\n', [3, 6]),
        (b'\xef\xbb\xbf\n{"a": 1}\n{"a": 2}', [2, 3]),
    ],
)
def test_lines_are_rows_whatever_surrounds_them(tmp_path, data, lines):
    (tmp_path / "x.jsonl").write_bytes(data)
    table = open_(tmp_path / "x.jsonl")
    assert read(table) == [{"a": 1}, {"a": 2}]
    assert [table.number(i) for i in range(2)] == lines


@given(st.lists(st.dictionaries(st.text(), st.none() | st.integers() | st.text(), max_size=3), max_size=8))
def test_what_json_writes_is_what_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("j") / "x.jsonl"
    for ascii_ in (True, False):
        lines = [json.dumps(row, ensure_ascii=ascii_) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass", newline="")
        assert read(open_(path)) == rows


def test_unicode_line_separators_inside_a_row_do_not_end_it(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"a": "x\u2028y\u0085z\x0c"}, ensure_ascii=False), encoding="utf-8")
    assert read(open_(path)) == [{"a": "x\u2028y\u0085z\x0c"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": 1', "not a line of JSON"),
        (b"{'a': 1}", "not a line of JSON"),
        (b'{"a": NaN}', "NaN is no JSON value"),
        (b'{"a": "\xff"}', "not a line of JSON"),
        (b'{"a": ' + b"[" * 100000 + b"]" * 100000 + b"}", "not a line of JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a line of JSON"),
        (b"[1]", "a JSON list where an object is due"),
        (b"null", "a JSON NoneType where an object is due"),
        (b'{"a": 1} {"a": 2}', "not a line of JSON"),
    ],
)
def test_a_broken_line_is_a_bad_row_and_the_others_are_not(tmp_path, line, words):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    table = open_(tmp_path / "x.jsonl")
    assert table.row(0) == {"a": 1} and table.row(2) == {"a": 3}
    with pytest.raises(BadRow, match=words):
        table.row(1)


def test_an_empty_file_has_no_rows_and_a_big_number_stays_whole(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    assert len(open_(tmp_path / "x.jsonl")) == 0
    (tmp_path / "X.JSONL").write_bytes(b'{"a": 123456789012345678901234567890}')
    assert read(open_(tmp_path / "X.JSONL")) == [{"a": 123456789012345678901234567890}]


def test_utf_16_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n', encoding="utf-16")
    with pytest.raises(StrettoError, match="UTF-16; save it as UTF-8"):
        open_(tmp_path / "x.jsonl")


def test_a_json_list_over_many_lines_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps([{"a": 1}], indent=1))
    with pytest.raises(StrettoError, match="it is one JSON list; write one object a line"):
        open_(tmp_path / "x.jsonl")


# Parquet ---------------------------------------------------------------------------------------------------------


def test_row_groups_are_read_when_asked_for_and_only_the_newest_are_kept(tmp_path, monkeypatch):
    path = parquet(tmp_path / "x.parquet", [{"prompt": str(i), "other": i} for i in range(10)], group=3)
    table = open_(path)
    groups = []
    real = table._file.read_row_group
    monkeypatch.setattr(
        table, "_file", type("F", (), {"read_row_group": lambda _, g, **k: (groups.append(g), real(g, **k))[1]})()
    )
    assert [table.row(i)["prompt"] for i in (4, 3, 5, 9, 4)] == ["4", "3", "5", "9", "4"]
    assert groups == [1, 3]
    assert list(table.row(0)) == ["prompt"] and set(table.names({})) == {"prompt", "other"}
    monkeypatch.setattr(tables, "CACHED_BYTES", 0)
    assert [table.row(i)["prompt"] for i in range(10)] == [str(i) for i in range(10)]
    assert len(table._groups) == 1


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_columns_as_datasets_writes_them(tmp_path):
    """`datasets` stores its Image feature as struct<bytes, path>, lists of them, and messages as list<struct>."""
    message = pa.struct(
        [("role", pa.string()), ("content", pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())])))]
    )
    schema = pa.schema(
        [
            ("images", pa.list_(IMAGE)),
            ("prompt", pa.list_(message)),
            ("answer", pa.dictionary(pa.int32(), pa.string())),
        ]
    )
    content = [{"type": "image", "text": None}, {"type": "text", "text": "Sum?"}]
    rows = [
        {"images": [{"bytes": PNG, "path": None}], "prompt": [{"role": "user", "content": content}], "answer": "8"},
        {"images": None, "prompt": [{"role": "user", "content": content[1:]}], "answer": None},
        {"images": [], "prompt": None, "answer": "8"},
    ]
    assert read(open_(parquet(tmp_path / "x.parquet", rows, schema))) == rows


def test_a_struct_column_of_one_image_is_a_list_of_one(tmp_path):
    rows = [{"images": {"bytes": PNG, "path": None}}, {"images": None}]
    found = read(open_(parquet(tmp_path / "x.parquet", rows, pa.schema([("images", IMAGE)]))))
    assert found == [{"images": [rows[0]["images"]]}, {"images": None}]
    other = pa.schema([("images", pa.struct([("url", pa.string())]))])
    assert read(open_(parquet(tmp_path / "y.parquet", [{"images": {"url": "a"}}], other))) == [{"images": {"url": "a"}}]


def test_names_with_dots_large_types_and_an_empty_file(tmp_path):
    schema = pa.schema([("prompt", pa.large_string()), ("prompt.x", pa.int64()), ("answer", pa.decimal128(5, 2))])
    pq.write_table(pa.Table.from_pylist([{"prompt": "ü", "prompt.x": 1, "answer": 2}], schema), tmp_path / "x.PARQUET")
    (row,) = read(open_(tmp_path / "x.PARQUET"))
    assert row["prompt"] == "ü" and str(row["answer"]) == "2.00"
    pq.write_table(schema.empty_table(), tmp_path / "e.parquet")
    assert len(open_(tmp_path / "e.parquet")) == 0


def test_a_damaged_page_makes_bad_rows_of_its_group_only(tmp_path):
    path = parquet(tmp_path / "x.parquet", [{"prompt": f"{i}" * 50} for i in range(6)], group=3)
    meta = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = meta.dictionary_page_offset or meta.data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    table = open_(path)
    assert table.row(2)["prompt"] == "2" * 50
    for row in (3, 4, 5):
        with pytest.raises(BadRow, match="row group 1 of the file cannot be read"):
            table.row(row)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + b"x" * 100 + b"PAR1", b"<html>"])
def test_what_is_no_parquet_file_is_refused_by_name(tmp_path, data):
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(StrettoError, match=r"x\.parquet: cannot be read"):
        open_(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_file_that_changes_under_a_run_is_an_error_of_its_own(tmp_path, name):
    write = jsonl if name.endswith("l") else parquet
    path = write(tmp_path / name, [{"prompt": "a"}, {"prompt": "b"}])
    table = open_(path)
    write(path, [{"prompt": "a"}, {"prompt": "changed"}])
    with pytest.raises(Changed, match=f"{name} has changed since the run began"):
        table.row(1)
    path.unlink()
    with pytest.raises(Changed, match="is not any more"):
        table.row(1)
