"""The drawings of a report, as SVG text. Pure: numbers in, one picture out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.bench import svg
from stretto.bench.markup import Markup, element, joined, short
from stretto.bench.phrases import interval, number, ratio
from stretto.bench.plan import Window
from stretto.bench.results import Timeline

GAINS = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 500.0, 1000.0)
PERCENTS = (0.0, *GAINS, *(-gain for gain in GAINS if gain < 100), -90.0, -95.0)
"""Where an axis of gains may have ticks."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One row of ``effects``: log-ratios. ``low`` and ``high`` may be infinite."""

    label: str
    told: str
    colour: int
    values: tuple[float, ...]
    mean: float
    low: float
    high: float


def effects(title: str, rows: Sequence[Effect], aa: float | None) -> Markup:
    """Means with intervals, and a ring for every block. ``aa``: the largest A/A log-ratio, shaded around 0."""
    points = [0.0, *(value for row in rows for value in (*row.values, row.mean)), *([aa, -aa] if aa else [])]
    reach = max(max(map(abs, points)), 0.02)
    ends = [end for row in rows for end in (row.low, row.high) if math.isfinite(end) and abs(end) < 4 * reach]
    x = svg.Scale(*svg.padded([*points, *ends], 0.08), 14, svg.WIDTH - 14)
    bottom = 8 + 46 * len(rows)
    parts = []
    if aa:
        parts.append(svg.rect(x(-aa), 4, x(aa) - x(-aa), bottom, "shade"))
    parts += _percent_axis(x, bottom)
    for index, row in enumerate(rows):
        y = 34 + 46 * index
        parts += [svg.text(14, y - 14, row.label, "strong"), svg.text(svg.WIDTH - 14, y - 14, row.told, "end", "muted")]
        bar = [svg.line(x(row.low), y, x(row.high), y, "bar")]
        for end, way in ((row.low, 1), (row.high, -1)):
            tip = x(end)
            beyond = not x.low <= end <= x.high
            corner = f"{short(tip + 6 * way)},{y - 5} {short(tip)},{y} {short(tip + 6 * way)},{y + 5}"
            bar.append(
                element("polyline", points=corner, class_="bar") if beyond else svg.line(tip, y - 5, tip, y + 5, "bar")
            )
        bar += [element("circle", cx=x(value), cy=y, r=4.0, class_="dot") for value in row.values]
        bar.append(svg.rect(x(row.mean) - 2, y - 8, 4, 16, "fill"))
        parts.append(element("g", element("title", f"{row.label}: {row.told}"), *bar, class_=svg.colour(row.colour)))
    height = bottom + 26
    if aa:
        parts.append(svg.text(14, height + 14, f"shaded: the largest A/A difference, {ratio(aa)}", "muted", "small"))
        height += 22
    told = "; ".join(f"{row.label} {ratio(row.mean)}, 95 % interval {interval(row.low, row.high)}" for row in rows)
    return svg.drawing(height, title, told, *parts)


