"""``stretto bench run``: the cells of a plan one after another, each once, and each stage alone after the first block.

    for each block:  B, the other conditions, B       one machine, one boot
    after block 0:   processor, rollout, training     each with the others idle

A campaign goes on where it was stopped: what has finished is not run again, unless the rest of its block must run on
another machine or in another boot.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from stretto import switches
from stretto.bench.attempt import Place, Say, cell_environment, niceness, perform, recorded
from stretto.bench.campaign import Attempt, Note, attempts
from stretto.bench.design import Block, design
from stretto.bench.jobs import Job, alone_jobs, cell_job, cell_sets, writes_checkpoints
from stretto.bench.lock import held
from stretto.bench.plan import BASE, Plan, toml_text
from stretto.bench.plan_file import keep_plan
from stretto.bench.standing import quick
from stretto.child import PROGRAM, left_s
from stretto.config import Config, Seams
from stretto.observe.hardware import boot_id, machine_id
from stretto.observe.manifest import git_state, read_manifest
from stretto.observe.progress import duration
from stretto.preflight import examine
from stretto.resume import refuse_if_locked
from stretto.settings import resolve
from stretto.stops import STOPS
from stretto.training import Interrupted
from stretto.types import ConfigError, StrettoError
from stretto.wording import shown

DRIFTS = ("commit", "dependencies", "environment", "hardware")
"""Rules that no later cell keeps either where one breaks them: the surroundings have changed, not the run."""
SHOWN_REASONS = 5
Boot = tuple[str | None, str | None]
"""Machine and boot."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``failed``: a line for each job whose last attempt failed, with where its log is."""

    finished: int
    failed: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0


def run_campaign(
    plan: Plan, folder: Path, note: Say, *, program: Sequence[str] = PROGRAM, root: Path | None = None
) -> Outcome:
    """Run what of ``plan`` has not finished in ``folder``. ``note`` is told of every step, in lines. Paths of the plan,
    its recipe and its options are relative to ``root``, where every job runs (default: the working directory).

    Raises:
        ConfigError: the plan is not the folder's, or a condition cannot run; everything that is wrong, before any runs.
        StrettoError: another runner uses the folder; the code, the recipe or the environment is not what the campaign
            began with; a job failed before any had ever finished.
        Interrupted: it was asked to end.
    """
    root, folder = (root or Path()).absolute(), folder.absolute()
    with held(folder):
        if any(folder.glob("*.plan.toml")):
            keep_plan(plan, folder)  # refuses another plan at once
        for attempt in (*attempts(folder), *attempts(folder, "alone")):
            if attempt.note is None or attempt.note.status != "finished":  # what it ran may be going on
                refuse_if_locked(attempt.run_dir)
        refuse_other_code(folder)
        config = able_elsewhere(plan, folder, root)
        keep_plan(plan, folder)
        environment, dropped = cell_environment(os.environ)
        refuse_other_environment(folder, environment)
        if dropped:
            note(f"no cell sees {', '.join(dropped)}: the plan alone sets options")
        place = Place(program=program, root=root, environment=environment, plan=plan.sha256)
        try:
            return _Runner(plan, config, folder, place, note).run()
        except KeyboardInterrupt:
            note("stopped; what has finished is kept: the same command goes on")
            raise Interrupted(STOPS.exit_code) from None


def able_elsewhere(plan: Plan, folder: Path, root: Path) -> Config:
    """``able`` in a process of its own: it loads a model and asks GPUs, and nothing of that stays beside the cells."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_left_to_the_runner) as pool:
        found = pool.submit(_asked, plan, folder, root).result()
    if isinstance(found, Config):
        return found
    problems, exit_code = found
    raise ConfigError(problems, exit_code=exit_code)


def _asked(plan: Plan, folder: Path, root: Path) -> Config | tuple[list[str], int]:
    try:
        return able(plan, folder, root)
    except ConfigError as error:
        return list(error.problems), error.exit_code


def _left_to_the_runner() -> None:
    """A terminal's Ctrl-C reaches both processes; the runner says what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def able(plan: Plan, folder: Path, root: Path) -> Config:
    """The config of the baseline, once every condition is known to be able to run.

    Raises:
        ConfigError: everything that is wrong, of the baseline or else of all other conditions.
    """
    with chdir(root):
        recipe, run_dir = Path(plan.recipe), folder / "cells"

        def sets(condition: str) -> list[str]:
            own = cell_sets(plan, condition, plan.seeds[0]) | {"run.dir": str(run_dir)}
            return [f"{name}={toml_text(value)}" for name, value in own.items()]

        found = examine(recipe, sets(BASE), {}, seams=Seams(checkpoints=writes_checkpoints(plan, BASE)))
        problems = [problem.text for problem in found.problems]
        exit_code = found.exit_code
        if not problems:
            problems += [f"condition {BASE}: {text}" for text in _beyond(plan, found.config)]
        for condition in plan.conditions[1:] if not problems else ():
            resolved = resolve(recipe, sets(condition), {})
            refused = resolved.problems or switches.refusals(resolved.config) or _beyond(plan, resolved.config)
            problems += [f"condition {condition}: {text}" for text in refused]
    if problems:
        raise ConfigError([*problems, "change the plan or its recipe; no cell has been run"], exit_code=exit_code or 2)
    return found.config


