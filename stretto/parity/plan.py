"""What a check runs: every run with its command, and every pair of runs that is compared. Pure; nothing starts here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto import switches
from stretto.config import Config
from stretto.types import ConfigError

BASE = switches.BASE
CONTROL = "B again"
"""The baseline run once more: how far two runs of one condition are apart."""
RECORDED = "recorded run"
"""The column that holds a replay of the baseline against the live run that was recorded."""
ACROSS = "numbers of ranks"
REPORT_FILES = ("report.md", "report.json", "curves.png")
FOLDERS = {CONTROL: "B-again"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a check.

    conditions        B first, then the others
    workers           processes of P; 0: as the recipe says, or else a few
    updates           of every live run
    record_partitions that the first live run records, and that every replay trains
    ranks             data-parallel ranks of the replays; live runs keep those of the recipe, and so do replays
                      where there are none
    sets              what the user sets beside the recipe
    """

    recipe: str
    out: Path
    conditions: tuple[str, ...] = (BASE, "P", "P+R", "P+S")
    workers: int = 0
    updates: int = 40
    record_partitions: int = 2
    ranks: tuple[int, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What asks this, to be pasted into a shell."""
        numbers = {"--updates": self.updates, "--record-partitions": self.record_partitions, "--workers": self.workers}
        words = ["stretto", "parity", "check", self.recipe, "--out", str(self.out)]
        words += ["--conditions", ",".join(self.conditions), "--ranks", ",".join(map(str, self.ranks))]
        words += [word for name, number in numbers.items() for word in (name, str(number))]
        return shlex.join([*words, *_options(self.sets)])

    @property
    def recording(self) -> Path:
        return self.out / "recording"

    @property
    def reference(self) -> Path:
        """Gradients of the last update of the first partition in float64."""
        return self.out / "reference.safetensors"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run, in a process of its own.

    ranks   0: a live run, with those of the recipe
    words   of the command, after ``stretto``
    """

    condition: str
    ranks: int
    run_dir: Path
    partitions: int
    words: tuple[str, ...]

    @property
    def replay(self) -> bool:
        return self.ranks > 0

    @property
    def group(self) -> str:
        return f"replay, {ranks_text(self.ranks)}" if self.replay else "live"

    @property
    def name(self) -> str:
        return f"{self.group}: {self.condition}"

    @property
    def file_name(self) -> str:
        """For its log and the like."""
        return f"{f'replay-{self.ranks}' if self.replay else 'live'}-{FOLDERS.get(self.condition, self.condition)}"

    @property
    def command(self) -> str:
        """To be pasted into a shell."""
        return shlex.join(["stretto", *self.words])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``other`` against ``base``; ``control`` is a second run of ``base``."""

    base: Cell
    other: Cell
    control: Cell | None
    partitions: int | None = None
    """Only the first ones are compared; None: all, and both runs have equally many."""

    @property
    def across(self) -> bool:
        """Whether the two differ in their ranks, so that only distances can be told."""
        return self.base.replay and self.other.replay and self.base.ranks != self.other.ranks

    @property
    def group(self) -> str:
        """Of the table that it is a column of."""
        return ACROSS if self.across else self.other.group

    @property
    def column(self) -> str:
        if self.across:
            return f"{ranks_text(self.base.ranks)}, {ranks_text(self.other.ranks)}"
        return self.other.condition if self.base.replay == self.other.replay else RECORDED

    @property
    def command(self) -> str:
        """To be pasted into a shell; what is compared by it alone is all of both runs."""
        control = ["--control", str(self.control.run_dir)] if self.control else []
        words = ["stretto", "parity", "compare", str(self.base.run_dir), str(self.other.run_dir), *control]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class Plan:
    cells: tuple[Cell, ...]
    """In the order in which they run: the first one records."""
    comparisons: tuple[Comparison, ...]


def ranks_text(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def parse_conditions(text: str) -> tuple[str, ...]:
    """``"P,P+R"`` as ``("B", "P", "P+R")``: the baseline is always there, and first.

    Raises:
        ConfigError: a name that is none.
    """
    found, wrong = [BASE], []
    for name in filter(None, (part.strip() for part in text.split(","))):
        letters = switches.letters(name)
        if letters is None:
            wrong.append(name)
        else:
            found.append("+".join(letters) or BASE)
    if wrong:
        raise ConfigError(
            [
                f"--conditions names {name!r}: expected B, or letters of {', '.join(switches.LETTERS)} joined by +"
                for name in wrong
            ]
        )
    return tuple(dict.fromkeys(found))


def parse_ranks(text: str) -> tuple[int, ...]:
    """``"1,4"`` as ``(1, 4)``.

    Raises:
        ConfigError: what is no positive whole number.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not (part.isdecimal() and int(part) > 0)]
    if wrong or not parts:
        named = ", ".join(repr(part) for part in wrong) or "nothing"
        raise ConfigError([f"--ranks names {named}: expected numbers of ranks, such as 1 or 1,4"])
    return tuple(dict.fromkeys(int(part) for part in parts))


