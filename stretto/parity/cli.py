"""The ``stretto parity`` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto.arguments import Recipe, Sets

app = typer.Typer(
    help="Prove that a change of how a run works changes no number: record, replay, compare.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.command()
def record(
    recipe: Recipe,
    recording: Annotated[Path, typer.Argument(help="New folder for the recording.")],
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Partitions to record, from the first; default: all that are trained.")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates to train; default: what the recorded partitions take.")
    ] = None,
    set_: Sets = None,
) -> None:
    """Train a while, and keep the rollout partitions as they were produced.

    The learning rate follows the whole run of the recipe. The run lies in RECORDING/run unless run.dir is --set; it
    writes no checkpoints.
    """
    from stretto.parity.record import record as run

    run(recipe, recording, set_ or (), partitions=partitions, updates=updates)


@app.command()
def replay(
    recording: Annotated[Path, typer.Argument(help="Folder that `stretto parity record` has written.")],
    run_dir: Annotated[Path, typer.Argument(help="New folder for the run.")],
    timing: Annotated[
        Literal["instant", "recorded"],
        typer.Option(help="How long rollouts take: nothing, or as long as when they were recorded."),
    ] = "instant",
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Partitions to train on, from the first; default: all.")
    ] = None,
    dump: Annotated[
        int, typer.Option(min=-1, help="Partition after which gradients and parameters are written to RUN_DIR/dump.")
    ] = -1,
    set_: Sets = None,
) -> None:
    """Train on recorded rollouts, under any switches, ranks, chunks, layout and staleness.

    Options are those of the recording, changed by the environment and --set. Prompts are processed anew from their
    images and must give the recorded tensors, bit for bit.
    """
    from stretto.parity.replay import replay as run

    run(recording, run_dir, set_ or (), timing=timing, partitions=partitions, dump=dump)
