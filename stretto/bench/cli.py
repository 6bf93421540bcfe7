"""The ``stretto bench`` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto.arguments import Recipe, Sets

app = typer.Typer(
    help="Measure what a switch is worth, with a scope that cannot be overstated: plan, run, analyze, report.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.callback()
def common() -> None:
    """Measure what a switch is worth, with a scope that cannot be overstated: plan, run, analyze, report."""


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="Plan of the campaign (TOML).")],
    folder: Annotated[Path, typer.Argument(help="Folder of the campaign; a second call goes on in it.")],
) -> None:
    """Run every cell of a plan in a process of its own, and each stage alone; what has finished is not run again.

    Exit code 0: all of it has finished. 1: a cell failed; the same command tries it again.
    """
    import sys

    from stretto.bench.plan_file import load_plan
    from stretto.bench.run import run_campaign
    from stretto.training import interruptible

    with interruptible():
        outcome = run_campaign(load_plan(plan), folder, lambda line: print(line, flush=True))
    for line in outcome.failed:
        print(f"failed: {line}", file=sys.stderr)
    if outcome.failed:
        print("the same command tries them again", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)


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
