"""Runs of the real command under combinations of the algorithm's options: all pairs of values that can be had."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import combinations
import pytest
import running
import tiny

from stretto.models.loading import save_model

ROWS = combinations.pairwise()
FEW = (5, 6, 14)
"""Rows that are always run: 30 of the 39 values stand in them. The long matrix has all others."""
pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders ``student`` and ``teacher`` of models of some 100,000 parameters."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        save_model(tiny.family(), tiny.model(seed), folder / name)
    return folder


def recipe(folder: Path, models: Path, settings: list[combinations.Settings]) -> Path:
    text = json.dumps(combinations.tables(settings)).replace(combinations.TEACHER, str(models / "teacher"))
    tables: dict[str, dict[str, Any]] = json.loads(text)
    tables["model"] = {"path": str(models / "student")}
    tables["run"]["dir"] = str(folder / "run")
    # A random model hardly ever ends a response: with these, some are cut by length and some are not.
    tables["rollout"]["stop"] = list("abcdefghijklmnopqrstuvwxyz")
    tables["eval"] = {"every": 4, "prompts": 4}
    made = running.recipe(folder, **tables)
    return Path(made)


def check(folder: Path, models: Path, settings: list[combinations.Settings]) -> None:
    made = recipe(folder, models, settings)
    running.train(made, limit_s=200)
    rows = running.jsonl(folder / "run", "metrics.jsonl")
    tables = combinations.tables(settings)
    per = tables["actor"].get("minis_per_partition", 1) * tables["actor"].get("epochs", 1)
    assert len(rows) == 4 // per
    assert rows[-1]["optimizer_step"] + rows[-1]["skipped_updates"] == 4
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
    if tables.get("rollout", {}).get("refill_rounds"):
        assert all(row["zero_signal_groups"] == 0 for row in rows)
    prints = [row["parameters"] for row in running.jsonl(folder / "run", "fingerprints.jsonl")]
    if not rows[-1]["skipped_updates"]:
        assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("row", FEW)
def test_a_combination_trains(row, models, tmp_path):
    check(tmp_path, models, ROWS[row])


@pytest.mark.long
@pytest.mark.parametrize("row", sorted(set(range(len(ROWS))) - set(FEW)))
def test_every_pair_of_options_trains(row, models, tmp_path):
    check(tmp_path, models, ROWS[row])


def test_doctor_and_train_refuse_the_same_combination_in_the_same_words(models, tmp_path):
    """Three refusals at once; both name all of them."""
    made = recipe(
        tmp_path,
        models,
        [
            {"algorithm.old_policy": "rollout", "algorithm.importance_correction": "tis"},
            {"algorithm.kl_reward_coef": 0.1},
            {"actor.minis_per_partition": 3},
        ],
    )
    told = []
    for command in ("train", "doctor"):
        process = running.start(made, command=command)
        output = running.finish(process)
        assert process.returncode == 2, output
        told.append({line.split(": ", 1)[1] for line in output.splitlines() if "algorithm." in line and ": " in line})
    words = (
        "the ratio starts from the rollout's log-probs, so that every importance weight would be 1",
        "the KL of a reward needs the actor's own log-probs before the update",
    )
    for word in words:
        assert all(any(word in text for text in texts) for texts in told), told
