"""What drawings share: colours that follow light and dark, scales with round ticks, a frame, a key.

A drawing is 480 units wide, so that its words stay readable on a telephone; it says its own size and scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.bench.markup import Markup, element
from stretto.bench.phrases import number

WIDTH = 480.0
LIGHT = ["#1f2328", "#d55e00", "#0072b2", "#009e73", "#b8578e", "#b07a00", "#3a9bd6", "#8250df", "#7a5c1e", "#7f858d"]
LIGHT += ["#4d7c0f", "#e11d74"]
DARK = ["#e6edf3", "#ff8b4a", "#62aeea", "#3ecf9f", "#e79ac7", "#f2b33d", "#8fd0f5", "#b794f6", "#c9a55c", "#9aa3ad"]
DARK += ["#a3d65c", "#ff6fae"]
"""The first eight after Okabe and Ito, whom colour-blind people can tell apart; the very first, the ink's, is B's."""
COLOURS = len(LIGHT)


def _variables(colours: Sequence[str], ink: str, muted: str, line: str, shade: str, paper: str) -> str:
    named = [f"--k{index}:{colour}" for index, colour in enumerate(colours)]
    return ";".join([*named, f"--ink:{ink};--muted:{muted};--line:{line};--shade:{shade};--paper:{paper}"])


LIGHT_VARIABLES = _variables(LIGHT, "#1f2328", "#59636e", "#d1d9e0", "#eaeef2", "#ffffff")
DARK_VARIABLES = _variables(DARK, "#e6edf3", "#9aa4af", "#3d444d", "#21262d", "#0d1117")
STYLE = (
    ".chart text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--ink)}"
    ".chart .muted{fill:var(--muted)}.chart .end{text-anchor:end}.chart .mid{text-anchor:middle}"
    ".chart .strong{font-weight:600}.chart .small{font-size:10.5px}"
    ".chart .grid{stroke:var(--line);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}"
    ".chart .shade{fill:var(--shade)}.chart .line{fill:none;stroke:var(--k);stroke-linejoin:round}"
    ".chart .fill{fill:var(--k)}.chart .dot{fill:var(--paper);stroke:var(--k);stroke-width:1.5}"
    ".chart .bar{stroke:var(--k);stroke-width:2.5;fill:none}.chart .thin{stroke-width:1;opacity:.45}"
    ".chart .edge{stroke:var(--paper);stroke-width:.6}.chart .ahead{fill-opacity:.45}"
    ".chart .inside{fill:var(--paper);font-size:10px;text-anchor:middle}.chart .inside.on-pale{fill:var(--ink)}"
    + "".join(f".c{index}{{--k:var(--k{index})}}" for index in range(COLOURS))
)


def drawing(height: float, title: str, description: str, *parts: Markup) -> Markup:
    """One picture; readers of the page who cannot see it hear title and description."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        class_="chart",
        role="img",
    )


def standalone(svg: str) -> str:
    """The same as a file of its own, with colours for light and dark."""
    dark = f"@media(prefers-color-scheme:dark){{:root{{{DARK_VARIABLES}}}}}"
    style = element("style", Markup(f":root{{{LIGHT_VARIABLES}}}{dark}svg{{background:var(--paper)}}{STYLE}"))
    return svg.replace("<title>", f"{style}<title>", 1) + "\n"


def colour(index: int) -> str:
    """Class of the ``index``-th colour; after the last the first but the ink's come again."""
    return f"c{index if index < COLOURS else 1 + (index - 1) % (COLOURS - 1)}"


def text(x: float, y: float, words: str, *classes: str) -> Markup:
    return element("text", words, x=x, y=y, class_=" ".join(classes) or None)


def line(x1: float, y1: float, x2: float, y2: float, *classes: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=" ".join(classes))


def rect(x: float, y: float, width: float, height: float, *classes: str, title: str = "") -> Markup:
    inside = [element("title", title)] if title else []
    return element("rect", *inside, x=x, y=y, width=max(0.0, width), height=height, class_=" ".join(classes))


def width_of(words: str) -> float:
    """About how wide words of 12 units are; no font is asked."""
    return 6.7 * len(words)


def within(x: float, words: str) -> float:
    """Where words in the middle of ``x`` stand so that all of them are in the drawing."""
    half = width_of(words) / 2 + 2
    return min(max(x, half), WIDTH - half)


def key(entries: Sequence[tuple[str, str]], y: float, left: float = 8.0) -> tuple[Markup, float]:
    """Squares in the colours of classes, each with its word, in as many lines as needed; and the height of all."""
    parts, x, top = [], left, y
    for classes, words in entries:
        needed = 16 + width_of(words) + 14
        if x > left and x + needed > WIDTH:
            x, top = left, top + 18
        parts += [rect(x, top, 11, 11, "fill", classes), text(x + 16, top + 10, words)]
        x += needed
    return Markup("".join(parts)), top - y + (18 if entries else 0)


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` on a line from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value lies; one beyond the ends lies at the end."""
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``, about ``count``."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """A range that holds all values with room around them, also where they are one value."""
    low, high = min(values), max(values)
    room = share * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def tick_words(values: Sequence[float]) -> list[str]:
    """Ticks with just the digits that tell them apart."""
    if len(values) < 2:
        return [number(value) for value in values]
    step, largest = abs(values[1] - values[0]), max(map(abs, values))
    if largest < 1e-3 or largest >= 1e6:
        return [f"{value:.1e}" if value else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" if abs(value) > step / 2 else "0" for value in values]
