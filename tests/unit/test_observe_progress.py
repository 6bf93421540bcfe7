import dataclasses
import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.observe.names import METRICS, SPANS
from stretto.observe.progress import PlainProgress, StepReport, duration, make_progress, sparkline, summary
from stretto.types import Evaluation

ROOT = Path(__file__).parents[2]


def report(update, reward=0.5, step_s=2.0):
    return StepReport(
        update=update,
        reward=reward,
        tokens_per_s=12_345.6,
        staleness=1.0,
        step_s=step_s,
        actor_waited_s=0.25,
        rollout_waited_s=0.5,
    )


def test_a_sparkline_scales_from_the_least_to_the_greatest_value():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5]) == "▁▁▁"
    assert sparkline([0, math.nan, 1]) == "▁ █"
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0], ascii_only=True) == "_#"


def test_a_long_series_is_drawn_by_means_of_equal_runs():
    assert sparkline([0, 2, 7, 9, 7, 9], width=3) == "▁██"
    assert len(sparkline(range(150), width=40)) == 40


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (187, "3:07"), (7387, "2:03:07"), (math.nan, "?")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_without_a_terminal_every_event_is_one_plain_line():
    stream = io.StringIO()
    with PlainProgress(10, 4, stream) as progress:
        progress.note("rollout generates partition 4")
        progress.step(report(4))
        progress.evaluation(Evaluation(split="validation", version=5, correct=3, total=4))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rollout generates partition 4"
    assert lines[1] == (
        "update 5/10  reward 0.500  12,346 tokens/s  staleness 1.0  step 2.00 s  "
        "waited: actor 0.25 s, rollout 0.50 s  left 10 s"
    )
    assert lines[2] == "evaluation  exact match 75.0% (validation, version 5), 3 of 4"


def test_evaluations_are_shown_in_terms_of_the_reward_function():
    stream = io.StringIO()
    graded = Evaluation(split="validation", version=5, correct=0, total=4, reward_mean=0.25)
    with PlainProgress(10, 4, stream, reward="rewards:nearness") as progress:
        progress.evaluation(graded)
        progress.evaluation(dataclasses.replace(graded, correct=1))
        progress.evaluation(dataclasses.replace(graded, reward_mean=math.nan))
    assert stream.getvalue().splitlines() == [
        "evaluation  reward 0.250 (validation, version 5), mean of 4",
        "evaluation  reward 0.250 (validation, version 5), 1 with reward 1, mean of 4",
        "evaluation  reward - (validation, version 5), mean of 4",
    ]
    text = summary(
        updates=1, wall_s=1, training_s=1, rewards=[], tokens=1, run_dir="r", reward="rewards:nearness", before=graded
    )
    assert text.startswith("reward before        0.250  (mean of 4 validation prompts, policy version 5)\n")


def test_a_wait_that_is_not_known_yet_is_a_dash():
    stream = io.StringIO()
    with PlainProgress(10, 0, stream) as progress:
        progress.step(dataclasses.replace(report(0), rollout_waited_s=math.nan))
    assert "waited: actor 0.25 s, rollout -  left" in stream.getvalue()


def test_output_that_is_no_terminal_gets_plain_lines(tmp_path):
    assert isinstance(make_progress(1, run_dir=tmp_path), PlainProgress)


def test_the_summary_says_what_was_reached_and_where_it_is():
    text = summary(
        updates=150,
        wall_s=130,
        training_s=100,
        rewards=[0.2] * 5 + [0.5] * 10 + [math.nan] + [0.8] * 5,
        tokens=1_000_000,
        run_dir="runs/digits",
        before=Evaluation(split="test", version=0, correct=30, total=100),
        after=Evaluation(split="test", version=150, correct=90, total=100),
    )
    assert "exact match before   30.0%  (30 of 100 test prompts, policy version 0)" in text
    assert "exact match after    90.0%  (90 of 100 test prompts, policy version 150)" in text
    assert "0.200 -> 0.800 (first and last 5 updates)" in text
    assert "updates             150 in 2:10, 1:40 of them training\n" in text
    assert "speed               10,000 tokens/s while it trained" in text
    assert text.endswith("results             runs/digits")


