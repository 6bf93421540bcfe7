"""The run folder: can it be written to, is it free, and what would a run go on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.machine_checks import run_folder
from stretto.preflight.case import Case, Caution, Fact, Line
from stretto.problems import Problem
from stretto.types import StrettoError


def folder(case: Case) -> Iterator[Line]:
    unwritable = list(run_folder(case.config, case.reader))
    yield from unwritable
    if not unwritable:
        where = Path(case.config.run.dir)
        yield Fact(f"{where} can be written to" + ("" if where.exists() else "; it will be made"))


def going_on(case: Case) -> Iterator[Line]:
    """What ``stretto train`` finds right after it has locked the folder; it asks the same functions."""
    from stretto.resume import find_checkpoint, refuse_if_locked
    from stretto.run_data import same_as_before

    config, where = case.config, Path(case.config.run.dir)
    try:
        refuse_if_locked(where)
        found = find_checkpoint(config, resume=case.resume)
        if found.path is not None and case.source is not None:
            same_as_before(where, case.source.facts())
    except StrettoError as error:
        yield Problem(("run.dir",), str(error))
        return
    for path, why in found.passed_over:
        yield Caution(f"passed over {path.name}: {why}")
    if found.path is not None:
        done = int(found.state["cursor"]) * config.updates_per_partition
        if done >= config.updates_to_train:
            yield Fact(f"all of its {config.updates_to_train} updates are trained: there is nothing left to do")
        else:
            yield Fact(f"goes on from {found.path.name}, with update {done + 1} of {config.updates_to_train}")
    elif case.resume:
        yield Fact(f"nothing to go on from in {where}: training starts at update 1")
    else:
        yield Fact(f"a new run of {config.updates_to_train} updates")
