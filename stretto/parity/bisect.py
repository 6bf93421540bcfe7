"""Finds the elements of gradients and parameters in which two runs differ, by running both again to that update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.observe.dump import read_dump
from stretto.parity.folder import RunFolder
from stretto.parity.rerun import refusals, start
from stretto.parity.table import explain, wrapped
from stretto.parity.verdict import Verdict
from stretto.types import StrettoError

BISECTED = ("gradients", "parameters")
"""What a dump holds."""
OPTIMIZER = "optimizer state"
SHOWN = 10
"""Tensors that are printed one by one."""


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """``differing`` of the elements of a tensor differ in their bits; ``index``, ``a`` and ``b`` are of the first of
    them in row-major order, ``largest`` is the largest abs(a - b).
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    differing: int
    index: tuple[int, ...]
    a: float
    b: float
    largest: float

    def told(self) -> str:
        size = int(np.prod(self.shape, dtype=np.int64))
        return (
            f"{self.kind} {self.name} {list(self.shape)}: {self.differing:,} of {size:,} elements differ, the first at "
            f"{list(self.index)}: {self.a!r} against {self.b!r}; max abs {self.largest:.6g}"
        )


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """What both runs hold after ``update``, run again.

    tensors   those that differ: gradients first, by name
    compared  tensors that were held against each other
    astray    where a run that was run again parted from what it is on record to have done, one line each: what differs
              is then no consequence of its options
    """

    update: int
    compared: int
    tensors: tuple[TensorDifference, ...]
    astray: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """A line a tensor, up to ``SHOWN`` of them."""
        lines = [
            f"run again to update {self.update}: {len(self.tensors)} of {self.compared} tensors differ",
            *(line for tensor in self.tensors[:SHOWN] for line in wrapped(f"  {tensor.told()}", "    ")),
        ]
        if len(self.tensors) > SHOWN:
            lines.append(f"  and {len(self.tensors) - SHOWN} more")
        return "\n".join(lines + [line for text in self.astray for line in wrapped(text, "  ")])


def first_update(verdict: Verdict) -> int | None:
    """The first at which gradients or parameters differ; None where they do not."""
    rows = [verdict[name] for name in BISECTED]
    return min((row.first.update for row in rows if row.first is not None), default=None)


def nothing(verdict: Verdict) -> str:
    """Why there is no update to run again to, where ``first_update`` is None."""
    absent = [row for row in verdict.rows if row.quantity in (*BISECTED, OPTIMIZER) and row.status == "absent"]
    if absent:
        return "nothing to bisect by: " + "; ".join(f"{row.quantity} absent: {row.note}" for row in absent)
    optimizer = verdict[OPTIMIZER]
    if optimizer.first is not None:
        return f"nothing to bisect: only the optimizer's state differs, which dumps do not hold; {explain(optimizer)}"
    return "nothing to bisect: gradients, parameters and optimizer state are equal"


def bisect(verdict: Verdict, folder: Path, note: Callable[[str], None] = print) -> Bisection | None:
    """Runs both runs of ``verdict`` again, in ``folder/a`` and ``folder/b``, to the first update at which they differ
    in ``BISECTED``, and compares what they hold then. None where they differ in none of it.

    Raises:
        StrettoError: a run cannot be repeated, or ``folder`` is not new; nothing has run then. Or a run failed.
    """
    update = first_update(verdict)
    if update is None:
        return None
    runs = {"a": RunFolder(verdict.a.path), "b": RunFolder(verdict.b.path)}
    reasons = [reason for run in runs.values() for reason in refusals(run)]
    if folder.exists():
        reasons.append(f"{folder} exists: runs go to a new folder; remove it, or choose another --out")
    if reasons:
        raise StrettoError("no bisection:\n" + "\n".join(f"- {reason}" for reason in reasons))
    for name, run in runs.items():
        note(f"running {run.path} again to update {update}, in {folder / name}")
        start(run, folder / name, update)
    dumps = [read_dump(folder / name, update) for name in runs]
    return Bisection(
        update=update,
        compared=len(dumps[0].keys() | dumps[1].keys()),
        tensors=tuple(differences(*dumps)),
        astray=tuple(line for name, run in runs.items() for line in astray(run, RunFolder(folder / name))),
    )


def astray(run: RunFolder, again: RunFolder) -> list[str]:
    """Where the repetition of a run first parts from it, by fingerprints; empty where it does not."""
    for k in range(again.updates):
        was, now = run.prints(k), again.prints(k)
        if apart := sorted(name for name in was.keys() & now.keys() if was[name] != now[name]):
            return [
                f"{run.path} does not repeat: at update {k} another {', '.join(apart)}; what differs there is no "
                "consequence of its options: look for the machine, its load, or data, model or code that have changed"
            ]
    return []


def differences(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[TensorDifference]:
    """Of two dumps: each tensor that differs in its bits. Raises StrettoError where they hold other tensors."""
    shapes = [{name: tensor.shape for name, tensor in dump.items()} for dump in (a, b)]
    if odd := sorted(name for name, _ in shapes[0].items() ^ shapes[1].items()):
        raise StrettoError(f"the dumps hold other tensors, {odd[0]!r} for one: the runs have trained other models")
    found = [_difference(name, a[name], b[name]) for name in sorted(a)]
    return [difference for difference in found if difference is not None]


def _difference(name: str, a: np.ndarray, b: np.ndarray) -> TensorDifference | None:
    bits = [np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    unlike = np.flatnonzero(bits[0] != bits[1])
    if not len(unlike):
        return None
    x, y = a.reshape(-1)[unlike], b.reshape(-1)[unlike]
    apart = np.abs(x.astype(np.float64) - y.astype(np.float64))
    kind, _, tensor = name.partition(".")
    return TensorDifference(
        kind=kind,
        name=tensor,
        shape=a.shape,
        differing=len(unlike),
        index=_index(int(unlike[0]), a.shape),
        a=float(str(x[0])),
        b=float(str(y[0])),
        largest=float(np.where(np.isnan(apart), np.inf, apart).max()),
    )


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, tuple(shape)))
