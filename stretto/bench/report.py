"""Writes a report of a campaign: Markdown, one page of HTML, CSV, JSON and checksums, into a folder of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from stretto.bench.campaign import attempts
from stretto.bench.document import figures, markdown
from stretto.bench.page import page
from stretto.bench.plan import Plan
from stretto.bench.raw_tables import alone_csv, runs_csv, steps_csv
from stretto.bench.report_text import document
from stretto.bench.results import Analysis
from stretto.bench.svg import standalone
from stretto.observe.lineage import write_atomically
from stretto.types import StrettoError

FORMAT = 1
SUMS = "SHA256SUMS"


def write_report(analysis: Analysis, campaign: Path, out: Path) -> tuple[Path, ...]:
    """All files of the report, in ``out``, which is made; those of an earlier report are replaced. The campaign's
    folder is only read, for the notes of its attempts.

    Raises:
        StrettoError: ``out`` is the folder of a campaign, or lies among its runs; a note of an attempt that cannot be
            read.
        OSError: ``out`` cannot be written.
    """
    _refuse_campaign(out, campaign)
    contents = report_files(analysis, campaign)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("figures/*.svg"), *out.glob("*.plan.toml")):
        if str(stale.relative_to(out)) not in contents:
            stale.unlink()
    for name, text in contents.items():
        write_atomically(out / name, text.encode())
    return tuple(out / name for name in contents)


def report_files(analysis: Analysis, campaign: Path) -> Mapping[str, str]:
    """Name -> text of every file, the checksums last."""
    found = attempts(campaign)
    recipe = recipe_text(analysis.plan, campaign)
    told = document(analysis, campaign, (*found, *attempts(campaign, "alone")), recipe)
    drawn = figures(block for section in told.sections for block in section.blocks)
    contents = {
        "report.html": page(told),
        "report.md": markdown(told),
        "report.json": _json(analysis),
        "steps.csv": steps_csv(analysis),
        "runs.csv": runs_csv(analysis, found),
        "alone.csv": alone_csv(analysis),
        f"{analysis.plan_sha256}.plan.toml": analysis.plan.text,
        **{f"figures/{figure.name}.svg": standalone(figure.svg) for figure in drawn},
    }
    sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(contents.items())]
    return contents | {SUMS: "".join(sums)}


def recipe_text(plan: Plan, campaign: Path) -> str | None:
    """Of the very recipe that the plan was written with, looked for from the working directory and from every folder
    that holds the campaign. None: it is not at hand, or was edited since.
    """
    for root in (Path(), *campaign.absolute().parents):
        try:
            found = (root / plan.recipe).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(found).hexdigest() == plan.recipe_sha256:
            return found.decode(errors="replace")
    return None


def _refuse_campaign(out: Path, campaign: Path) -> None:
    """A campaign has a plan as a report has, but no checksums."""
    here, runs = out.absolute(), [campaign.absolute() / kind for kind in ("cells", "alone")]
    begun = any(here.glob("*.plan.toml")) and not (here / SUMS).exists()
    if begun or (here / "cells").is_dir() or any(here.is_relative_to(folder) for folder in runs):
        raise StrettoError(f"--out {out} is the folder of a campaign, or lies among its runs; name a folder of its own")


def _json(analysis: Analysis) -> str:
    return json.dumps({"format": FORMAT, **analysis.as_json()}, indent=1, allow_nan=False) + "\n"
