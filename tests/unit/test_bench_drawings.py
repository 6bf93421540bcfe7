"""Words and pictures of a report: digits, ticks, and places that follow the numbers."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench import plots
from stretto.bench.arithmetic import estimate
from stretto.bench.markup import element, inline
from stretto.bench.phrases import effect, interval, number, ratio, size, spread
from stretto.bench.plan import Window
from stretto.bench.results import Span, Timeline
from stretto.bench.svg import tick_words, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (0.0012345, "0.00123"),
        (9.9999, "10.0"),
        (99.96, "100"),
        (15134.4, "15,134"),
        (2.3298638321484213e-09, "2.33e-09"),
        (-39.04, "-39.0"),
        (None, "not measured"),
        (math.nan, "not measured"),
        (math.inf, "unbounded"),
    ],
)
def test_numbers_have_three_digits(value: float | None, expected: str) -> None:
    assert number(value) == expected


def test_ratios_are_percent_with_their_interval() -> None:
    assert ratio(math.log(1.39)) == "+39.0 %" and ratio(math.log(0.5)) == "-50.0 %"
    assert ratio(math.inf) == "unbounded" and ratio(math.nan) == "not measured"
    assert interval(math.log(0.41), math.log(4.68)) == "-59.0 % to +368 %"
    assert effect(estimate([math.log(1.1)])) == "+10.0 % (none: one block)"
    assert size(3 * 2**30) == "3.00 GiB" and size(1.5 * 2**20) == "1.50 MiB" and size(None) == "not measured"
    assert spread([1.0, 3.0, None]) == "2.00 (1.00 to 3.00), of 2 of 3 runs"
    assert spread([None]) == "not measured"


def test_what_is_no_markup_is_escaped() -> None:
    assert element("p", "a < b & c", title='say "no"') == '<p title="say &quot;no&quot;">a &lt; b &amp; c</p>'
    assert inline("`x<y` is **so**, 5 %") == "<code>x&lt;y</code> is <strong>so</strong>, 5\u00a0%"


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_round_and_within(low: float, width: float, count: int) -> None:
    found = ticks(low, low + width, count)
    assert len(found) <= count + 1
    room = 1e-6 * width + 1e-9 * abs(low)
    assert all(low - room <= value <= low + width + room for value in found)
    if len(found) > 1:
        step = found[1] - found[0]
        digit = step / 10 ** math.floor(math.log10(step * 1.001))
        assert min(abs(digit - nice) for nice in (1, 2, 5)) < 1e-3


def test_tick_words_tell_ticks_apart() -> None:
    assert tick_words([16000.0, 18000.0]) == ["16,000", "18,000"]
    assert tick_words([0.0, 0.25, 0.5]) == ["0", "0.3", "0.5"] or tick_words([0.0, 0.2, 0.4]) == ["0", "0.2", "0.4"]
    assert tick_words([0.0, 1e-4]) == ["0", "1.0e-04"]


def rects(picture: str, class_: str) -> list[dict[str, float]]:
    root = ElementTree.fromstring(picture)
    found = [each for each in root.iter(f"{SVG}rect") if class_ in (each.get("class") or "").split()]
    return [{key: float(each.get(key) or 0) for key in ("x", "y", "width", "height")} for each in found]


def test_stacked_bars_are_as_long_as_their_seconds() -> None:
    bars = rects(plots.stacked("phases", {"B": {"wait": 1.0, "train": 3.0}, "S": {"wait": 0.5, "train": 3.0}}), "edge")
    widths = [bar["width"] for bar in bars]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 3, 0.5, 3], rel=1e-3)
    assert bars[1]["x"] == pytest.approx(bars[0]["x"] + bars[0]["width"], abs=0.02)


def test_timeline_places_spans_and_marks_those_of_later_partitions() -> None:
    spans = (
        Span(lane="actor", name="train", start_s=0.0, end_s=1.0, partition=3),
        Span(lane="rollout", name="generate", start_s=0.5, end_s=1.5, partition=4),
        Span(lane="rollout", name="generate", start_s=1.0, end_s=2.0, partition=3),
    )
    step = Timeline(condition="S", cell="00-1-S", update=3, seconds=2.0, spans=spans)
    picture = plots.timeline("one", step, 2.0, ["train", "generate"])
    (ahead,) = rects(picture, "ahead")
    bars = [bar for bar in rects(picture, "fill") if bar["height"] == 13]
    train = max(bars, key=lambda bar: bar["y"])
    assert ahead["width"] == pytest.approx(train["width"], abs=0.02)
    assert ahead["x"] == pytest.approx(train["x"] + train["width"] / 2, abs=0.02)
    assert len({bar["y"] for bar in bars}) == 3  # the two that overlap in one lane lie on rows of their own


def test_every_word_of_a_drawing_is_inside_it() -> None:
    """Ticks at the very ends of an axis, and the names of many kinds of spans."""
    names = [f"actor.kind_of_span_{index}" for index in range(14)]
    spans = tuple(Span(lane="actor", name=name, start_s=0.0, end_s=1.0, partition=0) for name in names)
    step = Timeline(condition="B", cell="00-0-B", update=0, seconds=1.0, spans=spans)
    row = plots.Effect(label="P", told="", colour=1, values=(-0.1,), mean=-0.09, low=-0.16252, high=0.0)
    for picture in (plots.timeline("one", step, 1.0, names), plots.effects("gains", [row], None)):
        for text in ElementTree.fromstring(picture).iter(f"{SVG}text"):
            x, width = float(text.get("x") or 0), 6.2 * len(text.text or "")
            classes = (text.get("class") or "").split()
            left = x - width if "end" in classes else x - width / 2 if {"mid", "inside"} & {*classes} else x
            assert left >= 0 and left + width <= 480, text.text


def test_curves_break_where_a_value_is_missing() -> None:
    line = plots.Line(group=0, values=(1.0, 2.0, None, 3.0, None, 1.0, 1.0))
    root = ElementTree.fromstring(plots.curves("loss", ["B"], [line], 1, [Window(1, 6)]))
    (path,) = (each.get("d") or "" for each in root.iter(f"{SVG}path"))
    assert path.count("M") == 2 and len(list(root.iter(f"{SVG}circle"))) == 1


def test_a_slow_first_update_does_not_flatten_a_curve() -> None:
    line = plots.Line(group=0, values=(100.0, 1.0, 1.1, 1.0, 1.1))
    root = ElementTree.fromstring(plots.curves("step", ["B"], [line], 1, [Window(1, 4)]))
    (path,) = (each.get("d") or "" for each in root.iter(f"{SVG}path"))
    heights = [float(point.split()[1]) for point in re.split("[ML]", path)[1:]]
    assert heights[0] == 10.0 and abs(heights[1] - heights[2]) > 60


def test_an_interval_that_leaves_the_axis_is_an_arrow() -> None:
    row = plots.Effect(label="P", told="", colour=1, values=(0.1, 0.2), mean=0.15, low=-1.0, high=math.inf)
    root = ElementTree.fromstring(plots.effects("gains", [row], 0.05))
    assert len(list(root.iter(f"{SVG}polyline"))) == 2
    assert len(rects(plots.effects("gains", [row], 0.05), "shade")) == 1
