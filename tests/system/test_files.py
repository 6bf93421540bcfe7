"""Training on files: a real run on JSONL rows and a folder of images, bad rows among them (cases A4, D3)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import running
from data_case import encoded, jsonl, parquet, picture

from stretto.data.cursor import rows_of_partition
from stretto.observe.raw import read_raw
from stretto.observe.trace import read_events

pytestmark = pytest.mark.timeout(480)

PARTITION = 8
EPOCH = 16
"""Usable rows: two partitions."""


def rows(folder: Path) -> list[dict]:
    """18 rows: the third has half a JPEG and the tenth a path that is not there; every fifth is text alone."""
    (folder / "images").mkdir(parents=True)
    made = []
    for i in range(18):
        picture(folder / f"images/{i}.png", seed=i)
        row: dict = {"id": f"row-{i}", "prompt": "<image>Sum?", "images": [f"{i}.png"], "answer": i}
        if i % 5 == 4:
            row |= {"prompt": "3,5 Sum?", "images": [[], None][i % 2]}
        made.append(row)
    jpeg = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG")
    (folder / "images/2.png").write_bytes(jpeg[: len(jpeg) // 2])
    (folder / "images/11.png").unlink()
    return made


def recipe(folder: Path, **data: object) -> Path:
    return running.recipe(
        folder,
        run={"updates": 4},
        data={
            "source": "files",
            "train_files": [str(folder / "data/train.jsonl"), str(folder / "data/more.parquet")],
            "validation_files": [str(folder / "data/validation.jsonl")],
            "image_folder": str(folder / "data/images"),
            "id_column": "id",
            **data,
        },
        eval={"every": 4, "prompts": 3},
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = rows(tmp_path / "data")
    jsonl(tmp_path / "data/train.jsonl", made[:12])
    parquet(tmp_path / "data/more.parquet", made[12:])
    jsonl(tmp_path / "data/validation.jsonl", [row | {"id": f"v-{row['id']}"} for row in made[:2]])
    return tmp_path / "data"


@pytest.mark.case("A4")
def test_a_run_on_files_trains_every_usable_row_once_an_epoch_and_goes_on_only_with_the_same_data(tmp_path, data):
    output = running.train(recipe(tmp_path, bad_rows="skip"))
    assert "16 of 18 train rows can be used; 2 bad" in output
    run = tmp_path / "run"
    skipped = running.jsonl(run, "data/skipped.jsonl")
    assert [(s["row_id"], s["kind"]) for s in skipped] == [("row-2", "bad"), ("row-11", "bad")]
    good = [i for i in range(18) if i not in (2, 11)]

    # What was generated: per partition the rows that the cursor names, and per epoch every usable row once.
    events = [e for e in read_events(run / "events.jsonl") if e["name"] == "processor.process"]
    processed = [e["row_id"] for e in events if not e["row_id"].startswith("v-")]
    expected = [f"row-{good[r]}" for k in range(4) for r in rows_of_partition(k, PARTITION, EPOCH, 0, True)[1]]
    assert processed == expected
    for epoch in (processed[:EPOCH], processed[EPOCH:]):
        assert sorted(epoch) == sorted(f"row-{i}" for i in good)
    assert {e["row_id"]: e["images"] for e in events if e["row_id"] == "row-9"} == {"row-9": 0}

    # What was trained: whole groups of 4 samples, each sample once.
    for k in range(4):
        raw = read_raw(run, k)
        assert sorted(raw["global_index"].tolist()) == list(range(PARTITION * 4))
    for metrics in running.jsonl(run, "metrics.jsonl"):
        assert metrics["samples"] == 32 and metrics["failed_samples"] == 0 and metrics["ratio_deviation_max"] == 0
    (session,) = json.loads((run / "manifest.json").read_text())["sessions"]
    assert {k: session["data"][k] for k in ("rows", "rows_in_files", "bad", "overlong")} == {
        "rows": 16, "rows_in_files": 18, "bad": 2, "overlong": 0
    }  # fmt: skip
    assert session["data"]["validation"]["rows"] == 2
    (evaluated, _) = running.jsonl(run, "evaluations.jsonl")
    assert evaluated["total"] == 2

    # Going on: not with other rows; with the same ones in another place.
    longer = recipe(tmp_path, bad_rows="skip")
    (run / "checkpoints/step_000004/state.json").unlink()  # so that there is something left to train
    kept = (data / "train.jsonl").read_bytes()
    jsonl(data / "train.jsonl", [json.loads(line) for line in kept.splitlines()[:-1]])
    refused = running.train(longer, "--resume", code=1)
    assert "the training data has changed since this run began: 16 usable rows then, 16 now" in refused
    (data / "train.jsonl").write_bytes(kept)
    moved = data.rename(tmp_path / "elsewhere")
    longer.write_text(longer.read_text().replace(str(data), str(moved)))
    assert "update 4/4" in running.train(longer, "--resume")


def test_rows_that_can_not_be_used_end_a_run_before_it_starts(tmp_path, data):
    output = running.train(recipe(tmp_path), code=1)
    assert 'data.bad_rows = "fail": 2 of 18 train rows cannot be used' in output
    assert "row row-2: image 0: " in output and "row row-11: image 0: " in output
    assert "Traceback" not in output and "Ray" not in output
    assert not (tmp_path / "run/manifest.json").exists()
