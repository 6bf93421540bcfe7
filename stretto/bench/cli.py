"""The ``stretto bench`` commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto.arguments import Recipe, Sets
from stretto.types import StrettoError

app = typer.Typer(
    help="Measure what a switch is worth, with a scope that cannot be overstated: plan, run, analyze, report.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.callback()
def common() -> None:
    """Measure what a switch is worth, with a scope that cannot be overstated: plan, run, analyze, report."""


Campaign = Annotated[Path, typer.Argument(metavar="CAMPAIGN", help="Folder that `stretto bench run` has written.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan of the campaign (TOML), see docs/benchmark.md.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the campaign; default: runs/bench/NAME, by the plan's name.")]


@contextmanager
def files_told() -> Iterator[None]:
    """Of a full disk, or a folder that may not be read, a user is told in one line."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StrettoError(f"{where}{error.strerror or error}") from None


@app.command()
def plan(plan: PlanFile) -> None:
    """Say what a plan would run, what it could claim, and the smallest effect that it could detect. Nothing runs."""
    from stretto.bench.outline import outline
    from stretto.bench.plan_file import load_plan

    print(outline(load_plan(plan)))


@app.command()
def run(plan: PlanFile, out: Out = None) -> None:
    """Run every cell of a plan in a process of its own, and each stage alone; what has finished is not run again.

    Exit code 0: all of it has finished. 1: a cell failed; the same command tries it again.
    """
    from stretto.bench.plan_file import load_plan
    from stretto.bench.run import run_campaign
    from stretto.training import interruptible

    loaded = load_plan(plan)
    folder = out or Path("runs/bench") / loaded.name
    with interruptible(), files_told():
        outcome = run_campaign(loaded, folder, lambda line: print(line, flush=True))
    for line in outcome.failed:
        print(f"failed: {line}", file=sys.stderr)
    if outcome.failed:
        print("the same command tries them again", file=sys.stderr)
    print(f"campaign            {folder}\nits report          stretto bench report {shlex.quote(str(folder))}")
    raise typer.Exit(outcome.exit_code)


@app.command()
def analyze(campaign: Campaign) -> None:
    """Reject what may not count, and say what the rest shows. The campaign is only read; any machine will do."""
    from stretto.bench.analyze import analyze as run
    from stretto.bench.report_text import summary

    with files_told():
        analysis = run(campaign)
    print(summary(analysis))


@app.command()
def report(
    campaign: Campaign,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: CAMPAIGN/report.")] = None,
) -> None:
    """Write report.html, report.md, JSON, CSV and checksums: everything that a reviewer needs to check a claim."""
    from stretto.bench.analyze import analyze as run
    from stretto.bench.report import write_report
    from stretto.bench.report_text import summary

    folder = out or campaign / "report"
    with files_told():
        analysis = run(campaign)
        write_report(analysis, campaign, folder)
    print(summary(analysis, folder / "report.html"))


@app.command()
def compare(
    campaign_a: Annotated[Path, typer.Argument(metavar="CAMPAIGN_A", help="Folder of a campaign.")],
    campaign_b: Annotated[Path, typer.Argument(metavar="CAMPAIGN_B", help="Folder of another one.")],
) -> None:
    """Print two campaigns side by side, such as of two commits. Throughputs are compared only within one boot."""
    from stretto.bench.analyze import analyze as run
    from stretto.bench.compare import compare as compared
    from stretto.bench.compare import text

    with files_told():
        found = compared(run(campaign_a), run(campaign_b))
    print(text(found), end="")


@app.command(hidden=True)
def alone(
    stage: Annotated[Literal["processor", "rollout", "training"], typer.Argument(help="What is not idle.")],
    recipe: Recipe,
    run_dir: Annotated[Path, typer.Argument(help="New folder for the run and alone.json.")],
    condition: Annotated[str, typer.Option(help="Name of the condition, as alone.json has it.")],
    warmup: Annotated[int, typer.Option(min=0, help="Updates at the start that are not measured.")] = 2,
    set_: Sets = None,
) -> None:
    """Run one stage with the others idle. `run` starts it."""
    from stretto.training import interruptible

    with interruptible():
        from stretto.bench.alone import measure_alone

        measure_alone(stage, recipe, run_dir, set_ or (), condition=condition, warmup=warmup)