def switch_sets(condition: str, workers: int) -> list[str]:
    """``--set`` values of every switch, those that are off too: the recipe may have them on."""
    values = switches.options(condition.split("+"), workers)
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def live_sets(question: Question, condition: str, run_dir: Path) -> list[str]:
    """``--set`` values of a live run. What the user sets comes after the defaults of a check, and before what makes the
    condition.
    """
    own = [f"run.dir={run_dir}", f"run.updates={question.updates}"]
    return ["eval.every=0", *question.sets, *switch_sets(condition, question.workers), *own]


def make_plan(question: Question, config: Config, *, reference: bool = True) -> Plan:
    """``config`` is that of the live baseline; ``reference``: gradients are to be held against float64.

    Raises:
        ConfigError: the updates do not hold the partitions that are to be recorded.
    """
    partitions = question.updates // config.updates_per_partition
    if not 0 < question.record_partitions <= partitions:
        raise ConfigError(
            [
                f"--record-partitions = {question.record_partitions}, and --updates = {question.updates} train "
                f"{partitions}: record at least one and at most as many"
            ]
        )
    names = [BASE, CONTROL, *question.conditions[1:]]
    live = [_live(question, name, partitions) for name in names]
    replays = [
        [_replay(question, name, ranks, dump=reference and name == BASE) for name in names]
        for ranks in question.ranks or (config.actor.data_parallel,)
    ]
    pairs = _within(live)
    for cells in replays:
        if cells[0].ranks == config.actor.data_parallel:
            first = Comparison(base=live[0], other=cells[0], control=live[1], partitions=question.record_partitions)
            pairs.append(first)
        pairs += _within(cells)
    pairs += [Comparison(base=replays[0][0], other=cells[0], control=replays[0][1]) for cells in replays[1:]]
    return Plan(cells=tuple([*live, *(cell for cells in replays for cell in cells)]), comparisons=tuple(pairs))


def _within(cells: Sequence[Cell]) -> list[Comparison]:
    base, control = cells[:2]
    return [Comparison(base=base, other=other, control=control) for other in cells[1:]]


def _live(question: Question, name: str, partitions: int) -> Cell:
    run_dir = question.out / "live" / FOLDERS.get(name, name)
    sets = _options(live_sets(question, BASE if name == CONTROL else name, run_dir))
    words = ["train", question.recipe, "--no-checkpoints", *sets]  # as of those that record or replay
    if name == BASE:
        counts = ["--partitions", str(question.record_partitions), "--updates", str(question.updates)]
        words = ["parity", "record", question.recipe, str(question.recording), *counts, *sets]
    return Cell(condition=name, ranks=0, run_dir=run_dir, partitions=partitions, words=tuple(words))


def _replay(question: Question, name: str, ranks: int, *, dump: bool) -> Cell:
    run_dir = question.out / "replay" / str(ranks) / FOLDERS.get(name, name)
    # Under "fast" nothing is promised, and no row could fail: the replays are what shows something of such a recipe.
    sets = [f"actor.data_parallel={ranks}", "run.determinism=exact"]
    sets += switch_sets(BASE if name == CONTROL else name, question.workers)
    words = ["parity", "replay", str(question.recording), str(run_dir), *_options(sets)]
    if dump:
        words += ["--dump", "0"]
    return Cell(condition=name, ranks=ranks, run_dir=run_dir, partitions=question.record_partitions, words=tuple(words))


def _options(sets: Iterable[str]) -> list[str]:
    return [word for value in sets for word in ("--set", value)]
