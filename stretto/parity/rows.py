"""What a row of the table is, and how far two updates are apart in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stretto.observe.raw import RAGGED
from stretto.parity.folder import Update
from stretto.parity.verdict import Difference, Distance, Phase, Value

Origin = Literal["data", "rollout", "schedule", "judged", "log-probs", "training", "norm", "trained"]
"""What a quantity comes from, and so what may move it: the data; rollouts and their rewards; the schedule; rewards as
they are judged; log-probs of the actor before and in training; the norm of its gradients; what else an update makes of
them.
"""
_TOKEN_BITS = 32
PLACE = ("chunk", "rank", "microbatch", "row")


NOTHING = Distance(compared=0, differing=0)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What two updates have of one quantity: how far apart, the first difference, or why it is ``absent``.

    broken  the record is there, and not whole: fingerprints that agree do not make up for it
    lost    the first value that is finite in one run alone, which no rounding explains
    note    what an equal record does not show
    """

    distance: Distance = NOTHING
    first: Difference | None = None
    absent: str = ""
    broken: bool = False
    lost: Difference | None = None
    note: str = ""


Finder = Callable[["Quantity", Update, Update], Found]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A row. ``columns`` of ``raw/`` name what differs; ``prints`` are the fingerprints that must agree besides."""

    name: str
    phase: Phase
    origin: Origin
    find: Finder
    columns: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    unit: str = ""

    def between(self, a: Update, b: Update) -> Found:
        """``a`` and ``b`` are one update of two runs."""
        found = self.find(self, a, b)
        printed = [name for name in self.prints if name in a.prints and name in b.prints]
        if found.absent:
            if found.broken or not printed or len(printed) < len(self.prints):
                return found
            found = Found(distance=Distance(compared=len(printed), differing=0, unit=self.unit))
        apart = [name for name in printed if a.prints[name] != b.prints[name]]
        if not apart or found.first is not None:
            return found
        first = Difference(
            update=a.update,
            phase=self.phase,
            a=a.prints[apart[0]],
            b=b.prints[apart[0]],
            note=f"fingerprint {apart[0]}; no entry of raw/ says where",
        )
        return Found(distance=replace(found.distance, differing=len(apart)), first=first)


# Columns -----------------------------------------------------------------------------------------------------------


def samples(quantity: Quantity, a: Update, b: Update) -> Found:
    """Columns with a value a sample; two columns and more are one value together."""
    if absent := _missing(quantity.columns, a, b):
        return Found(absent=absent)
    if broken := _broken(quantity.columns, a, b):
        return Found(absent=broken, broken=True)
    keys = [np.asarray(update.columns["global_index"], np.int64) << _TOKEN_BITS for update in (a, b)]
    return _entries(quantity, a, b, keys[0], keys[1])


def tokens(quantity: Quantity, a: Update, b: Update) -> Found:
    """A column with a value a response token."""
    if absent := _missing(quantity.columns, a, b):
        return Found(absent=absent)
    if broken := _broken(quantity.columns, a, b):
        return Found(absent=broken, broken=True)
    return _entries(quantity, a, b, _token_keys(a), _token_keys(b))


def _token_keys(update: Update) -> np.ndarray:
    """int64 [T]: the sample in the high half, the position of the token in the low one."""
    lengths = np.asarray(update.columns["lengths"], np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
    return (np.repeat(np.asarray(update.columns["global_index"], np.int64), lengths) << _TOKEN_BITS) + positions


def _entries(quantity: Quantity, a: Update, b: Update, keys_a: np.ndarray, keys_b: np.ndarray) -> Found:
    """Values with the same key are held against each other by their bits; a key of one side alone differs."""
    both, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    unlike, lost = np.zeros(len(both), np.bool_), np.zeros(len(both), np.bool_)
    largest = 0.0
    for name in quantity.columns:
        x, y = a.columns[name][at_a], b.columns[name][at_b]
        if x.dtype != y.dtype:
            return Found(absent=f"column {name} is {x.dtype} in one run and {y.dtype} in the other")
        differs = _bits(x) != _bits(y)
        unlike |= differs
        if quantity.unit:
            lost |= np.isfinite(x) != np.isfinite(y)
            largest = max([largest, *_magnitudes(x[differs], y[differs]).tolist()])
    alone = np.setxor1d(keys_a, keys_b, assume_unique=True)
    if quantity.unit and len(alone):
        largest = math.inf
    distance = Distance(
        compared=len(both) + len(alone),
        differing=int(unlike.sum()) + len(alone),
        largest=largest if quantity.unit else None,
        unit=quantity.unit,
    )
    keys = np.sort(np.concatenate([both[unlike], alone]))
    if not len(keys):
        return Found(distance=distance)
    named = [_named(quantity, a, b, int(at[0]), keys_a, keys_b) if len(at) else None for at in (keys, both[lost])]
    return Found(distance=distance, first=named[0], lost=named[1])


def _named(quantity: Quantity, a: Update, b: Update, key: int, keys_a: np.ndarray, keys_b: np.ndarray) -> Difference:
    sample, position = key >> _TOKEN_BITS, key & ((1 << _TOKEN_BITS) - 1)
    at = [np.flatnonzero(keys == key)[:1] for keys in (keys_a, keys_b)]
    values = [_value(update, quantity.columns, rows) for update, rows in zip((a, b), at, strict=True)]
    magnitude = None
    if quantity.unit:
        (name,) = quantity.columns
        apart = _magnitudes(a.columns[name][at[0]], b.columns[name][at[1]]) if all(map(len, at)) else [math.inf]
        magnitude = float(apart[0])
    return Difference(
        update=a.update,
        phase=quantity.phase,
        a=values[0],
        b=values[1],
        sample=sample,
        group=sample // a.n,
        token=position if quantity.find is tokens else None,
        place=place(a, sample),
        magnitude=magnitude,
    )


def place(update: Update, sample: int) -> str | None:
    """Where the schedule of a run puts a sample; None where that is not on record."""
    at = np.flatnonzero(update.columns["global_index"] == sample)
    if not len(at) or any(name not in update.columns for name in PLACE):
        return None
    return str(_value(update, PLACE, at))


def _value(update: Update, columns: Sequence[str], rows: np.ndarray) -> Value:
    """That of the one row in ``rows``; None where there is none."""
    if not len(rows):
        return None
    if len(columns) == 1:
        return _plain(update.columns[columns[0]][rows[0]])
    return ", ".join(f"{name.replace('_', ' ')} {_plain(update.columns[name][rows[0]])}" for name in columns)


def _missing(columns: Sequence[str], a: Update, b: Update) -> str:
    for name in (*columns, "global_index", "lengths"):
        for update, which in ((a, "the first"), (b, "the second")):
            if name not in update.columns:
                return f"{which} run has no column {name} on record at update {update.update}"
    return ""


def _broken(columns: Sequence[str], a: Update, b: Update) -> str:
    """Why what is on record is not all of an update; empty where it is. Nothing compared would read as equal."""
    for update, which in ((a, "the first"), (b, "the second")):
        index, lengths = update.columns["global_index"], update.columns["lengths"]
        if not len(index) or len(index) != (len(index) if update.samples is None else update.samples):
            wanted = "" if update.samples is None else f" of {update.samples}"
            return f"{which} run has {len(index)}{wanted} samples on record at update {update.update}"
        for name in columns:
            rows = int(lengths.sum()) if name in RAGGED else len(index)
            if len(update.columns[name]) != rows:
                return (
                    f"{which} run has {len(update.columns[name])} values of column {name} on record at update "
                    f"{update.update}, which has {rows}"
                )
    return ""


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def _magnitudes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """float64 |x - y|; infinite where that is not a number."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(x.astype(np.float64) - y.astype(np.float64))
    return np.where(np.isnan(apart), np.inf, apart)


