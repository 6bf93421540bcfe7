"""Whatever was begun in a campaign shows, taken away or changed."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from bench_stand import FIRST, SECOND, make_stand

from stretto.bench.attempt import recorded
from stretto.bench.campaign import attempts, file_hash, read_note, removed
from stretto.bench.cli import files_told
from stretto.bench.journal import note_begun, note_closed, read_journal
from stretto.types import StrettoError


@pytest.fixture
def stand(tmp_path, monkeypatch):
    return make_stand(tmp_path, monkeypatch)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_every_attempt_is_journalled_as_it_begins_and_as_it_is_closed(stand):
    stand.fail("00-1-P")
    stand.run()
    found = lines(stand.folder)
    assert [line["name"] for line in found[::2]] == [line["name"] for line in found[1::2]] == [*FIRST, *SECOND]
    begun, closed = found[2:4]
    path = stand.folder / "cells" / "00-1-P" / "attempt-1"
    note = read_note(path)
    assert note is not None
    assert begun == {"kind": "cells", "name": "00-1-P", "attempt": 1, "started": note.started}
    assert closed == {"kind": "cells", "name": "00-1-P", "attempt": 1, "sha256": file_hash(path / "cell.json")}
    assert removed(stand.folder, attempts(stand.folder)) == ()


def test_an_attempt_that_was_taken_away_shows_and_its_number_is_not_given_out_again(stand):
    stand.fail("01-2-P")
    stand.run()
    shutil.rmtree(stand.folder / "cells" / "01-2-P")
    gone = ("cells/01-2-P, attempt 1: its folder is gone",)
    assert removed(stand.folder, attempts(stand.folder)) == gone
    stand.behave()
    stand.run()
    assert [a.number for a in attempts(stand.folder) if a.name == "01-2-P"] == [2]
    assert removed(stand.folder, attempts(stand.folder)) == gone
    kept = (stand.folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (stand.folder / "journal.jsonl").write_text("".join(line for line in kept if '"attempt": 1' not in line))
    told = removed(stand.folder, [a for a in attempts(stand.folder) if a.name == "01-2-P"])
    assert told == gone  # by the number that is missing


def test_a_note_that_was_changed_or_taken_away_or_put_there_shows(stand):
    stand.run()
    cells = stand.folder / "cells"
    note = cells / "00-2-P+S" / "attempt-1" / "cell.json"
    before = file_hash(note)
    note.chmod(0o644)
    note.write_text(note.read_text().replace('"exit_code": 0', '"exit_code": 1'))
    (cells / "01-0-B" / "attempt-1" / "cell.json").unlink()
    shutil.copytree(cells / "01-3-B" / "attempt-1", cells / "01-3-B" / "attempt-2")
    assert removed(stand.folder, attempts(stand.folder)) == (
        f"cells/00-2-P+S, attempt 1: its cell.json has SHA-256 {file_hash(note)}, and had {before} when it was closed",
        "cells/01-0-B, attempt 1: its cell.json is gone",
        "cells/01-3-B, attempt 2: the journal does not know it",
    )


def test_an_attempt_whose_runner_was_killed_is_there(tmp_path):
    for number in (1, 2):
        (tmp_path / "cells" / "00-0-B" / f"attempt-{number}").mkdir(parents=True)
    note_begun(tmp_path, ("cells", "00-0-B", 1), "2026")
    assert removed(tmp_path, attempts(tmp_path)) == ()


def test_a_campaign_of_an_earlier_version_has_no_journal(tmp_path):
    assert removed(tmp_path, ()) is None and read_journal(tmp_path) is None


def test_a_line_that_was_cut_short_costs_no_other_and_is_told(tmp_path):
    key = ("alone", "rollout-B", 1)
    note_begun(tmp_path, key, "2026")
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"kind": "alone", "na')
    note_closed(tmp_path, key, "abc")
    note_closed(tmp_path, key, "def")  # what was noted first stands
    journal = read_journal(tmp_path)
    assert journal is not None
    assert journal.attempts == {key: "abc"} and journal.unreadable == (2,)
    assert journal.last("alone", "rollout-B") == 1 and journal.last("cells", "rollout-B") == 0
    assert removed(tmp_path, ()) == (
        "alone/rollout-B, attempt 1: its folder is gone",
        "line 2 of the journal is no entry",
    )


def test_a_folder_that_is_no_attempt_is_none(tmp_path):
    for name in ("attempt-1", "attempt-12", "attempt-02", "attempt-0", "attempt-1.bak", "attempt-x", "other"):
        (tmp_path / "cells" / "00-0-B" / name).mkdir(parents=True)
    (tmp_path / "cells" / "00-0-B" / "attempt-3").touch()
    assert [attempt.number for attempt in attempts(tmp_path)] == [1, 12]


def test_a_note_has_the_variables_that_change_how_libraries_compute(stand, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("EDITOR", "vi")
    stand.run()
    note = attempts(stand.folder)[0].note
    assert note is not None
    assert (note.environment["OMP_NUM_THREADS"], note.environment["HF_TOKEN"]) == ("3", "(set)")
    assert "EDITOR" not in note.environment and "PYTHONPATH" in note.environment
    assert note.niceness == os.nice(0)


def test_variables_are_kept_by_the_beginnings_of_their_names():
    kept = dict.fromkeys(
        ("MKL_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "TORCHDYNAMO_DISABLE", "NCCL_P2P_LEVEL"), "1"
    )
    assert recorded({**kept, "HOME": "/", "XOMP_NUM_THREADS": "1", "PATH": "/"}) == kept


def test_what_a_file_system_refuses_is_told_in_a_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StrettoError, match=r"file/report: Not a directory"), files_told():
        (tmp_path / "file" / "report").mkdir()