def _percent_axis(x: svg.Scale, bottom: float) -> list[Markup]:
    parts: list[Markup] = []
    taken: list[float] = []
    for value in sorted(PERCENTS, key=lambda value: (value != 0, -abs(value))):
        log = math.log1p(value / 100)
        at = x(log)
        if x.low <= log <= x.high and all(abs(at - other) >= 52 for other in taken):
            taken.append(at)
            parts.append(svg.line(at, 4, at, bottom + 4, "axis" if value == 0 else "grid"))
            words = f"{value:+g} %" if value else "0"
            parts.append(svg.text(svg.within(at, words), bottom + 18, words, "mid", "muted"))
    return parts


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One row of ``strips``: the runs of a condition, each with what a pointer tells of it."""

    label: str
    colour: int
    values: tuple[tuple[float, str], ...]


def strips(title: str, rows: Sequence[Strip], unit: str) -> Markup:
    """A ring for every run, and the range between them."""
    x = svg.Scale(*svg.padded([value for row in rows for value, _ in row.values]), 14, svg.WIDTH - 14)
    bottom = 6 + 40 * len(rows)
    parts = _axis(x, bottom, unit)
    for index, row in enumerate(rows):
        y, values = 30 + 40 * index, [value for value, _ in row.values]
        words = number(min(values)) if len(values) == 1 else f"{number(min(values))} to {number(max(values))}"
        parts += [svg.text(14, y - 12, row.label, "strong"), svg.text(svg.WIDTH - 14, y - 12, words, "end", "muted")]
        rings = [
            element("circle", element("title", told), cx=x(value), cy=y, r=4.5, class_="dot")
            for value, told in row.values
        ]
        bar = svg.line(x(min(values)), y, x(max(values)), y, "bar", "thin")
        parts.append(element("g", bar, *rings, class_=svg.colour(row.colour)))
    told = "; ".join(f"{row.label}: {', '.join(number(value) for value, _ in row.values)}" for row in rows)
    return svg.drawing(bottom + 36, title, f"{told} {unit}", *parts)


def _axis(x: svg.Scale, bottom: float, unit: str, top: float = 4) -> list[Markup]:
    """Grid and words below; the unit under the right end."""
    at = svg.ticks(x.low, x.high, 5)
    parts = [svg.line(x(value), top, x(value), bottom + 4, "grid") for value in at]
    for value, words in zip(at, svg.tick_words(at), strict=True):
        parts.append(svg.text(svg.within(x(value), words), bottom + 17, words, "mid", "muted"))
    parts.append(svg.text(svg.WIDTH - 6, bottom + 31, unit, "end", "muted", "small"))
    return parts


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run's values by update; None is a gap. ``group`` indexes the conditions."""

    group: int
    values: Sequence[float | None]


def curves(title: str, groups: Sequence[str], lines: Sequence[Line], warmup: int, windows: Sequence[Window]) -> Markup:
    """A thin line for every run and a thick one for the mean of each condition's runs, thinner from one to the next, so
    that each shows beside the next where they lie on one another. Warm-up is shaded, and drawn at the frame's edge
    where it would lie far outside; a bar below marks the windows.
    """
    updates = max(len(line.values) for line in lines)
    left, right, top, bottom = 56.0, svg.WIDTH - 10, 10.0, 190.0
    x = svg.Scale(-0.5, updates - 0.5, left, right)
    y = svg.Scale(*_frame(lines, warmup), bottom, top)
    parts = [svg.rect(left, top, x(warmup - 0.5) - left, bottom - top, "shade")] if warmup else []
    at = svg.ticks(y.low, y.high, 4)
    for value, words in zip(at, svg.tick_words(at), strict=True):
        parts += [svg.line(left, y(value), right, y(value), "grid"), svg.text(left - 6, y(value) + 4, words, "end")]
    whole = [value for value in svg.ticks(0, max(1, updates - 1), 6) if value == int(value) and value < updates]
    parts += [svg.text(x(value), bottom + 20, f"{value:g}", "mid", "muted") for value in whole]
    for window in windows:
        start, end = x(window.first - 0.5), x(min(window.last, updates - 1) + 0.5)
        parts.append(svg.rect(start, bottom + 2, end - start, 3, "fill", "c9"))
    for group in dict.fromkeys(line.group for line in lines):
        mine = [line for line in lines if line.group == group]
        inner = [_path(line.values, x, y, "thin") for line in mine] if len(mine) > 1 else []
        thick = _path(_means(mine, updates), x, y, "", 1.4 + 3.6 * (len(groups) - 1 - group) / max(4, len(groups) - 1))
        classes = f"{svg.colour(group)} cond-{group}"
        parts.append(element("g", element("title", groups[group]), *inner, thick, class_=classes))
    names, height = svg.key([(svg.colour(index), name) for index, name in enumerate(groups)], bottom + 34, left)
    parts += [svg.text(right, bottom + 32, "update", "end", "muted", "small"), names]
    told = "; ".join(
        f"{groups[group]}: first {_ends(mine, 0)}, last {_ends(mine, -1)}"
        for group in dict.fromkeys(line.group for line in lines)
        if (mine := [line for line in lines if line.group == group])
    )
    return svg.drawing(bottom + 36 + height, title, told, *parts)


def _frame(lines: Sequence[Line], warmup: int) -> tuple[float, float]:
    """A range that holds all after the warm-up, and of the warm-up what is no further away than half of that."""
    late = [value for line in lines for value in line.values[warmup:] if value is not None]
    every = [value for line in lines for value in line.values if value is not None]
    if not late:
        return svg.padded(every or [0.0])
    room = (max(late) - min(late)) / 2 or math.inf
    return svg.padded([max(min(every), min(late) - room), min(max(every), max(late) + room)])