def _plain(value: Any) -> Value:
    """Hashes as 16 hex digits; float32 as the shortest text that gives it back, so that 0.1 reads as 0.1."""
    if isinstance(value, np.uint64):
        return f"{int(value):016x}"
    if isinstance(value, np.float32):
        return float(str(value))
    found: Value = value.item()
    return found


# One value an update -----------------------------------------------------------------------------------------------


def metric(name: str, apart: Callable[[float, float], float]) -> Finder:
    """A number of ``metrics.jsonl``, whose text keeps every bit; null stands for what is not finite."""

    def find(quantity: Quantity, a: Update, b: Update) -> Found:
        for update, which in ((a, "the first"), (b, "the second")):
            if name not in update.metrics:
                return Found(absent=f"{which} run has no metric {name} on record at update {update.update}")
        x, y = a.metrics[name], b.metrics[name]
        same = x == y and (not x or math.copysign(1, x) == math.copysign(1, y))
        largest = 0.0 if same else math.inf if x is None or y is None else apart(x, y)
        distance = Distance(compared=1, differing=int(not same), largest=largest, unit=quantity.unit)
        if same:
            unsaid = (
                f"not finite in either run at update {a.update}, which null stands for: see the hashes of gradients"
            )
            return Found(distance=distance, note=unsaid if x is None else "")
        first = Difference(update=a.update, phase=quantity.phase, a=_or_text(x), b=_or_text(y), magnitude=largest)
        return Found(distance=distance, first=first, lost=first if (x is None) != (y is None) else None)

    return find


def _or_text(value: float | None) -> float | str:
    return "not finite" if value is None else value


def absolute(x: float, y: float) -> float:
    return abs(x - y)


def symmetric(x: float, y: float) -> float:
    """2 |x - y| / (|x| + |y|)."""
    return 2 * abs(x - y) / (abs(x) + abs(y)) if x != y else 0.0


# Tensors -----------------------------------------------------------------------------------------------------------


def tensors(quantity: Quantity, a: Update, b: Update) -> Found:
    """One hash a tensor, ``hash.parameters`` and its like, by the names of ``raw/tensors.json``."""
    (column,) = quantity.columns
    kind = column.removeprefix("hash.")
    hashed: list[Mapping[str, int]] = []
    for update, which in ((a, "the first"), (b, "the second")):
        names = update.tensors.get(kind)
        if column not in update.columns or names is None:
            return Found(absent=f"{which} run has no hashes of its {kind} on record at update {update.update}")
        hashed.append(dict(zip(names, update.columns[column].tolist(), strict=True)))
    x, y = hashed
    if not x or not y:
        which = "second" if x else "first"
        return Found(absent=f"the {which} run has hashes of no {kind} at update {a.update}", broken=True)
    apart = [name for name in [*x, *(y.keys() - x.keys())] if x.get(name) != y.get(name)]
    distance = Distance(compared=len(x.keys() | y.keys()), differing=len(apart), unit=quantity.unit)
    if not apart:
        return Found(distance=distance)
    values = [f"{one[apart[0]]:016x}" if apart[0] in one else None for one in hashed]
    first = Difference(update=a.update, phase=quantity.phase, a=values[0], b=values[1], parameter=apart[0])
    return Found(distance=distance, first=first)
