"""What a run shows while it runs: a live display on a terminal, plain single lines elsewhere.

While the live display is up, everything else that this process and its later children write to the terminal goes to
``output.log`` in the run folder, so that nothing ever lands in the middle of the display.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.types import Evaluation

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"
EXACT_MATCH = "exact_match"
"""The reward function under which a reward of 1 is called an exact match."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One update, as shown. ``reward`` is the mean over valid samples; ``tokens_per_s`` counts prompt and response
    tokens without padding; the waits are seconds of this step in which a side had nothing to work on.
    """

    update: int
    reward: float
    tokens_per_s: float
    staleness: float
    step_s: float
    actor_waited_s: float
    rollout_waited_s: float


class Progress(Protocol):
    """A context manager; what a run shows is shown between enter and exit."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def note(self, message: str, *, stays: bool = False) -> None:
        """One line for the user: what is being waited for, or what happened; one that ``stays`` is not replaced."""
        ...

    def evaluation(self, result: Evaluation) -> None: ...
    def step(self, report: StepReport) -> None:
        """The update ``report.update`` (from 0) is done."""
        ...


def sparkline(values: Sequence[float], width: int = 40, *, ascii_only: bool = False) -> str:
    """The course of a series as at most ``width`` characters, each the mean of a run of values, scaled from the least
    to the greatest of these means. Non-finite values are left out; a run of nothing else is a blank.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    n = min(width, len(values))
    means = []
    for i in range(n):
        part = [v for v in values[i * len(values) // n : (i + 1) * len(values) // n] if math.isfinite(v)]
        means.append(math.fsum(part) / len(part) if part else math.nan)
    finite = [m for m in means if math.isfinite(m)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        " " if not math.isfinite(m) else bars[0 if span == 0 else round((m - low) / span * (len(bars) - 1))]
        for m in means
    )


def duration(seconds: float) -> str:
    """45 s, 3:07 (minutes), 2:03:07 (hours); ? for a duration that is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def waited(seconds: float) -> str:
    """Seconds of waiting; - where they are not known yet."""
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "-"


def measured(result: Evaluation, reward: str) -> tuple[str, str, str]:
    """What an evaluation measured, its value, and of how many answers. That is exact match where ``reward`` (the reward
    function) is; else the mean reward, with the number of answers whose reward is 1, where there are any.
    """
    if reward == EXACT_MATCH:
        return "exact match", f"{result.exact_match:.1%}", f"{result.correct} of {result.total}"
    value = f"{result.reward_mean:.3f}" if math.isfinite(result.reward_mean) else "-"
    ones = f"{result.correct} with reward 1, " if result.correct else ""
    return "reward", value, f"{ones}mean of {result.total}"


