"""The end of a report: guardrails, what was rejected, where the numbers come from, and how to repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from stretto.bench.arithmetic import LEVEL
from stretto.bench.campaign import Attempt
from stretto.bench.document import PROSE, Block, Bullets, Code, Details, Paragraph, Section, Table
from stretto.bench.phrases import plural
from stretto.bench.results import NOT_MEASURED, Analysis

RECOMPUTE = """\
import csv, math, statistics

rows = [row for row in csv.DictReader(open("steps.csv")) if row["status"] == "accepted" and row["measured"] == "1"]
runs, logs = {}, {}
for row in rows:
    runs.setdefault((int(row["block"]), row["condition"], row["cell"]), []).append(row)
for (block, condition, cell), steps in sorted(runs.items()):
    rate = sum(float(row["tokens"]) for row in steps) / sum(float(row["step_s"]) for row in steps)
    logs.setdefault((block, condition), []).append(math.log(rate))
    print(f"{cell}: {rate:.4f} tokens/s")
logs = {key: statistics.fmean(values) for key, values in logs.items() if key[1] != "B" or len(values) == B_PER_BLOCK}
percent = lambda log: f"{100 * math.expm1(log):+.4f} %"
for treated, base in CONTRASTS:
    each = [log - logs[block, base] for (block, name), log in sorted(logs.items())
            if name == treated and (block, base) in logs]
    if each:
        mean, half = statistics.fmean(each), math.inf
        if len(each) > 1:
            half = T[len(each) - 1] * statistics.stdev(each) / math.sqrt(len(each))
        ends = f"{percent(mean - half)} to {percent(mean + half)}" if math.isfinite(half) else "none"
        print(f"{treated} over {base}: {percent(mean)}, interval {ends}")
"""
"""Program that a report shows: throughput and every effect from steps.csv, with Python's standard library alone."""


def guardrails(analysis: Analysis) -> Section:
    """A matrix first, and the figures behind it."""
    title = "Guardrails"
    found = {name: rows for name, rows in analysis.guardrails.items() if rows}
    if not found:
        return Section("guardrails", title, [Paragraph(f"Guardrails: {NOT_MEASURED}.")])
    names = list(dict.fromkeys(row.name for rows in found.values() for row in rows))
    by_name = {condition: {row.name: row for row in rows} for condition, rows in found.items()}
    matrix = Table(
        caption="What a condition must keep against B, however fast it is. One that fails decides the verdict on every "
        "contrast with that condition",
        head=("condition", *names),
        rows=[
            (condition, *(rows[name].status if name in rows else NOT_MEASURED for name in names))
            for condition, rows in by_name.items()
        ],
        cards=True,
    )
    failed = [
        f"{condition}: **{row.name} failed**: {row.told}"
        for condition, rows in found.items()
        for row in rows
        if row.status == "failed"
    ]
    figures = Table(
        caption="",
        head=("condition", "guardrail", "status", "figures and bound"),
        rows=[(condition, row.name, row.status, row.told) for condition, rows in found.items() for row in rows],
        words=frozenset({1, 2, 3}),
        cards=True,
    )
    blocks: list[Block] = [matrix, *([Bullets(failed)] if failed else [])]
    return Section("guardrails", title, [*blocks, Details("Figures and bounds", [figures])])


def rejected(analysis: Analysis) -> Section:
    """Every attempt that no figure comes from, with all that was wrong with it."""
    rows = [
        (f"{cell.name}, attempt {cell.attempt}", cell.status, "\n".join(cell.reasons) or "no reason recorded")
        for cell in analysis.cells
        if cell.status != "accepted"
    ]
    title = "Rejected and excluded attempts"
    gone: list[Block] = []
    if analysis.removed:
        told = (
            "The campaign's folders are not as its journal has them. Nobody can say any more what an attempt showed "
            "that is gone, or was changed after it ended:"
        )
        gone = [Paragraph(told, "warning"), Bullets(analysis.removed)]
    if not rows:
        kept = f"None{' that is there' if gone else ''}: all {plural(len(analysis.cells), 'attempt')} were accepted."
        return Section("rejected", title, [*gone, Paragraph(kept)])
    table = Table(
        caption="Decided before any figure was computed. Their steps are in steps.csv, as far as they could be read",
        head=("attempt", "status", "reasons"),
        rows=rows,
        words=frozenset({1, 2}),
        cards=True,
    )
    return Section("rejected", title, [*gone, table])


FOLDED = {
    "config": "Every option of the first accepted run",
    "determinism": "What each process found and set",
    "environment": "Environment variables",
}
"""Parts of the provenance that only some readers need."""


def provenance(analysis: Analysis) -> Section:
    """``commands`` have a place of their own, see ``repeat``."""
    told = {key: value for key, value in analysis.provenance.items() if key not in ("commands", "plan_sha256", *FOLDED)}
    blocks: list[Block] = [_facts({"plan_sha256": analysis.plan_sha256, **told})]
    for key, title in FOLDED.items():
        if analysis.provenance.get(key):
            blocks.append(Details(title, [_facts(analysis.provenance[key])]))
    plan = Details("The plan, as it was written before any run", [Code(analysis.plan.text.strip(), "toml")])
    return Section("provenance", "Where the numbers come from", [*blocks, plan])


