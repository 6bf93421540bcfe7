"""What the benchmarks of the whole pipeline share: a run opened from a recipe, and how busy everybody else was.

A benchmark trains by ``stretto.loop.train`` on ``stretto.controller.open_run``, exactly as ``stretto train`` does.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stretto import controller, loop, machine, switches
from stretto.actor.checkpoint import Found
from stretto.observe.progress import PlainProgress
from stretto.settings import load


@dataclass
class Load:
    """CPU cores in use on average while the run trained: by its own processes, by others, taken by the hypervisor."""

    own: float = 0.0
    others: float = 0.0
    steal: float = 0.0


def processes() -> list[psutil.Process]:
    """This process and all that descend from it: driver, Ray's daemons, and the workers of the run."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_seconds() -> dict[int, float]:
    spent = {}
    for process in processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[process.pid] = times.user + times.system
    return spent


@contextmanager
def measured_load(load: Load) -> Iterator[None]:
    """Fills ``load`` for the time of its body; a process that both starts and ends inside counts as another's."""
    machine_before, own_before, begun = psutil.cpu_times(), _cpu_seconds(), time.monotonic()
    yield
    after, own, wall = psutil.cpu_times(), _cpu_seconds(), time.monotonic() - begun
    busy = sum(getattr(after, f) - getattr(machine_before, f) for f in ("user", "nice", "system", "irq", "softirq"))
    load.own = sum(own[pid] - own_before.get(pid, 0.0) for pid in own) / wall
    load.others = max(0.0, busy / wall - load.own)
    load.steal = (after.steal - machine_before.steal) / wall


def wait_until_quiet(patience_s: float = 0.0) -> None:
    """Returns once the machine has been idle for 4 s, or with a warning after ``patience_s``: figures taken beside the
    work of others say little.
    """
    end = time.monotonic() + patience_s
    while (busy := max(psutil.cpu_percent(interval=2) for _ in range(2)) * (os.cpu_count() or 1) / 100) > 0.15:
        if time.monotonic() >= end:
            print(
                f"warning: {busy:.2f} cores are busy, load average {os.getloadavg()[0]:.2f}: others work on this "
                "machine, so repeat when it is quiet",
                flush=True,
            )
            return


def train(
    recipe: Path, sets: Sequence[str], run_dir: Path, prepare: Callable[[controller.Run], None] = lambda run: None
) -> Load:
    """A whole run into ``run_dir``, where ``output.log`` has its progress. ``prepare`` gets the run before it trains.

    Raises what the loop raises; the processes have ended by then.
    """
    config, sources = load(recipe, [*sets, f"run.dir={run_dir}"])
    config = switches.applied(config)
    used = Load()
    run_dir.mkdir(parents=True)
    with (run_dir / "output.log").open("w") as log, redirect_stdout(log), PlainProgress(config.run.updates) as progress:
        place = machine.placement(config)
        with controller.open_run(config, sources, progress, Found(None, {}, ()), place) as run:
            prepare(run)
            with measured_load(used):
                loop.train(run)
    return used


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``median (least-greatest)`` over repetitions."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def setting() -> dict[str, Any]:
    """Where the figures come from, for the report."""
    from stretto.observe.hardware import hardware
    from stretto.observe.manifest import git_state

    return {"hardware": hardware(), "git": git_state()}