def _means(lines: Sequence[Line], updates: int) -> list[float | None]:
    """Of the runs that have a value; None where none has."""
    found: list[float | None] = []
    for update in range(updates):
        values = [line.values[update] for line in lines if update < len(line.values)]
        there = [value for value in values if value is not None]
        found.append(math.fsum(there) / len(there) if there else None)
    return found


def _ends(lines: Sequence[Line], at: int) -> str:
    values = [line.values[at] for line in lines if line.values and line.values[at] is not None]
    return number(math.fsum(value for value in values if value is not None) / len(values)) if values else "none"


def _path(
    values: Sequence[float | None], x: svg.Scale, y: svg.Scale, class_: str, width: float | None = None
) -> Markup:
    """A line with gaps; a value alone between gaps is a dot."""
    pieces, dots, piece = [], [], []
    for update, value in enumerate([*values, None]):
        if value is not None:
            piece.append(f"{x(update):.1f} {y(value):.1f}")
            continue
        if len(piece) == 1:
            cx, cy = piece[0].split()
            dots.append(element("circle", cx=cx, cy=cy, r=2.0 + (width or 1) / 2, class_=f"fill {class_}".strip()))
        elif piece:
            pieces.append("M" + "L".join(piece))
        piece = []
    drawn = [element("path", d="".join(pieces), class_=f"line {class_}".strip(), stroke_width=width)] if pieces else []
    return joined(*drawn, *dots)


def stacked(title: str, rows: Mapping[str, Mapping[str, float]], unit: str = "s an update") -> Markup:
    """A bar a condition, made of its parts, which share colours over all bars."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    longest = max(math.fsum(parts.values()) for parts in rows.values()) or 1.0
    x = svg.Scale(0, longest * 1.02, 14, svg.WIDTH - 14)
    bottom = 6 + 44 * len(rows)
    drawn = _axis(x, bottom, unit)
    for index, (label, parts) in enumerate(rows.items()):
        y, start, total = 24 + 44 * index, 0.0, math.fsum(parts.values())
        drawn += [
            svg.text(14, y - 6, label, "strong"),
            svg.text(svg.WIDTH - 14, y - 6, f"{number(total)} s", "end", "muted"),
        ]
        for name, seconds in parts.items():
            told = f"{label}, {name}: {number(seconds)} s"
            classes = ("fill", "edge", svg.colour(1 + names.index(name)))
            drawn.append(svg.rect(x(start), y, x(start + seconds) - x(start), 20, *classes, title=told))
            start += seconds
    entries, height = svg.key([(svg.colour(1 + index), name) for index, name in enumerate(names)], bottom + 42)
    told = "; ".join(
        f"{label}: {', '.join(f'{name} {number(seconds)}' for name, seconds in parts.items())}"
        for label, parts in rows.items()
    )
    return svg.drawing(bottom + 44 + height, title, f"{told} {unit}", *drawn, entries)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One row of ``limits``: seconds an update of each stage alone, and of a measured step."""

    label: str
    stages: Mapping[str, float | None]
    step_s: float


def limits(title: str, rows: Sequence[Limit]) -> Markup:
    """Stages alone as bars from 0, and the measured step as a mark that none of them can pass: the roofline."""
    values = [row.step_s for row in rows] + [s for row in rows for s in row.stages.values() if s is not None]
    x = svg.Scale(0, max(values) * 1.04, 14, svg.WIDTH - 14)
    names = list(dict.fromkeys(name for row in rows for name in row.stages))
    high = 24 + 11 * len(names)
    bottom = 6 + high * len(rows)
    parts = _axis(x, bottom, "s an update")
    for index, row in enumerate(rows):
        top = 22 + high * index
        parts += [
            svg.text(14, top - 6, row.label, "strong"),
            svg.text(svg.WIDTH - 14, top - 6, f"step {number(row.step_s)} s", "end", "muted"),
        ]
        for at, name in enumerate(names):
            seconds = row.stages.get(name)
            if seconds is not None:
                told = f"{row.label}, {name} alone: {number(seconds)} s"
                classes = ("fill", svg.colour(1 + at))
                parts.append(svg.rect(14, top + 11 * at, x(seconds) - 14, 9, *classes, title=told))
        parts.append(svg.rect(x(row.step_s) - 1.5, top - 3, 3, 11 * len(names) + 4, "fill", "c0"))
    named = [(svg.colour(1 + at), f"{name} alone") for at, name in enumerate(names)]
    entries, height = svg.key([*named, ("c0", "measured step")], bottom + 42)
    told = "; ".join(
        f"{row.label}: step {number(row.step_s)} s, "
        + ", ".join(f"{name} alone {number(seconds)} s" for name, seconds in row.stages.items())
        for row in rows
    )
    return svg.drawing(bottom + 44 + height, title, told, *parts, entries)


