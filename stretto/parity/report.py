"""What a check found, as records, and the report that says it: text for a terminal, Markdown, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stretto.observe.progress import duration
from stretto.parity import table
from stretto.parity.cells import Done
from stretto.parity.curves import PANELS, apart_text
from stretto.parity.plan import ACROSS, Comparison, Plan, Question, ranks_text
from stretto.parity.verdict import EXIT_FAILED, EXIT_UNDECIDABLE, Row, Verdict

REFERENCE_TITLE = "Gradients of the first partition (its last update) against float64"
PASSED_TEXT = {0: "passed", EXIT_FAILED: "FAILED", EXIT_UNDECIDABLE: "undecidable"}


@dataclass(frozen=True, kw_only=True)
class Compared:
    comparison: Comparison
    verdict: Verdict

    @property
    def unlike(self) -> bool:
        """Whether the two ran on another machine, or otherwise so that what should be exact is a mere distance."""
        return bool(self.verdict.topology) and not self.comparison.across

    @property
    def name(self) -> str:
        return f"{self.comparison.group}, {self.comparison.column}"

    @property
    def topology_text(self) -> str:
        return ", ".join(f"{name} {a} against {b}" for name, (a, b) in self.verdict.topology.items())


@dataclass(frozen=True, kw_only=True)
class Engaged:
    """What the events of a run say of a switch that is on in it; see ``switches.base.Evidence``."""

    cell: str
    switch: str
    ok: bool
    opportunity: bool
    facts: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether the run says nothing about the switch: it had work to do, and did none."""
        return self.opportunity and not self.ok

    @property
    def text(self) -> str:
        said = "DID NOT ENGAGE" if self.failed else "had nothing to do"
        if self.ok:
            said = "engaged" if self.opportunity else "engaged, nothing to do"
        return f"{self.cell}: {self.switch} {said}: {'; '.join(self.facts)}"