def on_a_terminal(code, *arguments):
    """What a terminal shows while Python runs ``code``, and the exit status."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=child, stdout=child, stderr=child, env=environment, cwd=ROOT
    )
    os.close(child)
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                data = os.read(parent, 65536)
            except OSError:  # the terminal is closed on the other side
                break
            shown += data
        elif process.poll() is not None:
            break
    os.close(parent)
    return shown.decode(errors="replace"), process.wait(10)


LIVE = """
import logging, os, subprocess, sys, time, warnings
logging.basicConfig()
from stretto.observe.progress import StepReport, make_progress
from stretto.types import Evaluation
print("before")
with make_progress(10, 2, run_dir=sys.argv[1]) as progress:
    print("NOISE print")
    logging.getLogger("x").warning("NOISE logging")
    warnings.warn("NOISE warning")
    os.write(2, b"NOISE descriptor\\n")
    subprocess.run(["echo", "NOISE child"])
    progress.evaluation(Evaluation(split="validation", version=2, correct=1, total=2))
    for update in range(2, 5):
        progress.step(StepReport(update=update, reward=update / 10, tokens_per_s=4321.0, staleness=1.0, step_s=2.0,
                                 actor_waited_s=0.25, rollout_waited_s=0.75))
    progress.note("writing a checkpoint")
    time.sleep(0.6)
    if sys.argv[2] == "raise":
        raise RuntimeError("it broke")
print("after")
"""


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_on_a_terminal_the_live_display_shows_the_run_and_nothing_else(tmp_path):
    shown, status = on_a_terminal(LIVE, str(tmp_path), "end")
    assert status == 0
    text = plain(shown)
    for part in (
        "update 5/10",
        "reward",
        "0.400",
        "▁",
        "50.0% (validation, version 2)",
        "4,321 tokens/s",
        "0.25 s for",
    ):
        assert part in text
    assert "0.75 s for weights" in text
    assert "10 s left" in text
    assert "writing a checkpoint" in text
    assert text.startswith("before")
    assert "NOISE" not in text
    noise = (tmp_path / "output.log").read_text()
    assert [k for k in ("print", "logging", "warning", "descriptor", "child") if f"NOISE {k}" not in noise] == []
    assert f"other output of this run ({len(noise.encode())} bytes)" in text.replace("\r\n", "")
    assert text.rstrip().endswith("after")
    assert "\x1b[?25h" in shown  # the cursor is back


def test_an_error_ends_the_live_display_and_is_shown_on_the_terminal(tmp_path):
    shown, status = on_a_terminal(LIVE, str(tmp_path), "raise")
    assert status == 1
    assert "RuntimeError: it broke" in plain(shown)
    assert "\x1b[?25h" in shown


def test_the_documentation_lists_every_span_and_metric_with_its_unit():
    text = (ROOT / "docs" / "observability.md").read_text()
    assert {name for name in SPANS if f"| `{name}` | {SPANS[name]} |" not in text} == set()
    assert {name for name, (unit, says) in METRICS.items() if f"| `{name}` | {unit} | {says} |" not in text} == set()


NOTES = """
import sys, time
from stretto.observe.progress import make_progress
with make_progress(10, run_dir=sys.argv[1]) as progress:
    progress.note("8 of 10 rows [bold] can be used", stays=True)
    for text in ("checked 10 rows", "starting"):
        progress.note(text)
        time.sleep(0.6)
"""


def test_a_result_stays_above_the_live_display_and_progress_does_not(tmp_path):
    shown, status = on_a_terminal(NOTES, str(tmp_path))
    assert status == 0
    lines = plain(shown).replace("\r", "\n").splitlines()
    assert sum("8 of 10 rows [bold] can be used" in line for line in lines) == 1
    assert any("checked 10 rows" in line for line in lines)
    assert "checked 10 rows" not in lines[-1] and "starting" in plain(shown).rsplit("checked 10 rows", 1)[1]


STOPPING = """
import sys, time
from stretto.observe.progress import make_progress
says = ""
with make_progress(10, run_dir=sys.argv[1], stopping=lambda: says) as progress:
    progress.note("starting")
    time.sleep(0.6)
    says = "stopping ..."
    time.sleep(0.6)
"""


def test_the_live_display_says_at_once_that_the_run_stops(tmp_path):
    shown, status = on_a_terminal(STOPPING, str(tmp_path))
    assert status == 0
    before, after = plain(shown).split("stopping ...", 1)
    assert "so far" in before and "starting" in before
    assert "so far" not in after and "starting" not in after