def summary(
    *,
    updates: int,
    wall_s: float,
    training_s: float,
    rewards: Sequence[float],
    tokens: float,
    run_dir: Path | str,
    reward: str = EXACT_MATCH,
    before: Evaluation | None = None,
    after: Evaluation | None = None,
    ascii_only: bool = False,
) -> str:
    """The lines that end a run: what evaluations found before and after, the course of the reward, speed, where the
    results are. ``wall_s`` is the whole session's, start-up included. ``reward`` is ``reward.function``.
    """
    lines = []
    for label, result in (("before", before), ("after", after)):
        if result is not None:
            name, value, share = measured(result, reward)
            share += f" {result.split} prompts, policy version {result.version}"
            lines.append(f"{f'{name} {label}':<20}{value:>6}  ({share})")
    finite = [r for r in rewards if math.isfinite(r)]
    if len(finite) > 1:
        course, n = sparkline(rewards, ascii_only=ascii_only), min(5, len(finite) // 2)
        first, last = math.fsum(finite[:n]) / n, math.fsum(finite[-n:]) / n
        lines.append(f"reward              {course}  {first:.3f} -> {last:.3f} (first and last {n} updates)")
    lines.append(f"updates             {updates} in {duration(wall_s)}, {duration(training_s)} of them training")
    if training_s > 0:
        speed = f"{tokens / training_s:,.0f} tokens/s"
        lines.append(f"speed               {speed} while it trained (prompt and response, without padding)")
    lines.append(f"results             {run_dir}")
    return "\n".join(lines)


class _Course:
    """What both displays remember of the run."""

    def __init__(self, updates: int, first_update: int, reward: str):
        self.updates, self.done, self.reward = updates, first_update, reward
        self.rewards: list[float] = []
        self.recent_s: list[float] = []
        self.last: StepReport | None = None
        self.evaluated: Evaluation | None = None

    def add(self, report: StepReport) -> None:
        gained = max(report.update + 1 - self.done, 1)  # a rollout batch may take several updates
        self.last, self.done = report, report.update + 1
        self.rewards.append(report.reward)
        self.recent_s = [*self.recent_s[-19:], report.step_s / gained]

    def left_s(self) -> float:
        """At the pace of the last twenty updates."""
        if not self.recent_s:
            return math.nan
        return math.fsum(self.recent_s) / len(self.recent_s) * (self.updates - self.done)

    def evaluation(self) -> tuple[str, str, str]:
        """What the last one measured, its value with its origin, and of how many answers."""
        if self.evaluated is None:
            return "exact match" if self.reward == EXACT_MATCH else "evaluation", "-", ""
        name, value, share = measured(self.evaluated, self.reward)
        return name, f"{value} ({self.evaluated.split}, version {self.evaluated.version})", share


class PlainProgress:
    """One line per event, for files, pipes and CI."""

    def __init__(self, updates: int, first_update: int = 0, stream: TextIO | None = None, *, reward: str = EXACT_MATCH):
        self._course = _Course(updates, first_update, reward)
        self._stream = stream or sys.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.flush()

    def note(self, message: str, *, stays: bool = False) -> None:
        print(message, file=self._stream, flush=True)

    def evaluation(self, result: Evaluation) -> None:
        self._course.evaluated = result
        name, value, share = self._course.evaluation()
        self.note(f"evaluation  {name} {value}, {share}")

    def step(self, report: StepReport) -> None:
        self._course.add(report)
        self.note(
            f"update {report.update + 1}/{self._course.updates}  reward {report.reward:.3f}  "
            f"{report.tokens_per_s:,.0f} tokens/s  staleness {report.staleness:.1f}  step {report.step_s:.2f} s  "
            f"waited: actor {waited(report.actor_waited_s)}, rollout {waited(report.rollout_waited_s)}  "
            f"left {duration(self._course.left_s())}"
        )


class LiveProgress:
    """A display that redraws itself in place, on a terminal. ``stopping`` is asked at every redrawing: what it says, if
    anything, takes the place of the times.
    """

    def __init__(
        self,
        updates: int,
        first_update: int = 0,
        *,
        output_log: Path | str,
        reward: str = EXACT_MATCH,
        stopping: Callable[[], str] = str,
    ):
        self._course = _Course(updates, first_update, reward)
        self._stopping = stopping
        self._log = Path(output_log)
        self._note = ""
        self._started = time.monotonic()
        self._ascii = "utf" not in (sys.stdout.encoding or "").lower()

    def __enter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._log_start = os.fstat(log).st_size
        self._screen = io.TextIOWrapper(
            os.fdopen(os.dup(1), "wb", 0), encoding=sys.stdout.encoding, errors="replace", write_through=True
        )
        self._live = Live(
            get_renderable=self._render,
            console=Console(file=self._screen, force_terminal=True),
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._live.stop()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, fd)
                os.close(saved)
            self._screen.close()
        written = self._log.stat().st_size - self._log_start
        if written:
            print(f"other output of this run ({written:,} bytes): {self._log}", file=sys.stderr)

    def note(self, message: str, *, stays: bool = False) -> None:
        if stays:
            self._live.console.print(Text(message))
        else:
            self._note = message

    def evaluation(self, result: Evaluation) -> None:
        self._course.evaluated = result

    def step(self, report: StepReport) -> None:
        self._course.add(report)
        self._note = ""

    def _render(self) -> Group:
        course, last, stopping = self._course, self._course.last, self._stopping()
        so_far = f"{duration(time.monotonic() - self._started)} so far, {duration(course.left_s())} left"
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"update {course.done}/{course.updates}", style="bold"),
            ProgressBar(total=course.updates, completed=course.done, width=30),
            Text(stopping or so_far, style="bold yellow" if stopping else ""),
        )
        facts = Table.grid(padding=(0, 2))
        if last is not None:
            facts.add_row("reward", f"{last.reward:.3f}  {sparkline(course.rewards, ascii_only=self._ascii)}")
        name, value, _ = course.evaluation()
        facts.add_row(name if name == "exact match" else "evaluation", value)
        if last is not None:
            facts.add_row("speed", f"{last.tokens_per_s:,.0f} tokens/s, {last.step_s:.2f} s an update")
            facts.add_row("staleness", f"{last.staleness:.1f}")
            facts.add_row("actor waited", f"{waited(last.actor_waited_s)} for rollout")
            facts.add_row("rollout waited", f"{waited(last.rollout_waited_s)} for weights")
        return Group(bar, facts, Text("" if stopping else self._note, style="dim"))


def make_progress(
    updates: int,
    first_update: int = 0,
    *,
    run_dir: Path | str,
    reward: str = EXACT_MATCH,
    stopping: Callable[[], str] = str,
) -> Progress:
    """The live display where standard output is a terminal that can redraw, else plain lines. ``reward`` is the reward
    function: evaluations are shown in its terms. ``stopping``: see ``LiveProgress``.
    """
    if sys.stdout.isatty() and not Console().is_dumb_terminal:
        log = Path(run_dir) / "output.log"
        return LiveProgress(updates, first_update, output_log=log, reward=reward, stopping=stopping)
    return PlainProgress(updates, first_update, reward=reward)