def _beyond(plan: Plan, config: Config) -> list[str]:
    """What of its windows a condition with this config never reaches."""
    there = plan.updates // config.updates_per_partition
    if plan.measured[-1].last < there:
        return []
    return [
        f"windows = {shown(plan.windows)}: a window counts partitions, the lines of metrics.jsonl, and {plan.updates} "
        f"updates are {there} of them, of {config.updates_per_partition} each: end it at {there - 1}, or raise updates"
    ]


def refuse_other_code(folder: Path) -> None:
    """One campaign measures one commit.

    Raises:
        StrettoError: this checkout is dirty, or is at another commit than the first cell was; says which.
    """
    here = git_state()
    if here and here["dirty"]:
        changed = "".join(f"\n  {line}" for line in here["changed"][:10])
        raise StrettoError(
            f"the checkout at commit {here['commit']} is dirty, so that nobody could say what was measured; commit or "
            f"undo these changes:{changed}"
        )
    now = here["commit"] if here else None
    for attempt in attempts(folder):
        if attempt.note and attempt.note.status == "finished":
            session = read_manifest(attempt.run_dir)["sessions"][-1]
            began = session["git"]["commit"] if session["git"] else None
            if began != now:
                raise StrettoError(
                    f"the first cell of {folder} ran at commit {began}, and this is {now}; check that one out, or name "
                    "a new folder"
                )
            return


def refuse_other_environment(folder: Path, environment: Mapping[str, str]) -> None:
    """Cells that see other variables, or are as nice to others, are no cells of one campaign.

    Raises:
        StrettoError: these are not what the first cell that finished ran with; says which, with both values.
    """
    for attempt in _finished(attempts(folder)).values():
        note = _noted(attempt)
        if note.environment:  # earlier versions recorded none
            before, now = dict(note.environment), recorded(environment)
            before["niceness"], now["niceness"] = str(note.niceness), str(niceness())
            differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
            if differ:
                told = "".join(f"\n  {name} = {shown(before.get(name))}, now {shown(now.get(name))}" for name in differ)
                raise StrettoError(
                    f"{attempt.name} ran in another environment than this one; set it as it was, or name a new folder:"
                    f"{told}"
                )
        return


