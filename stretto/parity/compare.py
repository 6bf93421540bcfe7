"""Holds two run folders against each other, quantity by quantity, and names the first thing that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stretto.observe.dump import GRADIENTS, PARAMETERS, read_dump
from stretto.parity.folder import RunFolder, Update
from stretto.parity.quantities import QUANTITIES
from stretto.parity.rows import Found, Origin, Quantity
from stretto.parity.terms import Terms, require_comparable, terms, topology, unfinished
from stretto.parity.verdict import Difference, Distance, Incomparable, Row, Status, Verdict
from stretto.types import StrettoError


def compare(a: Path | str, b: Path | str, control: Path | str | None = None, *, updates: int | None = None) -> Verdict:
    """The table of runs ``a`` and ``b``. Reads their folders alone, and writes nothing.

    ``control``: a second run of the very condition and topology of ``a``; where it differs from ``a``, the row of ``b``
    is undecidable. ``updates``: compare so many from update 0 on, where runs are of different length or did not finish;
    None: all.

    Raises:
        Incomparable: runs of other model, data, seed, options that decide numbers, or length; one run twice; runs that
            did not finish, unless ``updates`` says how much of them counts.
        StrettoError: a folder holds no run, or one that cannot be read.
    """
    one, other = RunFolder(a), RunFolder(b)
    require_another(a, b)
    if control is not None:
        require_another(a, control)
    count = require_comparable(one, other, updates)
    twin = None if control is None else RunFolder(control)
    if twin is not None:
        _require_control(one, twin, count, whole=updates is None)
    agreed = terms(one, other, count)
    found: list[list[_At]] = [[] for _ in QUANTITIES]
    for k in range(count):
        x, y, z = one.update(k), other.update(k), twin.update(k) if twin is not None else None
        version = _newest_version(x)
        for quantity, ats in zip(QUANTITIES, found, strict=True):
            allowed = agreed.tolerance(quantity.origin, k, version)
            ats.append(_At(allowed, quantity.between(x, y), quantity.between(x, z) if z is not None else None))
    apart = topology(one, other)
    far = dumped(one, other, count) if apart else ()
    return Verdict(
        a=one.name,
        b=other.name,
        control=twin.name if twin is not None else None,
        updates=count,
        topology=apart,
        rows=tuple(_row(quantity, ats, agreed) for quantity, ats in zip(QUANTITIES, found, strict=True)),
        notes=(*_notes(agreed, [one, other] + ([twin] if twin is not None else [])), *far),
    )


def require_another(a: Path | str, b: Path | str) -> None:
    """Raises Incomparable where both name one folder: a run held against itself shows nothing."""
    if Path(a).exists() and Path(b).exists() and Path(a).samefile(b):
        raise Incomparable(f"{a} and {b} are one folder: a run is equal to itself; name two runs")


def _require_control(a: RunFolder, control: RunFolder, updates: int, *, whole: bool) -> None:
    """Raises Incomparable where ``control`` is no second run of what ``a`` ran."""
    require_comparable(a, control, updates)
    if whole and (reason := unfinished(control)):
        raise Incomparable(reason)
    apart = topology(a, control)
    if a.condition != control.condition:
        apart["condition"] = (a.condition, control.condition)
    if a.replay != control.replay:
        apart["replay"] = (a.replay, control.replay)
    if apart:
        told = ", ".join(f"{name} {x} against {y}" for name, (x, y) in apart.items())
        raise Incomparable(f"{control.path} is no control of {a.path}, which it must repeat: {told}")


def _newest_version(update: Update) -> int:
    versions = update.columns.get("version_end")
    return 0 if versions is None or not len(versions) else int(versions.max())


def _notes(agreed: Terms, runs: Sequence[RunFolder]) -> tuple[str, ...]:
    return (*agreed.notes, *filter(None, map(unfinished, runs)))


def dumped(a: RunFolder, b: RunFolder, updates: int) -> Iterator[str]:
    """How far apart what both have dumped is, which hashes cannot say: a line for each update of both dumps."""
    for k in range(updates):
        if not all(any((run.path / "dump").glob(f"update_{k:06d}-rank-*")) for run in (a, b)):
            continue
        try:
            x, y = read_dump(a.path, k), read_dump(b.path, k)
        except StrettoError as error:
            yield str(error)
            continue
        if {(name, tensor.shape) for name, tensor in x.items()} != {(name, tensor.shape) for name, tensor in y.items()}:
            yield f"dumps of update {k}: of other tensors"
            continue
        far = [f"{kind[:-1]} {relative_l2(x, y, kind):.3g}" for kind in (GRADIENTS, PARAMETERS)]
        yield f"dumps of update {k}: relative l2 distance of {', of '.join(far)}"


def relative_l2(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], kind: str) -> float:
    """|b - a| / |a| over all tensors whose names begin with ``kind``, in float64."""
    names = [name for name in a if name.startswith(kind)]
    apart = sum(float(np.sum(np.square(b[name].astype(np.float64) - a[name]))) for name in names)
    size = sum(float(np.sum(np.square(a[name].astype(np.float64)))) for name in names)
    return math.sqrt(apart / size) if size else math.inf if apart else 0.0


@dataclass(frozen=True)
class _At:
    """One quantity at one update: how far it may differ, and how far the runs and the control pair are apart."""

    allowed: float
    found: Found
    control: Found | None


def _row(quantity: Quantity, ats: Sequence[_At], agreed: Terms) -> Row:
    """The verdict over all updates. Updates that must agree decide; the others are told besides."""
    bound = [k for k, at in enumerate(ats) if at.allowed < math.inf]
    free = [k for k in range(len(ats)) if k not in set(bound)]
    decisive = bound or free
    absent = _absent(ats)
    if not absent and quantity.origin in ("log-probs", "training"):
        absent = agreed.undeclared
    lost = free if quantity.origin in COMPUTED else []
    status, deciding = _status(ats, bound, free, lost) if not absent else ("absent", [])
    far = agreed.measured and status == "distance" and beyond_control(ats, free)
    controls = [at.control for at in ats if at.control is not None]
    later = total([ats[k].found for k in free]) if bound and free else None
    return Row(
        quantity=quantity.name,
        phase=quantity.phase,
        required=_required(ats),
        status="undecidable" if far else status,
        distance=total([ats[k].found for k in decisive]),
        later=later,
        first=next(filter(None, deciding), None),
        control=total([controls[k] for k in decisive]) if controls else None,
        note="farther apart than the control pair"
        if far
        else absent or next((n for at in ats if (n := at.found.note)), ""),
    )


def _absent(ats: Sequence[_At]) -> str:
    for at in ats:
        if at.found.absent:
            return at.found.absent
        if at.control is not None and at.control.absent:
            return f"control pair: {at.control.absent}"
    return ""


Firsts = Sequence[Difference | None]
COMPUTED: tuple[Origin, ...] = ("log-probs", "training", "norm", "trained")
"""What the actor computes: at any distance, it is finite in both runs or in none."""


def _status(
    ats: Sequence[_At], bound: Sequence[int], free: Sequence[int], lost: Sequence[int]
) -> tuple[Status, Firsts]:
    """And the first difference of each update that decides. ``lost``: the free ones where what is finite in one run
    alone counts.
    """
    if any(_differs(ats[k].control) for k in bound):
        return "undecidable", _firsts(ats, bound)
    over = [k for k in bound if not _allowed(ats[k])]
    if over:
        return "differs", _firsts(ats, over)
    if found := [difference for k in lost if (difference := ats[k].found.lost) is not None]:
        control = any(at.control is not None and at.control.lost is not None for at in (ats[k] for k in lost))
        return "undecidable" if control else "differs", found
    if any(_differs(ats[k].found) for k in bound):
        return "within", _firsts(ats, bound)
    if any(_differs(ats[k].found) for k in free):
        return "distance", _firsts(ats, free)
    return "exact", []


def beyond_control(ats: Sequence[_At], updates: Sequence[int]) -> bool:
    """Whether these updates are farther apart than in the control pair. Without one there is no measure: False."""
    controls = [control for k in updates if (control := ats[k].control) is not None]
    if not controls:
        return False
    far, near = total([ats[k].found for k in updates]), total(controls)
    if far.largest is None or near.largest is None:
        return far.differing > near.differing
    return far.largest > near.largest or (far.differing > 0 and not near.differing)


def _firsts(ats: Sequence[_At], updates: Sequence[int]) -> Firsts:
    return [ats[k].found.first for k in updates]


def _differs(found: Found | None) -> bool:
    return found is not None and found.distance.differing > 0


def _allowed(at: _At) -> bool:
    distance = at.found.distance
    return not distance.differing or (
        at.allowed > 0 and distance.largest is not None and distance.largest <= at.allowed
    )


def total(founds: Sequence[Found]) -> Distance:
    """Over updates: counts add up, of the largest the largest."""
    distances = [found.distance for found in founds]
    largest = [d.largest for d in distances if d.largest is not None]
    return Distance(
        compared=sum(d.compared for d in distances),
        differing=sum(d.differing for d in distances),
        largest=max(largest) if largest else None,
        unit=distances[0].unit if distances else "",
    )


def _required(ats: Sequence[_At]) -> str:
    """Runs of updates with one requirement, in words: ``exact``, or ``exact to update 1, then distance``."""
    parts: list[tuple[str, int]] = []
    for k, at in enumerate(ats):
        word = "exact" if at.allowed == 0 else "distance" if at.allowed == math.inf else f"<= {at.allowed:g}"
        if parts and parts[-1][0] == word:
            parts[-1] = (word, k)
        else:
            parts.append((word, k))
    if len(parts) == 1:
        return parts[0][0]
    return ", then ".join([f"{word} to update {last}" for word, last in parts[:-1]] + [parts[-1][0]])