def _facts(value: Any) -> Table:
    rows = [(key, words or "none") for key, words in flat(value)]
    return Table(caption="", head=("what", "value"), rows=rows, words=frozenset({1}))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and words of nested tables; lists of plain values are one row."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):  # the rows of a table
                yield f"{name}.{index}", ", ".join(f"{key} {words}" for key, words in flat(item))
        elif any(isinstance(item, Mapping | list | tuple) for item in value):
            for index, item in enumerate(value):
                yield from flat(item, f"{name}.{index}")
        else:
            yield name, ", ".join(_word(item) for item in value)
    else:
        yield name, _word(value)


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def repeat(analysis: Analysis, campaign: Path, attempts: Sequence[Attempt], recipe: str | None) -> Section:
    """Commands, and the program that recomputes what matters from the CSV. ``recipe``: its text; None: not at hand."""
    files = Bullets(
        [
            "`steps.csv`: every update of every attempt, warm-up and rejected ones too; `measured` is 1 in the windows",
            "`runs.csv`: every attempt, with its status, throughput, phases, hardware, command line, and the SHA-256 "
            "of the manifest, the metrics and the events that it left",
            "`alone.csv`: every measured update of every stage with the others idle; their means are the limits above",
            "`report.json`: this page's numbers as data; `report.md`: the page as text; `figures/`: its drawings",
            f"`{analysis.plan_sha256}.plan.toml`: the plan; its SHA-256 is its name",
            "`SHA256SUMS`: `sha256sum -c SHA256SUMS` checks all of them",
        ]
    )
    words = " ".join(("git checkout", str(commit))) if (commit := _commit(analysis.provenance)) else ""
    plan, folder = f"{analysis.plan_sha256}.plan.toml", shlex.quote(str(campaign))
    commands = [words, f"stretto bench run {plan} --out {folder}", f"stretto bench report {folder}"]
    blocks: list[Block] = [
        *_recipe(analysis, recipe),
        Paragraph("The campaign, then its analysis (an empty folder runs it anew; this one would only be read):"),
        Code("\n".join(line for line in commands if line), "sh"),
        Paragraph("Throughput and effects again, from `steps.csv` alone, with Python's standard library:"),
        Code(recompute_program(analysis).strip(), "python"),
        Paragraph("Files beside this page:"),
        files,
    ]
    lines = [
        f"# {attempt.name}, attempt {attempt.number}\n{shlex.join(attempt.note.command)}"
        for attempt in attempts
        if attempt.note is not None
    ]
    if lines:
        blocks.append(Details("Every command that was run", [Code("\n".join(lines), "sh")]))
    return Section("repeat", "To repeat it", blocks)


def _recipe(analysis: Analysis, recipe: str | None) -> Iterator[Block]:
    """Which one, and what it says at its top: how its model and data are made."""
    plan = analysis.plan
    named = f"The recipe is `{plan.recipe}`, SHA-256 `{plan.recipe_sha256}`"
    if recipe is None:
        yield Paragraph(f"{named}. It was not at hand when this was written; the checkout that ran it has it.")
        return
    if comments := leading_comments(recipe):
        yield Paragraph(f"{named}. What it says of itself, its model and its data:")
        yield Code(comments, PROSE)
    else:
        yield Paragraph(f"{named}. It says nothing of how its model and its data are made.")


def leading_comments(text: str) -> str:
    """The comment lines that a TOML file begins with, without their marks."""
    lines = takewhile(lambda line: line.startswith("#"), text.removeprefix("\ufeff").lstrip().splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ").rstrip() for line in lines)


def _commit(value: Mapping[str, Any]) -> Any:
    """Wherever it stands in the record."""
    if value.get("commit"):
        return value["commit"]
    return next((found for item in value.values() if isinstance(item, Mapping) and (found := _commit(item))), None)


def recompute_program(analysis: Analysis) -> str:
    """``RECOMPUTE`` with this plan's contrasts and the quantiles of t that it needs."""
    contrasts = [
        (found.treated, found.base) for found in (analysis.plan.primary_contrast, *analysis.plan.other_contrasts)
    ]
    blocks = len({cell.block for cell in analysis.cells})
    quantiles = {freedom: float(stdtrit(freedom, 1 - LEVEL / 2)) for freedom in range(1, max(2, blocks))}
    told = ", ".join(f"{freedom}: {value:.6f}" for freedom, value in quantiles.items())
    per_block = 1 if analysis.plan.order == "pairs" else 2
    given = f"CONTRASTS = {contrasts!r}\nB_PER_BLOCK = {per_block}  # a block with fewer has no baseline\n"
    given += f"T = {{{told}}}  # 97.5 % points of t by degrees of freedom\n"
    first, empty, rest = RECOMPUTE.partition("\n\n")
    return f"{first}\n\n{given}{rest}" if empty else RECOMPUTE
