"""What a run writes down, and reads back when it goes on."""

from __future__ import annotations

import json
import math

from stretto.observe.progress import PlainProgress
from stretto.records import Records
from stretto.types import Evaluation


def test_evaluations_are_read_back_also_those_of_earlier_versions(tmp_path):
    old = {"split": "validation", "version": 0, "correct": 1, "total": 4, "exact_match": 0.25, "update": 0}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(old) + "\n")
    records = Records(tmp_path, 2, PlainProgress(5))
    records.evaluation(Evaluation(split="validation", version=1, correct=0, total=4, reward_mean=0.375))
    records.evaluation(Evaluation(split="validation", version=2, correct=0, total=4))
    records.close()
    found = records.evaluations()
    assert [(e.version, e.correct) for e in found] == [(0, 1), (1, 0), (2, 0)]
    assert math.isnan(found[0].reward_mean) and found[1].reward_mean == 0.375 and math.isnan(found[2].reward_mean)
    assert json.loads((tmp_path / "evaluations.jsonl").read_text().splitlines()[2])["reward_mean"] is None
