"""A training run from its config to its last line of output, as the commands start it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.config import Config
from stretto.stops import STOPS
from stretto.types import StrettoError

Left = Callable[[int, int], str]
"""What to say of a run that was stopped, given the updates that were trained and those that a checkpoint holds."""


class Interrupted(Exception):
    """A run was asked to end, and has said what is left of it; the command ends with ``exit_code``."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


@contextmanager
def interruptible(again: str = "run the same command again") -> Iterator[None]:
    """Around a command that trains: signals end it with one line, and a code that says so. ``again`` is what to do
    where it had not begun to train.

    Raises:
        Interrupted: it was asked to end.
    """
    STOPS.install()
    try:
        yield
    except KeyboardInterrupt:
        STOPS.ignore()
        if STOPS.cause:
            print(f"error: {STOPS.cause} while the run started; {again}", file=sys.stderr)
            raise Interrupted(1) from None
        print(f"stopped by {STOPS.name} while it started; nothing is lost: {again}", file=sys.stderr)
        raise Interrupted(STOPS.exit_code) from None
    finally:
        STOPS.ignore()


def train(config: Config, sources: dict[str, str], *, resume: bool, left: Left) -> None:
    """Train in ``run.dir``, which is locked meanwhile, and print a summary.

    Raises:
        StrettoError: what ended the run, with what is left of it.
        Interrupted: it was asked to end.
    """
    from stretto.resume import locked

    with locked(Path(config.run.dir)):
        _train(config, sources, resume, left)


def _train(config: Config, sources: dict[str, str], resume: bool, left: Left) -> None:
    from stretto import controller, loop, machine
    from stretto.observe.progress import make_progress, summary
    from stretto.resume import failed, find_checkpoint

    found = find_checkpoint(config, resume=resume)
    place = machine.placement(config)
    for path, why in found.passed_over:
        print(f"passed over {path.name}: {why}")
    begun = time.monotonic()
    updates = config.updates_to_train
    first = int(found.state["cursor"]) * config.updates_per_partition if found.path else 0
    if first >= updates:
        print(f"finished: the run in {config.run.dir} has trained all of its {updates} updates")
        return
    if resume and found.path is None:
        print(f"nothing to go on from in {config.run.dir}: training starts at update 1")
    run: controller.Run | None = None
    try:
        with (
            make_progress(
                updates,
                first,
                run_dir=config.run.dir,
                reward=config.reward.function,
                stopping=lambda: STOPS.says,
            ) as progress,
            controller.open_run(config, sources, progress, found, place) as run,
        ):
            loop.train(run)
    except (KeyboardInterrupt, controller.Stopped):
        if run is None:
            raise
        print(left(run.updates_done, run.updates_saved), file=sys.stderr)
        raise Interrupted(STOPS.exit_code) from None
    except StrettoError as error:
        if run is None:
            raise
        raise failed(error, left(run.updates_done, run.updates_saved)) from error
    records = run.records
    evaluated = records.evaluations()
    print(
        summary(
            updates=updates - first,
            wall_s=time.monotonic() - begun,
            training_s=records.training_s,
            rewards=records.rewards(),
            tokens=records.tokens,
            run_dir=config.run.dir,
            reward=config.reward.function,
            before=evaluated[0] if evaluated else None,
            after=evaluated[-1] if len(evaluated) > 1 else None,
        )
    )
