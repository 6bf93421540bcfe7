"""A report's sections in their order, and the few lines of it that a terminal shows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from stretto.bench.campaign import Attempt
from stretto.bench.document import Document
from stretto.bench.phrases import plural
from stretto.bench.report_evidence import attribution, efficiency, hardware, packing, phases, timelines, workload
from stretto.bench.report_record import guardrails, provenance, rejected, repeat
from stretto.bench.report_results import SCOPES, claim, curves, headline, missing_cells, runs, verdicts
from stretto.bench.results import Analysis

WIDTH = 100
LONGEST = 40
"""Lines of a summary."""


def document(analysis: Analysis, campaign: Path, attempts: Sequence[Attempt], recipe: str | None = None) -> Document:
    """What may be claimed first, then the evidence, then what a reviewer repeats it with.

    ``attempts``: all of the campaign, of cells and of stages alone, for their commands. ``recipe``: the text of the
    plan's; None: it is not at hand.
    """
    plan = analysis.plan
    sections = (
        claim(analysis),
        verdicts(analysis),
        runs(analysis),
        curves(analysis),
        phases(analysis),
        timelines(analysis),
        hardware(analysis),
        workload(analysis),
        efficiency(analysis),
        packing(analysis),
        attribution(analysis),
        guardrails(analysis),
        rejected(analysis),
        provenance(analysis),
        repeat(analysis, campaign, attempts, recipe),
    )
    subtitle = (
        f"Recipe `{plan.recipe}`, plan `{analysis.plan_sha256[:12]}`: conditions {', '.join(plan.conditions)}; "
        f"{plural(plan.updates, 'update')} a run, warm-up {plan.warmup}, windows {', '.join(plan.windows)}."
    )
    return Document(f"Benchmark {plan.name}", subtitle, sections)


def summary(analysis: Analysis, out: Path | None = None) -> str:
    """For a terminal: at most ``LONGEST`` lines of ``WIDTH`` columns, unless a word is longer.

    ``out``: where the report was written; None: it was not.
    """
    scope = analysis.scope
    lines = [*_wrapped(f"scope    {SCOPES[scope.name]}"), *_wrapped(f"claim    {scope.limit}"), ""]
    for verdict in analysis.verdicts:
        lines += _wrapped(re.sub(r"\*\*", "", headline(verdict, scope.claim)), "    ")
        if verdict.judgement.reasons:
            lines += _wrapped(f"    {'; '.join(verdict.judgement.reasons)}", "    ")
    if not analysis.verdicts:
        lines.append("no verdict: no cell was accepted")
    lines.append("")
    lines += [line for warning in analysis.warnings for line in _wrapped(f"warning  {warning}")]
    others = [cell for cell in analysis.cells if cell.status != "accepted"]
    accepted = len(analysis.cells) - len(others)
    lines.append(f"accepted {accepted} of {len(analysis.cells)} attempts")
    told = [
        textwrap.shorten(
            f"{cell.status} {cell.name}, attempt {cell.attempt}: {'; '.join(cell.reasons)}", WIDTH, placeholder=" ..."
        )
        for cell in others
    ]
    if missing := missing_cells(analysis):
        told += _wrapped(f"missing  {', '.join(missing)}")
    end = [f"report   {out}"] if out is not None else []
    room = LONGEST - len(end)
    lines += told
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines in the report"]
    return "\n".join([*lines, *end])


def _wrapped(line: str, indent: str = " " * 9) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
