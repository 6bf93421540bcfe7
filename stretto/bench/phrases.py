"""How a report words numbers: ratios as percent with their interval, three significant digits, and never a NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.bench.arithmetic import Estimate, percent
from stretto.bench.results import NOT_MEASURED

MIB = 2**20
GIB = 2**30


def number(value: float | None, *, signed: bool = False, digits: int = 3) -> str:
    """At least ``digits`` significant ones, whole digits never cut: 0.00123, 15,134, 2.33e-09."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    sign = "+" if signed else ""
    if math.isinf(value):
        return "unbounded" if value > 0 else "-unbounded"
    if value == 0:
        return "0"
    power = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value: 9.999 is 10.0, not 10.00
    if not -4 <= power < 15:
        return f"{value:{sign}.{digits - 1}e}"
    return f"{value:{sign},.{max(0, digits - 1 - power)}f}"


def ratio(log_ratio: float | None) -> str:
    """A log-ratio as a gain: ``+39.0 %``."""
    if log_ratio is None or math.isnan(log_ratio):
        return NOT_MEASURED
    gain = percent(log_ratio)
    return number(gain) if math.isinf(gain) else f"{number(gain, signed=True)} %"


def interval(low: float, high: float) -> str:
    """Of two log-ratios: ``-58.9 % to +370 %``. Infinite ones come from a single block, which has no interval."""
    if math.isinf(low) or math.isinf(high):
        return "none: one block"
    return f"{ratio(low)} to {ratio(high)}"


def effect(found: Estimate | None) -> str:
    """``+39.0 % (-58.9 % to +370 %)``."""
    if found is None:
        return NOT_MEASURED
    return f"{ratio(found.mean)} ({interval(found.low, found.high)})"


def share(value: float | None) -> str:
    return NOT_MEASURED if value is None or math.isnan(value) else f"{number(100 * value)} %"


def size(value: float | None) -> str:
    """Bytes as MiB or GiB."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    return f"{number(value / GIB)} GiB" if value >= GIB else f"{number(value / MIB)} MiB"


def spread(values: Sequence[float | None], unit: str = "") -> str:
    """Mean and range over runs: ``1.52 (1.49 to 1.55)``; of those that were measured, which it says."""
    found = [value for value in values if value is not None and not math.isnan(value)]
    if not found:
        return NOT_MEASURED
    told = f"{number(math.fsum(found) / len(found))}{unit}"
    if min(found) != max(found):
        told += f" ({number(min(found))} to {number(max(found))})"
    return told if len(found) == len(values) else f"{told}, of {len(found)} of {len(values)} runs"


def judged(word: str, claim: bool) -> str:
    """A finding, or whether a target was reached, as it may be said: where the scope allows no claim, it says so."""
    return word if claim else f"{word} (no claim)"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(words: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(", ".join(words).rsplit(", ", 1))
