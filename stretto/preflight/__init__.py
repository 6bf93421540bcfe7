"""All that can be known about a run before any of its processes is started, asked in one go.

A check is a list of topics. ``stretto train`` asks them at its start (``checked``), ``stretto doctor`` asks the same
ones and those that take long (``examine(thorough = True)``): what one of the two refuses, the other refuses too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.config import Config, Seams
from stretto.data.check import Note, silent
from stretto.preflight.batch import batch
from stretto.preflight.capacity import disk, memory
from stretto.preflight.case import Case, Fact, Finding, Line, Topic
from stretto.preflight.data import data, forward
from stretto.preflight.folder import folder, going_on
from stretto.preflight.hook import hook
from stretto.preflight.machine import machine
from stretto.preflight.model import model
from stretto.preflight.reward import reward
from stretto.preflight.switches import switches
from stretto.problems import Problem
from stretto.settings import NOTHING, OPTIONS, Resolved, resolve
from stretto.types import ConfigError
from stretto.wording import Given

__all__ = ["Examination", "checked", "examine"]

TOPICS = (
    Topic("machine", machine, ("cluster.", "actor.data_parallel", "rollout.replicas")),
    Topic("run folder", folder, ("run.dir",)),
    Topic("model", model, ("model.",)),
    Topic("data", data, ("data.",)),
    Topic("forward", forward, ("model.", "data.")),
    Topic("batches", batch, ("model.", "data."), exit_code=2, training=True),
    Topic("switches", switches, ("switches.", "algorithm.", "lora."), misfits=True, exit_code=2, training=True),
    Topic("reward", reward, ("reward.",), training=True),
    Topic("hook", hook, ("actor.before_logprob_hook",), training=True),
    Topic("memory", memory, ("model.", "cluster.", "staleness.", "plane.", "actor.data_parallel"), training=True),
    Topic("disk", disk, ("model.", "run.", "checkpoint.", "staleness."), training=True),
    Topic("resume", going_on, ("run.dir",), every_option=True, training=True, thorough=True),
)
"""In this order: later ones use what earlier ones have loaded."""


@dataclass(frozen=True)
class Examination:
    """A config and everything that was found about it.

    ``config`` has the defaults in place of values that are wrong; ``sources`` says where each came from.
    """

    config: Config
    sources: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> list[Problem]:
        return [problem for finding in self.findings for problem in finding.problems]

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong; 2: the recipe is; 1: the recipe is sound, but not for this machine, model or data."""
        return max((finding.exit_code for finding in self.findings if finding.problems), default=0)


def checked(
    recipe: Path | None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    training: bool = True,
    base: Mapping[str, Given] = NOTHING,
    seams: Seams | None = None,
) -> tuple[Config, dict[str, str]]:
    """``stretto.settings.load``, and everything else that can be asked before a start; ``base`` and ``seams`` as of
    ``stretto.settings.resolve``.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    found = examine(recipe, sets, environ, training=training, base=base, seams=seams)
    if found.problems:
        raise ConfigError([problem.text for problem in found.problems], exit_code=found.exit_code)
    return found.config, found.sources


def examine(
    recipe: Path | None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    training: bool = True,
    thorough: bool = False,
    resume: bool = False,
    note: Note = silent,
    base: Mapping[str, Given] = NOTHING,
    seams: Seams | None = None,
) -> Examination:
    """Ask every topic whose options are sound. Starts reward processes and ends them; leaves nothing behind.

    Of a recipe that can not be read nothing is asked: the options would not be those that are meant.
    """
    resolved = resolve(recipe, sets, environ, training=training, base=base, seams=seams)
    case = Case(resolved.config, resolved.sources, training=training, thorough=thorough, resume=resume, note=note)
    findings = [Finding("options", tuple(_options(resolved)), exit_code=2)]
    doubtful = dict.fromkeys(sorted(resolved.doubtful))  # in the order in which they were found
    for topic in () if resolved.unread else TOPICS:
        if (topic.training and not training) or (topic.thorough and not thorough):
            continue
        finding = Finding(topic.name, tuple(_asked(topic, case, resolved, doubtful)), topic.exit_code)
        doubtful.update(dict.fromkeys(name for problem in finding.problems for name in problem.names))
        findings.append(finding)
    return Examination(resolved.config, resolved.sources, tuple(findings))


def _options(resolved: Resolved) -> Iterator[Line]:
    for text in resolved.problems:
        yield Problem((), text)
    if resolved.unread:
        yield Fact("nothing else is looked at, since the recipe can not be read")
        return
    given = [origin for name, origin in resolved.sources.items() if name in OPTIONS and origin != "default"]
    kinds = {kind: sum(origin.split(" ")[0] == kind for origin in given) for kind in ("file", "environment", "--set")}
    counted = ", ".join(f"{count} by {kind}" for kind, count in kinds.items() if count)
    yield Fact(f"{len(given)} of {len(OPTIONS)} set" + (f" ({counted})" if counted else ""))


def _asked(topic: Topic, case: Case, resolved: Resolved, doubtful: Collection[str]) -> Iterator[Line]:
    """What a topic finds, but for what is said of options that are doubtful already: it would only repeat that."""
    doubts = [name for name in doubtful if name.startswith(topic.needs)]
    if topic.misfits:
        doubts = [name for name in doubts if name in resolved.unknown]
    if topic.every_option:  # what the machine lacks does not make the options other ones
        doubts += sorted(resolved.doubtful)
    if doubts:
        why = f"there is a problem with {doubts[0]}"
        if topic.ask is data:
            case.no_prompts = why
        yield Fact(f"not looked at, since {why}")
        return
    said = resolved.unknown if topic.misfits else set(doubtful)
    yield from (line for line in topic.ask(case) if not (isinstance(line, Problem) and said & set(line.names)))