@dataclass(frozen=True, kw_only=True)
class Referenced:
    """Gradients of the last update of a replay's first partition against float64.

    largest     over tensors: largest difference over the largest absolute reference value of the tensor (``tensor``)
    relative    l2 norm of all differences over that of the reference
    bound       that ``relative`` must not pass: rounding of the dtype that the run computes in
    from_first  ``relative``, with the gradients on ``first_ranks`` ranks in place of the reference
    problem     why there is no distance, and the others are NaN; empty: there is one
    """

    ranks: int
    largest: float
    relative: float
    tensor: str
    bound: float
    first_ranks: int
    from_first: float
    problem: str = ""

    @property
    def failed(self) -> bool:
        return not self.relative <= self.bound  # NaN fails

    @property
    def text(self) -> str:
        if self.problem:
            return f"{ranks_text(self.ranks)}: FAILED, there is no distance: {self.problem}"
        return (
            f"{ranks_text(self.ranks)}: relative l2 distance {self.relative:.3g} (at most {self.bound:g}: "
            f"{'FAILED' if self.failed else 'passed'}), largest of one tensor {self.largest:.3g} in {self.tensor}"
            + (
                f"; from those on {ranks_text(self.first_ranks)} {self.from_first:.3g}"
                if self.ranks != self.first_ranks
                else ""
            )
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a check found.

    facts           of the baseline's manifest that a reader needs: model, machine, versions, commit
    reference_note  why there is no float64 reference; empty: there is
    curves          metric -> how far the live runs are apart; None: not drawn
    """

    question: Question
    plan: Plan
    facts: Mapping[str, str]
    done: tuple[Done, ...]
    compared: tuple[Compared, ...]
    engaged: tuple[Engaged, ...]
    referenced: tuple[Referenced, ...]
    reference_note: str
    curves: Mapping[str, float] | None

    @property
    def exit_code(self) -> int:
        """1: a row failed, two runs were not made alike, a switch did not engage, or a gradient is far from float64;
        3: none of it, but a row is undecidable; else 0.
        """
        codes = {each.verdict.exit_code for each in self.compared}
        others = any(each.unlike for each in self.compared) or any(each.failed for each in self.engaged)
        if EXIT_FAILED in codes or others or any(each.failed for each in self.referenced):
            return EXIT_FAILED
        return max(codes, default=0)

    @property
    def headline(self) -> str:
        rows = [row for each in self.compared for row in each.verdict.rows]
        counts = [
            f"{sum(row.status == status for row in rows)} {word}"
            for status, word in (
                ("exact", "exact"),
                ("within", "within a declared tolerance"),
                ("distance", "reported as distances"),
                ("undecidable", "undecidable"),
                ("differs", "differ"),
                ("absent", "absent"),
            )
            if any(row.status == status for row in rows)
        ]
        unlike = sum(each.unlike for each in self.compared)
        counts += [f"{unlike} pairs of runs were not made alike"] if unlike else []
        off = sum(each.failed for each in self.engaged)
        counts += [f"{off} switches did not engage"] if off else []
        far = sum(each.failed for each in self.referenced)
        counts += [f"gradients of {far} replays are far from float64, or cannot be held against it"] if far else []
        return f"parity {PASSED_TEXT[self.exit_code]}: of {len(rows)} rows {', '.join(counts)}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        asked = asdict(self.question) | {"out": str(self.question.out)}
        return {
            "format": 1,
            "exit_code": self.exit_code,
            "headline": self.headline,
            "command": self.question.command,
            "question": asked,
            "facts": dict(self.facts),
            "runs": [
                {
                    "name": each.cell.name,
                    "run_dir": str(each.cell.run_dir),
                    "command": each.cell.command,
                    "wall_s": each.wall_s,
                    "kept": each.kept,
                }
                for each in self.done
            ],
            "comparisons": [
                {
                    "group": each.comparison.group,
                    "column": each.comparison.column,
                    "unlike": each.unlike,
                    **each.verdict.plain(),
                }
                for each in self.compared
            ],
            "engaged": [asdict(each) | {"failed": each.failed} for each in self.engaged],
            "reference": [asdict(each) | {"failed": each.failed} for each in self.referenced],
            "reference_note": self.reference_note,
            "curves": dict(self.curves) if self.curves is not None else None,
        }


@dataclass(frozen=True)
class Grid:
    """A table of words: ``head`` and rows of equally many cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Aligned columns; those that do not fit into a line go on below, beside the first column again."""
        widths = [max(len(row[i]) for row in (self.head, *self.rows)) for i in range(len(self.head))]
        blocks: list[list[int]] = [[0]]
        for i in range(1, len(widths)):
            if len(blocks[-1]) > 1 and sum(widths[j] + 2 for j in (*blocks[-1], i)) - 2 > table.WIDTH:
                blocks.append([0])
            blocks[-1].append(i)
        lines = (self.head, ["-" * width for width in widths], *self.rows)
        return "\n\n".join(
            "\n".join("  ".join(f"{line[i]:<{widths[i]}}" for i in block).rstrip() for line in lines)
            for block in blocks
        )

    def markdown(self) -> str:
        lines = (self.head, ["---"] * len(self.head), *self.rows)
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def cell_text(row: Row) -> str:
    """One row of one verdict in a word or two."""
    distance = row.distance
    if row.status in ("exact", "absent"):
        return row.status
    far = f"{distance.differing} of {distance.compared}"
    if distance.largest is not None:
        far = "unlike" if math.isinf(distance.largest) else f"{distance.largest:.2g}"
    word = {"within": "within", "distance": "", "differs": "DIFFERS", "undecidable": "undecidable"}[row.status]
    return f"{word} {far}".strip()


def grids(report: Report) -> dict[str, Grid]:
    """A table for each group of runs: quantities down, runs across."""
    groups: dict[str, list[Compared]] = {}
    for each in report.compared:
        groups.setdefault(each.comparison.group, []).append(each)
    found = {}
    for group, columns in groups.items():
        quantities = dict.fromkeys(row.quantity for each in columns for row in each.verdict.rows)
        head = ["quantity", *(each.comparison.column for each in columns)]
        rows = [[quantity, *(_cell(each.verdict, quantity) for each in columns)] for quantity in quantities]
        found[group] = Grid(head, rows)
    return found


def _cell(verdict: Verdict, quantity: str) -> str:
    return next((cell_text(row) for row in verdict.rows if row.quantity == quantity), "")


def failures(report: Report) -> list[str]:
    """A line for each thing that failed or cannot be decided, the first divergence of each pair of runs first."""
    lines = []
    for each in report.compared:
        verdict = each.verdict
        if each.unlike:
            lines.append(f"{each.name}: not made alike, so that nothing is shown: {each.topology_text}")
        first = verdict.first
        rows = sorted((*verdict.failed, *verdict.undecidable), key=lambda row: row is not first)
        for row in rows:
            lines.append(f"{each.name}: {table.explain(row)}")
    lines += [each.text for each in report.engaged if each.failed]
    lines += [f"gradients against float64, {each.text}" for each in report.referenced if each.failed]
    return lines


def terms_of(group: str, report: Report) -> list[str]:
    """A line for each thing in which runs of a group are unlike, and for each reason why less than equal bits is
    required of them.
    """
    lines = []
    for each in report.compared:
        if each.comparison.group == group:
            told = [f"not alike in {each.topology_text}"] if each.verdict.topology else []
            lines += [f"{each.comparison.column}: {text}" for text in (*told, *each.verdict.notes)]
    return lines


def title(group: str, report: Report) -> str:
    if group == ACROSS:
        return "Across numbers of ranks (replays of B): how far apart"
    columns = [each for each in report.compared if each.comparison.group == group]
    partitions = max(each.verdict.updates for each in columns)  # a comparison looks at each once, after its last update
    return f"{group[0].upper()}{group[1:]}: B and each other run, {partitions} partitions"


def text(report: Report) -> str:
    """What the command prints last: tables, what failed, and the verdict."""
    parts = [f"{title(group, report)}\n\n{grid.text()}" for group, grid in grids(report).items()]
    if report.referenced or report.reference_note:
        lines = [each.text for each in report.referenced] or [report.reference_note]
        parts.append("\n".join([REFERENCE_TITLE, "", *lines]))
    if wrong := failures(report):
        parts.append("\n".join(["What failed", "", *wrong]))
    parts.append(report.headline)
    return "\n\n".join(parts)


def _counted(report: Report) -> list[str]:
    """What "update" means in a row, where a partition takes several."""
    partitions, updates = report.plan.cells[0].partitions, report.question.updates
    if partitions == updates:
        return []
    return [
        f"A partition takes {updates // partitions} updates. Rows hold the state after the last of them, and an "
        '"update" that a line names is a partition.',
        "",
    ]


def markdown(report: Report) -> str:
    """``report.md``: reads on its own, beside ``curves.png``."""
    question = report.question
    lines = [
        f"# Parity of {question.recipe}",
        "",
        f"**{report.headline}**",
        "",
        f"Conditions {', '.join(question.conditions)}, each trained live for {question.updates} updates, and "
        f"{question.record_partitions} recorded partitions (rollout batches) replayed under each of them on "
        f"{', '.join(ranks_text(ranks) for ranks in question.ranks)}. B was run twice in each place: where these two "
        "differ, a row is undecidable. Every run is a process of its own.",
        "",
        "This holds for this recipe, these updates and one machine of this kind; it says nothing about speed.",
        "",
        *_counted(report),
        *(f"- {name}: {value}" for name, value in report.facts.items()),
        "",
    ]
    if wrong := failures(report):
        lines += ["## What failed", "", *(f"- {line}" for line in wrong), ""]
        lines += ["docs/parity.md says how to read such a line, and how to go on from it.", ""]
    for group, grid in grids(report).items():
        lines += [f"## {title(group, report)}", "", grid.markdown(), ""]
        if told := terms_of(group, report):
            lines += [*(f"- {line}" for line in told), ""]
    lines += [f"## {REFERENCE_TITLE}", ""]
    lines += [f"- {each.text}" for each in report.referenced] or [report.reference_note]
    lines += ["", "## Curves", ""]
    if report.curves is None:
        lines += ["Not drawn.", ""]
    else:
        lines += ["![Curves of all live runs](curves.png)", ""]
        lines += [f"- {label}: {apart_text(report.curves[metric])}" for metric, label in PANELS]
        lines += [""]
    lines += ["## What shows that the switches were at work", "", *(f"- {each.text}" for each in report.engaged), ""]
    lines += ["## Runs", ""]
    runs = [[each.cell.name, duration(each.wall_s), f"`{each.cell.run_dir}`"] for each in report.done]
    lines += [Grid(["run", "took", "folder"], runs).markdown(), ""]
    lines += ["## To repeat it", "", "```", report.question.command, "```", "", "Run by run:", "", "```"]
    lines += [each.cell.command for each in report.done]
    lines += ["", *(each.comparison.command for each in report.compared if each.comparison.partitions is None), "```"]
    return "\n".join(lines) + "\n"
