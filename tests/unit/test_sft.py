"""The supervised warm-start: what is left of it where its stop rule is not reached."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from data_case import config, jsonl

from stretto.config import Config
from stretto.models.loading import load_family, load_model
from stretto.sft import run_sft
from stretto.types import StrettoError

SFT = {"steps": 1, "batch": 2, "stop_exact_match": 0.9}


def of_files(folder: Path) -> Config:
    path = jsonl(folder / "rows.jsonl", [{"prompt": "?", "answer": "12"}] * 3)
    return config(folder, path, validation_files=(str(path),), sft=SFT)


def of_digits(folder: Path) -> Config:
    return Config.model_validate({"model": {"config": tiny.BLOCK}, "eval": {"prompts": 2}, "sft": SFT})


@pytest.mark.parametrize(("make", "named"), [(of_files, "add rows to data.train_files,"), (of_digits, "data.labelled")])
def test_a_model_that_did_not_reach_the_stop_rule_is_written_before_it_fails(tmp_path, make, named):
    made, output = make(tmp_path), tmp_path / "model"
    with pytest.raises(StrettoError) as caught:
        run_sft(made, output)
    said = str(caught.value)
    assert "did not reach sft.stop_exact_match = 0.9" in said and f"was written to {output}" in said
    assert f"raise sft.steps or {named}" in said
    assert ("labelled_images" in said) == (make is of_digits)
    of_folder = made.model.model_copy(update={"path": str(output), "config": None})
    load_family(of_folder)
    loaded, fresh = load_model(of_folder, 0), load_model(made.model, made.run.seed)
    moved = [not a.equal(b) for a, b in zip(loaded.parameters(), fresh.parameters(), strict=True)]
    assert any(moved)