NAMED = 8
"""Spans that have a colour of their own in a timeline."""
LANES = ("driver", "processor", "rollout", "reward", "plane", "actor")


def timeline(title: str, step: Timeline, longest_s: float, names: Sequence[str]) -> Markup:
    """Lanes of spans. ``longest_s`` is the length of the axis and ``names`` the order of colours, so that several
    drawings compare; those after the ``NAMED`` first are grey. What belongs to a later partition than the step trains
    is paler.
    """
    left, right = 74.0, svg.WIDTH - 8
    x = svg.Scale(0, longest_s, left, right)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in step.spans)]
    lanes += sorted({span.lane for span in step.spans} - set(LANES))
    top, drawn = 6.0, []
    for lane in lanes:
        rows: list[float] = []
        bars = []
        for start, end, name, partition in _merged(step, lane, longest_s / (right - left)):
            row = next((index for index, free in enumerate(rows) if free <= start + 1e-9), len(rows))
            rows[row : row + 1] = [end]
            ahead = partition is not None and partition > step.update
            y, width = top + 3 + 15 * row, x(end) - x(start)
            of = "" if partition is None else f" of partition {partition}"
            told = f"{name}{of}: {start:.3f} to {end:.3f} s"
            classes = ["fill", svg.colour(1 + min(names.index(name), NAMED)), *(["ahead"] if ahead else [])]
            bars.append(svg.rect(x(start), y, max(0.7, width), 13, *classes, title=told))
            if partition is not None and width > 9 + 6 * len(str(partition)):
                bars.append(
                    svg.text(x(start) + width / 2, y + 10, str(partition), "inside", *(["on-pale"] if ahead else []))
                )
        bottom = top + 6 + 15 * max(1, len(rows))
        drawn += [svg.line(left, bottom, right, bottom, "grid"), svg.text(8, top + 14, lane), *bars]
        top = bottom
    end = x(step.seconds)
    drawn.append(svg.line(end, 2, end, top, "axis"))
    axis = _axis(x, top, f"s since the step began; it took {number(step.seconds)} s", 2)
    named = [(svg.colour(1 + index), name) for index, name in enumerate(names[:NAMED])]
    others = [(svg.colour(1 + NAMED), name) for name in names[NAMED:]]
    entries, height = svg.key([*named, *others], top + 42)
    busy = "; ".join(
        f"{lane}: {', '.join(dict.fromkeys(span.name for span in step.spans if span.lane == lane))}" for lane in lanes
    )
    told = f"Update {step.update} of {step.cell}, {number(step.seconds)} s. Lanes: {busy}"
    return svg.drawing(top + 44 + height, title, told, *axis, *drawn, entries)


def _merged(step: Timeline, lane: str, unit_s: float) -> list[tuple[float, float, str, int | None]]:
    """Spans of a lane by start; those of one name and partition with less than half a unit between them are one bar."""
    found: list[tuple[float, float, str, int | None]] = []
    last: dict[tuple[str, int | None], int] = {}
    for span in sorted((span for span in step.spans if span.lane == lane), key=lambda span: span.start_s):
        kind = (span.name, span.partition)
        if kind in last and span.start_s - found[last[kind]][1] < unit_s / 2:
            start, end, *_ = found[last[kind]]
            found[last[kind]] = (start, max(end, span.end_s), *kind)
        else:
            last[kind] = len(found)
            found.append((span.start_s, span.end_s, *kind))
    return found
