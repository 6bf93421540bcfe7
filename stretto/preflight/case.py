"""What the topics of a check look at, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.config import Config
from stretto.problems import Problem, Reader
from stretto.types import ConfigError, ProcessedPrompt, Prompt

if TYPE_CHECKING:  # torch and transformers take seconds to import: not before the options themselves are sound
    from stretto.data.check import Note
    from stretto.data.source import Source
    from stretto.models.qwen3_vl import Qwen3VL


@dataclass(frozen=True)
class Fact:
    """Something that was looked at and is as it should be."""

    text: str


@dataclass(frozen=True)
class Caution:
    """Something that stops no run, and that its user may not want."""

    text: str


Line = Fact | Caution | Problem


@dataclass(frozen=True)
class Finding:
    """What one topic found, in the order in which it was found."""

    topic: str
    lines: tuple[Line, ...]
    exit_code: int = 1

    @property
    def problems(self) -> list[Problem]:
        return [line for line in self.lines if isinstance(line, Problem)]

    @property
    def cautions(self) -> list[Caution]:
        return [line for line in self.lines if isinstance(line, Caution)]


class Case:
    """One config under examination.

    ``family``, ``source``, ``prompts`` and ``processed`` are set by the topics that make them, for the topics after
    them; they stay None or empty where that failed.

    Attributes:
        training: responses are to be sampled and trained on; else the config is for a warm-start or an evaluation.
        thorough: what takes long, or only informs, is asked too.
        resume: the run is to go on from its newest checkpoint.
        no_prompts: why ``prompts`` is empty, where it is.
        teacher_bytes: weights of the teacher; 0 where there is none, or it cannot be loaded.
        note: told how far a topic is that takes long.
    """

    def __init__(
        self,
        config: Config,
        origins: dict[str, str],
        *,
        training: bool,
        thorough: bool,
        resume: bool,
        note: Note,
    ):
        self.config = config
        self.reader = Reader(config, origins)
        self.training, self.thorough, self.resume, self.note = training, thorough, resume, note
        self.family: Qwen3VL | None = None
        self.source: Source | None = None
        self.prompts: list[Prompt] = []
        self.processed: list[ProcessedPrompt] = []
        self.no_prompts = "no prompt could be read"
        self.teacher_bytes = 0

    @property
    def model_name(self) -> str:
        return "model.path" if self.config.model.path else "model.config"


@dataclass(frozen=True)
class Topic:
    """One subject of a check.

    Attributes:
        ask: yields what it finds. It leaves nothing behind, neither files nor processes.
        needs: beginnings of option names; where one of these options is wrong the topic is left out.
        every_option: left out where any option is wrong.
        misfits: asked, and heard, where options of ``needs`` only do not fit together: their values are those meant.
        exit_code: 2 where its problems are those of the recipe itself, 1 where they are of what the recipe meets.
        training: only asked where ``Case.training``.
        thorough: only asked where ``Case.thorough``.
    """

    name: str
    ask: Callable[[Case], Iterator[Line]]
    needs: tuple[str, ...] = ()
    every_option: bool = False
    misfits: bool = False
    exit_code: int = 1
    training: bool = False
    thorough: bool = False


def problems_of(error: ConfigError, *names: str) -> Iterator[Problem]:
    """The messages of an error as problems about the options ``names``."""
    return (Problem(names, text) for text in error.problems)


def size(count: float) -> str:
    """Bytes in MiB or GiB, with two or three digits."""
    mib = count / 2**20
    if mib < 1024:
        return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"
    return f"{mib / 1024:.1f} GiB"
