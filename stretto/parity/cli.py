"""The ``stretto parity`` commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto.arguments import Recipe, Sets
from stretto.types import ConfigError, StrettoError

EXIT_NOTHING_SHOWN = 2

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


@app.command()
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Folder of a run, live or a replay.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Folder of the run to hold against it.")],
    control: Annotated[
        Path | None, typer.Option(help="Folder of a second run of what RUN_A ran: says what two runs of a kind share.")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates to compare, from the first; default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for parity.json and parity.md.")] = None,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            help="Run both again, in OUT/bisect, to the first update with other gradients or parameters, and say which "
            "elements differ.",
        ),
    ] = False,
) -> None:
    """Hold two runs against each other, quantity by quantity, and name the first thing that differs.

    Exit code 0: every row is as required. 1: one is not. 3: none is wrong, but the control pair differs in one, so that
    it shows nothing. 2: nothing was compared: these runs do not compare, cannot be read, or could not be run again.
    """
    from stretto.parity.command import compare_runs

    raise typer.Exit(compare_runs(run_a, run_b, control, updates=updates, out=out, bisected=bisect))


@app.command(hidden=True)
def rerun(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    run_dir: Annotated[Path, typer.Argument(help="New folder for its repetition.")],
    dump: Annotated[int, typer.Option(min=0, help="Partition to end with, and to write to RUN_DIR/dump.")],
) -> None:
    """Run again what a run folder records, up to one partition. `compare --bisect` starts it."""
    from stretto.parity.rerun import rerun as again

    again(run, run_dir, dump)


@app.command()
def check(
    recipe: Recipe,
    out: Annotated[Path, typer.Option(help="Folder for all runs and the report; a second call goes on in it.")] = Path(
        "runs/parity"
    ),
    conditions: Annotated[str, typer.Option(help="Conditions to hold against B, separated by commas.")] = "B,P,P+R,P+S",
    updates: Annotated[int, typer.Option(min=1, help="Updates of every live run.")] = 40,
    record_partitions: Annotated[
        int, typer.Option(min=1, help="Partitions that the first run records, and every replay trains on.")
    ] = 2,
    ranks: Annotated[
        str, typer.Option(help="Data-parallel ranks of the replays, such as 1,4; default: those of the recipe.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of P; default: those of the recipe, or else 2.")
    ] = None,
    draw: Annotated[bool, typer.Option("--curves/--no-curves", help="Draw curves.png (extra: plots).")] = True,
    set_: Sets = None,
) -> None:
    """Show that the switches change no number of a recipe: live and replayed, compared, and reported.

    Runs B twice and every other condition once, live and on a recording, each in a process of its own; writes
    report.md, report.json and curves.png.

    Exit code 0: every row passes. 1: one fails. 3: none fails, but one is undecidable. 2: nothing is shown, since the
    recipe cannot run, a run failed, or runs do not compare.
    """
    from stretto.parity.check import check as run
    from stretto.parity.plan import Question, parse_conditions, parse_ranks
    from stretto.parity.report import text
    from stretto.training import interruptible

    question = Question(
        recipe=str(recipe),
        out=out,
        conditions=parse_conditions(conditions),
        workers=workers or 0,
        updates=updates,
        record_partitions=record_partitions,
        ranks=parse_ranks(ranks) if ranks else (),
        sets=tuple(set_ or ()),
    )
    with interruptible(), _nothing_shown():
        found = run(question, lambda line: print(line, flush=True), draw=draw)
    print(f"\n{text(found)}\n\nreport              {out / 'report.md'}")
    raise typer.Exit(found.exit_code)


@contextmanager
def _nothing_shown() -> Iterator[None]:
    """Errors that keep a check from its end have an exit code of their own: 1 says that numbers differ."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.problems, exit_code=EXIT_NOTHING_SHOWN) from None
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_NOTHING_SHOWN) from None
