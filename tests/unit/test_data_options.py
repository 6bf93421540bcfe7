"""Options of data files against one another; the recipe for files; a run goes on only with the data that it had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from data_case import Notes, config, jsonl

from stretto.actor.checkpoint import config_hash
from stretto.config import DataConfig
from stretto.data.digits import Digits
from stretto.machine_checks import data_files
from stretto.problems import Reader
from stretto.run_data import open_data, same_as_before
from stretto.settings import load
from stretto.types import ConfigError, StrettoError

ROOT = Path(__file__).parents[2]
FILES = ("data.source=files", 'data.train_files=["a.jsonl"]', 'data.validation_files=["b.parquet"]')


def problems(*sets: str, **options: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, ["model.path=org/model", *sets], {}, **options)
    return caught.value.problems


def test_the_options_of_files_fit_together():
    config, _ = load(None, ["model.path=org/model", *FILES], {})
    assert config.data.train_files == ("a.jsonl",)
    load(None, ["model.path=org/model", *FILES[:2], "eval.every=0"], {})
    load(None, ["model.path=org/model", *FILES[:2]], {}, training=False)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("data.source=files",), "data.train_files = [] (default): name at least one .jsonl or .parquet file"),
        (FILES[:2], "eval.every = 25 (default), data.validation_files = [] (default): there is nothing to evaluate on"),
        ((*FILES, "data.digits=3"), 'data.digits = 3 (--set), data.source = "files" (--set): that source does not'),
        ((*FILES, "data.worked=true"), "data.worked = true"),
        (FILES[1:2], 'data.train_files = ["a.jsonl"] (--set), data.source = "digits" (default)'),
        (("data.bad_rows=skip",), "that source does not read it; set data.source to \"files\""),
        ((*FILES, 'data.train_files=["a.json"]'), '"a.json" is neither .jsonl (one JSON object a line) nor .parquet'),
        ((*FILES, 'data.test_files=["c.csv"]'), 'data.test_files = ["c.csv"] (--set): "c.csv" is neither'),
        ((*FILES, 'data.train_files=["a.jsonl", "a.jsonl"]'), '"a.jsonl" is named twice'),
        ((*FILES, "data.prompt_column="), "every row needs a prompt"),
        ((*FILES, "data.bad_rows=ignore"), 'expected "fail" or "skip"'),
        ((*FILES, "data.max_prompt_tokens=-1"), "expected an integer of at least 0"),
        ((*FILES, "data.train_files=a.jsonl"), "expected a list of strings"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_with_the_remedy(sets, words):
    assert any(words in problem for problem in problems(*sets)), problems(*sets)


def test_files_and_folders_that_are_not_there_are_told_with_what_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "train.JSONL", [])
    sets = ("data.source=files", 'data.train_files=["trian.jsonl", "train.JSONL"]', "data.image_folder=pictures")
    config, _ = load(None, ["model.path=org/model", *sets, "eval.every=0"], {})
    found = [problem.text for problem in data_files(config, Reader(config, {}))]
    assert len(found) == 2
    assert 'there is no file "trian.jsonl"' in found[0] and "train.JSONL" in found[0].split("holds")[1]
    assert "data.image_folder" in found[1] and "there is no such folder" in found[1]


def test_the_digits_as_files_are_the_digits(tmp_path):
    """The recipe for files, on what its script writes, asks exactly what the built-in data set asks."""
    script = [sys.executable, str(ROOT / "recipes/make_digit_files.py"), str(tmp_path / "runs/digit-files")]
    counts = ["--train", "20", "--validation", "5", "--test", "1"]
    subprocess.run([*script, *counts], check=True, timeout=60, capture_output=True)
    recipe, _ = load(ROOT / "recipes/files.toml", [], {})
    names = ("train_files", "validation_files", "test_files")
    here = {name: tuple(str(tmp_path / path) for path in getattr(recipe.data, name)) for name in names}
    changed = config(tmp_path).model_copy(update={"data": recipe.data.model_copy(update=here)})
    source, facts = open_data(changed, Progress(), resumed=False)
    assert len(source) == facts["rows"] == 20
    family = tiny.family()
    for row, expected in enumerate(Digits(DataConfig(), "train")[i] for i in range(20)):
        found = source[row]
        assert (found.row_id, found.answer) == (f"train-{row:05}", expected.answer)
        one, other = family.process(found), family.process(expected)
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.pixel_values, other.pixel_values)


class Progress(Notes):
    def note(self, message: str, *, stays: bool = False) -> None:
        self(message, stays=stays)


def test_problems_of_both_splits_are_told_at_once_and_counts_stay_on_the_screen(tmp_path):
    good, bad = {"prompt": "?", "answer": 1}, {"prompt": "?"}
    train = jsonl(tmp_path / "train.jsonl", [good, bad, good])
    other = jsonl(tmp_path / "other.jsonl", [bad, good])
    options = {"validation_files": (str(other),), "eval": {"every": 5}}
    with pytest.raises(ConfigError) as caught:
        open_data(config(tmp_path, train, **options), Progress(), resumed=False)
    assert [p.split(" rows")[0] for p in caught.value.problems] == [
        'data.bad_rows = "fail": 1 of 3 train', 'data.bad_rows = "fail": 1 of 2 validation'
    ]  # fmt: skip
    progress = Progress()
    _, facts = open_data(config(tmp_path, train, bad_rows="skip", **options), progress, resumed=False)
    assert progress[::2] == [
        "data        2 of 3 train rows can be used; 1 bad",
        "data        1 of 2 validation rows can be used; 1 bad",
    ]
    assert [line.split(" can not be used")[0] for line in progress[1::2]] == [
        "warning     1 of 3 train rows", "warning     1 of 2 validation rows"
    ]  # fmt: skip
    assert (facts["rows"], facts["bad"], facts["validation"]["rows"], facts["validation"]["bad"]) == (2, 1, 1, 1)


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    same_as_before(tmp_path, {"rows": 3, "fingerprint": "a"})  # nothing is known of before
    sessions = [{"data": {"rows": 9, "fingerprint": "x"}}, {"data": {"rows": 3, "fingerprint": "a"}}]
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "sessions": sessions}))
    same_as_before(tmp_path, {"rows": 3, "fingerprint": "a"})
    with pytest.raises(StrettoError, match=r"3 usable rows then, 5 now; put the files back .* another run.dir"):
        same_as_before(tmp_path, {"rows": 5, "fingerprint": "b"})
    with pytest.raises(StrettoError, match="3 usable rows then, 3 now, with other content, columns or image files"):
        same_as_before(tmp_path, {"rows": 3, "fingerprint": "b"})


def test_a_checkpoint_binds_how_data_is_read_and_not_where_it_lies(tmp_path):
    base = config(tmp_path, tmp_path / "a.jsonl")
    assert config_hash(config(tmp_path, tmp_path / "moved/a.jsonl", image_folder="x")) == config_hash(base)
    for changed in ({"answer_column": "a"}, {"bad_rows": "skip"}, {"max_prompt_tokens": 9}, {"shuffle": False}):
        assert config_hash(config(tmp_path, tmp_path / "a.jsonl", **changed)) != config_hash(base)
