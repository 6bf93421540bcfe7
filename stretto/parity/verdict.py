"""What a comparison of two runs says, as plain records; ``table.py`` prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stretto.types import StrettoError

Phase = Literal["inputs", "phase 1", "phase 2", "phase 3", "parameters"]
PHASES: tuple[Phase, ...] = ("inputs", "phase 1", "phase 2", "phase 3", "parameters")
Status = Literal["exact", "within", "differs", "undecidable", "distance", "absent"]
"""exact        not a bit differs
within       differs by no more than the switches on declare
differs      differs where it must not
undecidable  the control pair, which is one condition run twice, differs itself; or nothing is promised of the numbers
             ("fast"), and they are farther apart than in the control pair
distance     may differ; the row says by how much
absent       not on record in one of the runs, so that nothing is shown: a failure
"""
FAILED: tuple[Status, ...] = ("differs", "absent")
Value = int | float | str | None
EXIT_FAILED, EXIT_UNDECIDABLE = 1, 3


class Incomparable(StrettoError):
    """Two runs that a comparison would say nothing about; the message names every reason, with both values."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first value of a quantity that differs.

    update     as in the names of files in ``raw/``, from 0
    sample     ``global_index``; None where no sample can be named
    group      the prompt group of that sample
    token      position in its response, from 0
    place      where the schedule of the first run puts the sample: ``chunk 0, rank 0, microbatch 3, row 1``
    parameter  name of the tensor
    a, b       the values of both runs; hashes and ids as text or integers; None: this run has no such entry
    magnitude  abs(a - b), or the symmetric relative difference of gradient norms; None where values are no numbers
    """

    update: int
    phase: Phase
    a: Value
    b: Value
    sample: int | None = None
    group: int | None = None
    token: int | None = None
    place: str | None = None
    parameter: str | None = None
    magnitude: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two runs are apart in one quantity: ``differing`` of ``compared`` values, over all updates.

    ``largest`` is the largest ``unit`` (``max abs``, ``relative``; empty: values are no numbers, and ``largest`` None).
    A NaN on one side alone counts as infinitely far.
    """

    compared: int
    differing: int
    largest: float | None = None
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of the table.

    required  ``exact``, ``<= 1e-06``, ``distance``, or two of them, by update: ``exact to update 1, then distance``
    distance  over the updates at which something is required, or over all where nothing is
    later     over the other updates, where only some of them must agree
    first     the first difference that decides the status; None where there is none
    control   how far the control pair is apart, over the updates of ``distance``; None without a control run
    note      why the row is absent, and other things to know
    """

    quantity: str
    phase: Phase
    required: str
    status: Status
    distance: Distance
    later: Distance | None = None
    first: Difference | None = None
    control: Distance | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.status in FAILED


@dataclass(frozen=True, kw_only=True)
class RunName:
    """A run in a verdict: its folder, its condition (``P+R``), and whether it trained on a recording."""

    path: str
    condition: str
    replay: bool


CAUSES = ("prompt tokens", "multimodal tensors", "policy versions")
"""What the rest of the inputs follows from."""


def _order(row: Row) -> tuple[float, ...]:
    """What comes before what: by update and phase; within the inputs what was given to the engine comes before what it
    made of that, and what it made in order of sample and token.
    """
    first = row.first
    assert first is not None
    place: tuple[float, ...] = ()
    if row.phase == "inputs":
        sample = -1 if row.quantity in CAUSES or first.sample is None else first.sample
        place = (sample, math.inf if first.token is None else first.token)
    return (first.update, PHASES.index(row.phase), *place)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The table of two runs, ``rows`` in the order of docs/parity.md.

    updates    that were compared, from update 0 on
    topology   what shapes arithmetic and differs: name -> values of both runs; empty: one topology
    notes      why something else than equal bits is required, where it is not the topology; runs that did not finish
    """

    a: RunName
    b: RunName
    control: RunName | None
    updates: int
    topology: Mapping[str, tuple[Any, Any]]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Row | None:
        """The row of the first divergence, in order of update and phase: of rows that differ where they must not; or
        else the first row that is absent; or else of those that are undecidable; or else of those that differ at all.
        """
        for statuses in (("differs",), ("absent",), ("undecidable",), ("within", "distance")):
            if statuses == ("absent",) and (absent := [row for row in self.rows if row.status == "absent"]):
                return absent[0]
            found = [row for row in self.rows if row.first is not None and row.status in statuses]
            if found:
                return min(found, key=_order)
        return None

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.failed)

    @property
    def undecidable(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.status == "undecidable")

    @property
    def exit_code(self) -> int:
        """0: every row passes; 1: one failed; 3: none failed, but one is undecidable."""
        return EXIT_FAILED if self.failed else EXIT_UNDECIDABLE if self.undecidable else 0

    def __getitem__(self, quantity: str) -> Row:
        for row in self.rows:
            if row.quantity == quantity:
                return row
        raise KeyError(quantity)

    def plain(self) -> dict[str, Any]:
        """For JSON: the fields, ``exit_code``, and ``first``, the quantity of the first divergence."""
        first = self.first
        return asdict(self) | {"first": first.quantity if first else None, "exit_code": self.exit_code}
