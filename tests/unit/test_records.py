"""What a run writes down, and reads back when it goes on."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

from stretto.observe.metrics import read_metrics
from stretto.observe.progress import PlainProgress
from stretto.records import Records, Step
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


def test_a_line_that_a_checkpoint_kept_is_written_where_it_is_missing_and_only_there(tmp_path):
    """Killed once update 1 was in a checkpoint, and before its line was written."""
    before = Records(tmp_path, 0, PlainProgress(5))
    before.begin()
    for k in range(2):
        step = Step(k)
        step.merge(
            {name: 1.0 for name in ("tokens", "response_tokens", "samples", "zero_signal_groups", "staleness_mean")}
            | {
                "groups": 2.0,
                "update_skipped": 0.0,
                "exposed_wait_s": 0.0,
                "rollout_waited_s": 0.0,
                "loss": math.nan if k else 0.5,
            }
        )
        line = before.line(step)
        if k == 0:
            before.step(step)
    before.close()
    json.dumps(line, allow_nan=False)
    assert [row["update"] for row in read_metrics(tmp_path)] == [0]
    for _ in range(2):
        resumed = Records(tmp_path, 2, PlainProgress(5))
        resumed.restore(1, line)
        resumed.close()
        rows = read_metrics(tmp_path)
        assert [row["update"] for row in rows] == [0, 1]
    assert rows[1] == line
    assert (rows[1]["loss"], rows[1]["nonfinite"], rows[1]["policy_version"]) == (None, 1, 2)


def skipped_step(k, **metrics):
    step = Step(k)
    step.merge(dict.fromkeys(("tokens", "response_tokens", "samples", "groups", "staleness_mean"), 1.0))
    step.merge({"exposed_wait_s": 0.0, "rollout_waited_s": 0.0, "zero_signal_groups": 0.0, "update_skipped": 0.0})
    step.merge({"loss_tokens": 5.0} | metrics)
    return step


def test_what_an_update_did_not_learn_from_is_said_once_and_at_every_tenth(tmp_path, capsys):
    records = Records(tmp_path, 0, PlainProgress(50))
    records.begin()
    for k in range(12):
        records.step(skipped_step(k, update_skipped=1.0, loss_tokens=0.0))
    records.step(skipped_step(12))
    records.step(skipped_step(13, update_skipped=1.0))
    records.step(skipped_step(14, zero_signal_groups=1.0, teacher_kl=0.5))  # it learnt from its teacher
    records.step(skipped_step(15, zero_signal_groups=1.0))
    records.step(skipped_step(16, processor_restarts=2))
    records.close()
    said = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("update ") or "/50" not in line
    ]
    assert [line.split(":")[0] for line in said] == [
        "update 1 was skipped",
        "update 10 was skipped",
        "update 14 was skipped",
        "update 16",
        "a processor worker ended and was replaced (2 so far), before update 17",
    ]
    assert "algorithm.truncated" in said[0] and "not finite" in said[2]


def test_what_the_rollout_side_counts_is_in_the_line_of_its_update():
    record = SimpleNamespace(
        partition=3,
        version_start=(2, 3),
        version_end=(3, 3),
        response_tokens=(4, 2),
        truncated=(True, False),
        tokens=16,
        images=1,
        patches=8,
    )
    chunk = SimpleNamespace(ranks=[[0, 1]], fill=0.5)
    batch = SimpleNamespace(
        records=[record],
        minis=[SimpleNamespace(chunks=[chunk])],
        exposed_wait_s=0.5,
        forwards=[(1.0, 1.25)],
        overlap=lambda last_put_s: 0.0,
        fetched_bytes=7,
    )
    step = Step(3)
    step.add(batch, {"last_put_s": 1.0, "put_bytes": 5, "engine_restarts": 1, "begun_again_groups": 8})
    expected = {
        "engine_restarts": 1,
        "begun_again_groups": 8,
        "mixed_version_samples": 1,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "response_tokens": 6,
        "truncated_fraction": 0.5,
    }
    assert {name: step.metrics[name] for name in expected} == expected
    assert "last_put_s" not in step.metrics
