"""The alarm on the gap between the log-probs of training and of the rollout: what it tells of, and what not."""

from __future__ import annotations

import math

import pytest
from test_records import skipped_step

from stretto.config import Config
from stretto.gap_alarm import GapAlarm
from stretto.observe.progress import PlainProgress
from stretto.records import Records


def config(**tables) -> Config:
    return Config.model_validate({"model": {"path": "org/model"}} | tables)


def updates_told(gaps: list[float], **tables) -> list[int]:
    alarm = GapAlarm(config(**tables))
    return [k for k, gap in enumerate(gaps) if alarm.look(k, gap)]


def test_the_first_crossing_is_told_and_then_only_what_is_twice_as_much():
    assert Config().rollout.logprob_gap_alarm == 0.5
    #                     at the threshold  first      less       twice      again      four times
    assert updates_told([0.1, 0.5, 0.6, 0.7, 0.2, 1.19, 1.2, 1.3, 0.6, 2.4, 2.4]) == [2, 6, 9]
    assert updates_told([0.1, 0.2], rollout={"logprob_gap_alarm": 0.05}) == [0, 1]
    assert updates_told([0.1, 9.0, math.nan], rollout={"logprob_gap_alarm": 0}) == []


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_gap_that_is_no_number_is_an_alarm_told_once(broken):
    assert updates_told([broken, broken, 0.4, 0.6, broken]) == [0, 3]


def test_where_no_gap_can_be_told_from_none_it_is_silent(tmp_path):
    assert updates_told([9.0, math.nan], algorithm={"old_policy": "rollout"}) == []
    assert updates_told([9.0, math.nan], seams={"replay": str(tmp_path)}) == []
    assert updates_told([9.0], algorithm={"old_policy": "old_actor"}) == [0]
    assert updates_told([9.0], seams={"old_policy": "training_forward"}) == [0]


def test_it_says_value_threshold_causes_and_where_to_look():
    text = GapAlarm(config(staleness={"max": 0})).look(3, 0.61234)
    for words in (
        *("0.612 nats", "rollout.logprob_gap_alarm = 0.5", "stale or wrong weights", "images or prompts"),
        *("temperature or mask", "metrics.jsonl", "docs/observability.md"),
    ):
        assert words in text
    assert "training has moved" not in text and "\n" not in text
    assert "moved much in staleness.max = 2" in GapAlarm(config(staleness={"max": 2})).look(0, 1.0)
    assert "snapshot" in GapAlarm(config(algorithm={"old_policy": "old_actor"})).look(0, 1.0)
    assert "cannot be compared (nan)" in GapAlarm(config()).look(0, math.nan)


def test_what_was_told_is_on_record_as_plain_data():
    kept: list[list[dict]] = []
    alarm = GapAlarm(config(), kept.append)
    for k, gap in enumerate((0.1, 0.75, 0.8, math.nan, 1.5)):
        alarm.look(k, gap)
    told = [
        {"metric": "rollout_gap_mean", "update": update, "value": value, "threshold": 0.5}
        for update, value in ((1, 0.75), (3, None), (4, 1.5))
    ]
    assert kept == [told[:1], told[:2], told]


def test_a_run_shows_it_and_an_update_without_loss_tokens_has_no_gap(tmp_path, capsys):
    records = Records(tmp_path, 0, PlainProgress(50), 2, GapAlarm(config()))
    records.begin()
    for k, gap in enumerate(({}, {"rollout_gap_mean": 0.2}, {"rollout_gap_mean": 0.9})):
        records.step(skipped_step(k, **gap))
    records.close()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "logprob_gap_alarm" in line]
    assert line.startswith("update 6: the log-probs of training and rollout differ by 0.9 nats")
