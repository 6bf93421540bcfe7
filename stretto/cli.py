"""The ``stretto`` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto.arguments import Recipe, Sets
from stretto.bench.cli import app as bench
from stretto.parity.cli import app as parity
from stretto.training import Interrupted
from stretto.types import ConfigError, StrettoError

app = typer.Typer(
    help="Post-train vision-language models by hybrid-async GRPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(parity, name="parity")
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"stretto {version('stretto')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train vision-language models by hybrid-async GRPO."""


@app.command()
def train(
    recipe: Recipe,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint in run.dir.")] = False,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints/--no-checkpoints", hidden=True, help="`parity check` starts runs without.")
    ] = True,
) -> None:
    """Train a model by GRPO, rollout and actor running concurrently.

    Needs a model that is sometimes right (`stretto sft` makes one, or any Qwen3-VL in model.path).

    Writes metrics, events, a trace, fingerprints and checkpoints to run.dir.

    Ctrl-C ends at once; SIGTERM checkpoints first.
    """
    from stretto.training import interruptible

    with interruptible():
        from stretto.config import Seams
        from stretto.preflight import checked

        seams = Seams(checkpoints=checkpoints)
        config, sources = checked(recipe, set_ or (), seams=seams)  # before the imports that take seconds
        from stretto import switches
        from stretto.resume import again, what_is_left
        from stretto.training import train as run

        config = switches.applied(config)
        go_on = again(str(recipe), set_ or ())

        def left(done: int, saved: int) -> str:
            if not checkpoints:
                return f"stopped after {done} of {config.updates_to_train} updates; this run writes no checkpoints"
            return what_is_left(done, saved, config.updates_to_train, go_on)

        run(config, sources, resume=resume, left=left)


@app.command()
def doctor(
    recipe: Recipe,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option(help="Check what `train --resume` would go on from.")] = False,
) -> None:
    """Check a recipe against this machine, its model and its data, and list everything wrong with the remedy.

    Asks what `train` asks before it starts, and more. Starts no run and leaves nothing behind.

    Exit code 0: it can run. 2: the recipe is wrong. 1: machine, model, data, reward or run folder do not fit it.
    """
    from stretto.doctor import show
    from stretto.preflight import examine
    from stretto.resume import again

    def note(message: str, *, stays: bool = False) -> None:
        if sys.stderr.isatty() and not stays:  # results are shown with all others
            print(message, file=sys.stderr)

    found = examine(recipe, set_ or (), thorough=True, resume=resume, note=note)
    show(found, again(str(recipe), set_ or (), resume=resume))
    raise typer.Exit(found.exit_code)


@app.command()
def sft(
    recipe: Recipe,
    output: Annotated[Path, typer.Argument(help="Folder for the model (Hugging Face format).")],
    set_: Sets = None,
) -> None:
    """Warm-start a model by supervised training on labelled examples, until it is right now and then."""
    from stretto.machine import settle
    from stretto.preflight import checked

    config, _ = checked(recipe, set_ or (), training=False)
    from stretto.sft import run_sft

    if output.exists() and any(output.iterdir()):
        raise StrettoError(f"{output} is not empty; write the model to a new folder, or remove it")
    settle((), config.run.determinism)
    one_thread()

    def report(step: int, loss: float, exact: float | None) -> None:
        if exact is not None or step % 10 == 0:
            print(f"step {step}  loss {loss:.3f}" + ("" if exact is None else f"  exact match {exact:.1%}"), flush=True)

    def note(message: str, *, stays: bool = False) -> None:
        if stays or sys.stderr.isatty():
            print(message, file=sys.stderr)

    begun = time.monotonic()
    result = run_sft(config, output, report, note)
    print(
        f"model               {output}\n"
        f"exact match         {result.exact_match:.1%} (validation) after {result.steps} steps, "
        f"{time.monotonic() - begun:.0f} s"
    )


@app.command("eval")
def eval_(
    recipe: Recipe,
    set_: Sets = None,
    model: Annotated[Path | None, typer.Option(help="Model folder; default: the recipe's model.path.")] = None,
    split: Annotated[Literal["validation", "test", "train"], typer.Option(help="Part of the data.")] = "test",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to answer.")] = 400,
    examples: Annotated[int, typer.Option(min=0, max=8, help="Answers to print.")] = 3,
) -> None:
    """Measure a model by the recipe's reward: greedy answers to prompts that training never saw."""
    from stretto.evaluate import evaluate
    from stretto.machine import settle
    from stretto.observe.progress import measured
    from stretto.preflight import checked

    sets = [*(set_ or ()), *([f"model.path={model}"] if model else [])]
    config, _ = checked(recipe, sets, training=False)
    settle((), config.run.determinism)
    one_thread()
    result = evaluate(config, split, prompts)
    for wanted, got, score in result.examples[:examples]:
        print(f"  wanted {wanted!r}  got {got!r}  reward {score:g}")
    name, value, share = measured(result, config.reward.function)
    print(f"{name:<20}{value} ({share} {split} prompts)")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a training run (run.dir).")],
    output: Annotated[Path, typer.Argument(help="New folder for the model.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapters, as peft loads them.")] = False,
) -> None:
    """Turn a checkpoint into a Hugging Face directory that `from_pretrained` loads, adapters merged in."""
    from stretto.export import export as write

    checkpoint = write(run_dir, output, step, adapter=adapter)
    print(f"exported {checkpoint} to {output} ({_mib(output):.1f} MiB)")


def _mib(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.iterdir()) / 2**20


def one_thread() -> None:
    """Commands without processes of their own use one torch thread, as each side of a run does on a small machine."""
    import torch

    torch.set_num_threads(1)


def main() -> None:
    """Entry point: errors that a user can mend are printed without a traceback, and end with exit code 1 (2 for those
    of a recipe)."""
    try:
        app()
    except ConfigError as error:
        print("The recipe cannot run as it is:", *(f"- {p}" for p in error.problems), sep="\n", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except Interrupted as stopped:
        raise SystemExit(stopped.exit_code) from None


if __name__ == "__main__":
    main()