class _Runner:
    def __init__(self, plan: Plan, config: Config, folder: Path, place: Place, say: Say):
        self.plan, self.config, self.folder, self.place, self.say = plan, config, folder, place, say
        self.boot: Boot = (machine_id(), boot_id())
        self.design = design(plan.conditions, plan.seeds, plan.repetitions, plan.order)
        per = config.updates_per_partition
        self.cells = {cell: cell_job(plan, cell, per) for cell in self.design.cells}
        self.alone = alone_jobs(plan, per) if config.staleness.max > 0 else ()
        self.done: list[tuple[str, float]] = []
        self.failed: list[str] = []
        self.ever_finished = False

    def run(self) -> Outcome:
        if not self.alone:
            self.say("staleness.max = 0: no stage hides behind another, so that none is run alone")
        todo = list(self._todo())
        kept = len(self.cells) + len(self.alone) - len(todo)
        if kept:
            self.say(f"{kept} of {len(self.cells) + len(self.alone)} runs have finished earlier, and are kept")
        for at, job in enumerate(todo):
            self._one(job, [later.group for later in todo[at + 1 :]])
        return Outcome(finished=len(self.done), failed=tuple(self.failed))

    def _todo(self) -> Iterator[Job]:
        """What is to run, in order; the walls of what is kept are noted."""
        cells, alone = _finished(attempts(self.folder)), _finished(attempts(self.folder, "alone"))
        cells = {name: attempt for name, attempt in cells.items() if not self._strayed(attempt)}
        for block in self.design.blocks:
            names = [cell.name for cell in block.cells]
            again = self._again(block, cells, names)
            yield from self._chosen([self.cells[cell] for cell in block.cells], cells, again)
            if block.index == 0:
                whole = not again and cells.keys() >= set(names)
                yield from self._stages(alone, _boot(cells[names[0]]) if whole else self.boot)

    def _strayed(self, attempt: Attempt) -> bool:
        """Whether a finished cell runs again, since it ran in other surroundings than the first."""
        drifts = _drifts(self._judged(attempt))
        if drifts:
            self.say(f"{attempt.name} runs again, for its last attempt would be rejected: {drifts[0]}")
        return bool(drifts)

    def _stages(self, finished: dict[str, Attempt], home: Boot) -> Iterator[Job]:
        """Stages alone that are to run. ``home``: where block 0 runs, or ran, whose steps they set a limit to."""
        again = frozenset(name for name, attempt in finished.items() if _boot(attempt) != home)
        if home != self.boot:
            kept = tuple(job for job in self.alone if job.name in finished and job.name not in again)
            if left_out := [job.name for job in self.alone if job not in kept]:
                self.say(
                    "block 0 ran on another machine or in another boot, so that these stages alone would say nothing "
                    f"of it, and are not run: {', '.join(left_out)}"
                )
            self.alone = kept
        yield from self._chosen(self.alone, finished, again)

    def _chosen(self, jobs: Sequence[Job], finished: dict[str, Attempt], again: frozenset[str]) -> Iterator[Job]:
        for job in jobs:
            if job.name in finished and job.name not in again:
                self._keep(job, _noted(finished[job.name]))
            else:
                yield job

    def _again(self, block: Block, finished: dict[str, Attempt], names: Sequence[str]) -> frozenset[str]:
        """Finished cells of a block that run again: it is not whole, and they ran elsewhere or before."""
        boots = {name: _boot(finished[name]) for name in names if name in finished}
        if len(boots) == len(names) and len(set(boots.values())) == 1:
            return frozenset()
        again = frozenset(name for name, boot in boots.items() if boot != self.boot)
        if again:
            self.say(
                f"block {block.index} was begun on another machine or in another boot; a block is one machine in one "
                f"boot: {len(again)} finished {'cell runs' if len(again) == 1 else 'cells run'} again"
            )
        return again

    def _keep(self, job: Job, note: Note) -> None:
        self.done.append((job.group, note.wall_s))
        self.ever_finished |= job.kind == "cells"

    def _one(self, job: Job, later: Sequence[str]) -> None:
        self._refuse_changes()
        name = self._name(job)
        self.say(f"{name} ...")
        note = perform(job, self.folder, self.place, self.say)
        where = self.folder / job.kind / job.name / f"attempt-{note.attempt}"
        if note.status == "finished":
            self._keep(job, note)
            left = f"; about {duration(left_s(self.done, later))} left" if later else ""
            self.say(f"{name}: took {duration(note.wall_s)}{left}")
            if job.kind == "cells":
                self._refuse_drift(name, Attempt(path=where, name=job.name, number=note.attempt, note=note))
            return
        if not self.ever_finished:
            raise StrettoError(
                f"{name}, the first that ran, failed, and so would all others: {note.reason}\nits folder is {where}; "
                "mend the cause, and the same command begins again"
            )
        self.failed.append(f"{name}: {where / 'log.txt'}")
        self.say(f"{name} FAILED: {note.reason}\nthe campaign goes on without it; its folder is {where}")

    def _refuse_drift(self, name: str, attempt: Attempt) -> None:
        """Say at once why a cell would be rejected.

        Raises:
            StrettoError: for its surroundings, which are those of all cells to come.
        """
        reasons = self._judged(attempt)
        for reason in reasons[:SHOWN_REASONS]:
            self.say(f"    would be rejected: {reason}")
        if len(reasons) > SHOWN_REASONS:
            self.say(f"    and for {len(reasons) - SHOWN_REASONS} more reasons")
        if drifts := _drifts(reasons):
            raise StrettoError(
                f"{name} would be rejected, and so would all cells to come: {'; '.join(drifts)}\nput it back to what "
                "the first cell had, and the same command goes on; or name a new folder"
            )

    def _judged(self, attempt: Attempt) -> tuple[str, ...]:
        """Why a finished cell would be rejected, beside the first of the campaign that finished."""
        try:
            return quick(self.folder, self.plan, attempt)
        except (StrettoError, OSError) as error:
            return (f"it cannot be read: {error}",)

    def _name(self, job: Job) -> str:
        jobs: Sequence[Job] = self.alone if job.kind == "alone" else list(self.cells.values())
        at = next(number for number, other in enumerate(jobs, start=1) if other.name == job.name)
        return f"{at:02d}/{len(jobs):02d} {job.title}"

    def _refuse_changes(self) -> None:
        """Raises StrettoError where code or recipe are not, any more, what the campaign began with."""
        refuse_other_code(self.folder)
        recipe = self.place.root / self.plan.recipe
        found = hashlib.sha256(recipe.read_bytes()).hexdigest()
        if self.plan.recipe_sha256 not in ("", found):
            raise StrettoError(f"{recipe} has changed while the campaign ran; restore it, and the same command goes on")


def _finished(found: Sequence[Attempt]) -> dict[str, Attempt]:
    """By name, the last attempt where that one finished: it is the one that counts."""
    last = {attempt.name: attempt for attempt in sorted(found, key=lambda each: each.number)}
    return {name: attempt for name, attempt in last.items() if attempt.note and attempt.note.status == "finished"}


def _drifts(reasons: Sequence[str]) -> list[str]:
    return [reason for reason in reasons if reason.partition(":")[0] in DRIFTS]


def _noted(attempt: Attempt) -> Note:
    assert attempt.note is not None
    return attempt.note


def _boot(attempt: Attempt) -> Boot:
    note = _noted(attempt)
    return note.machine_id, note.boot_id
