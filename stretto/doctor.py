"""``stretto doctor``: everything that is known of a config, a line each, and every problem with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.preflight import Examination
from stretto.preflight.case import Caution, Finding
from stretto.problems import Problem

LABEL_WIDTH = 12
"""Columns of the longest topic, with a space on each side of the next word."""

Row = tuple[str, str, str]
"""A label, a text, and the style of the text."""


def show(found: Examination, command: str, console: Console | None = None) -> None:
    """Print an examination of what ``command`` would run.

    On a terminal, lines are wrapped to its width; elsewhere each fact stays on one line.
    """
    console = console or Console(highlight=False)
    numbers = {id(problem): number for number, problem in enumerate(found.problems, start=1)}
    _print(console, [row for finding in found.findings for row in _rows(finding, numbers)])
    _line(console)
    if not found.problems:
        _line(console, f"nothing is in the way of: {command}")
        return
    _line(console, f"{_count(len(found.problems))}, by which it would refuse: {command}", "bold")
    _print(console, [(f"{number}.", problem.text, "") for number, problem in enumerate(found.problems, start=1)], 4)


def _rows(finding: Finding, numbers: dict[int, int]) -> Iterator[Row]:
    """The lines of one topic; its problems are one line that points to the list below."""
    lines: list[tuple[str, str]] = []
    for line in finding.lines:
        if isinstance(line, Caution):
            lines.append((f"warning: {line.text}", "yellow"))
        elif not isinstance(line, Problem):
            lines.append((line.text, ""))
    if finding.problems:
        listed = ", ".join(str(numbers[id(problem)]) for problem in finding.problems)
        lines.append((f"{_count(len(finding.problems))}, see {listed} below", "bold red"))
    for index, (text, style) in enumerate(lines or [("nothing to say", "")]):
        yield finding.topic if index == 0 else "", text, style


def _count(problems: int) -> str:
    return "1 problem" if problems == 1 else f"{problems} problems"


def _print(console: Console, rows: Sequence[Row], width: int = LABEL_WIDTH) -> None:
    """Labels in a column of their own, ``width`` wide."""
    if not console.is_terminal:
        for label, text, _ in rows:
            _line(console, f"{label:<{width}}" + text.replace("\n", "\n" + " " * width))
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=width - 1, no_wrap=True)
    table.add_column()
    for label, text, style in rows:
        table.add_row(Text(label, style="bold"), Text(text, style=style))
    console.print(table)


def _line(console: Console, text: str = "", style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
