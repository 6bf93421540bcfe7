"""``stretto parity check``: a recipe live and replayed under every condition, compared, and reported.

    live      B (records)   B again   P   P+R   P+S        N updates each
    replay    B             B again   P   P+R   P+S        K recorded partitions, for each number of ranks
    compare   B with every other run of its row; the first B with the live one; B on other ranks; B with float64
    report    report.md, report.json, curves.png

Every run is ``stretto`` in a process of its own; this one reads run folders alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from stretto import switches
from stretto.config import Config, Seams
from stretto.observe.dump import read_dump
from stretto.observe.lineage import write_atomically
from stretto.observe.manifest import read_manifest
from stretto.observe.trace import read_events
from stretto.parity import curves, report, table
from stretto.parity.cells import Cells, Done
from stretto.parity.compare import compare
from stretto.parity.inputs import inputs
from stretto.parity.plan import BASE, Cell, Plan, Question, live_sets, make_plan
from stretto.parity.report import Compared, Engaged, Referenced, Report
from stretto.preflight import examine
from stretto.resume import locked
from stretto.settings import resolve
from stretto.stops import STOPS
from stretto.training import Interrupted
from stretto.types import ConfigError, StrettoError

WORKERS = 2
"""Of P, where neither the command nor the recipe says how many: more than one, so that order is tested."""
REFERENCE_PARAMETERS = 50_000_000
"""A larger model is not run in float64: it would take longer than all the rest."""
SEAMS = Seams(checkpoints=False)
"""Of every run of a check: none writes a checkpoint, so that none needs room for one."""
BOUNDS = {"float32": 1e-5, "bfloat16": 6e-2}
"""Relative l2 distance of gradients from float64 that rounding of a compute dtype explains. Measured were 1e-6, and in
bfloat16 1.1e-2 (2 and 8 layers) to 3.1e-2 (28 layers, H200)."""

Note = Callable[[str], None]


def check(question: Question, note: Note, *, draw: bool = True) -> Report:
    """Run, compare and report; what is there already of an earlier call is kept.

    Raises:
        ConfigError: the recipe, or a condition under it, cannot run; everything that is wrong, before anything runs.
        StrettoError: a run failed; matplotlib is not there and ``draw`` is asked for; another check uses the folder.
        Interrupted: it was asked to end.
    """
    if draw and not curves.available():
        raise StrettoError("curves.png needs matplotlib: pip install 'stretto[plots]', or add --no-curves")
    recipe = resolve(Path(question.recipe), question.sets, os.environ).config
    question = replace(
        question,
        workers=question.workers or recipe.switches.processor_pool or WORKERS,
        ranks=question.ranks or (recipe.actor.data_parallel,),
    )
    config = settled(question)
    plan = make_plan(question, config, reference=not no_reference(config))
    asked = {"config": config.model_dump(mode="json"), "inputs": inputs(config)}
    with locked(question.out):
        cells = Cells(question.out, question.recording, asked, note)
        try:
            done = cells.run(plan.cells)
            note("comparing")
            cells.forget_report()
            found = assemble(question, config, plan, done, cells, draw=draw)
        except KeyboardInterrupt:
            note("stopped; runs that have ended are kept: the same command goes on")
            raise Interrupted(STOPS.exit_code) from None
        write(found)
    return found


def settled(question: Question) -> Config:
    """The config of the live baseline, once every condition and number of ranks is known to be able to run.

    Raises:
        ConfigError: everything that is wrong, of all conditions at once, or else of all numbers of ranks.
    """
    recipe, run_dir = Path(question.recipe), question.out / "live" / BASE
    found = examine(recipe, live_sets(question, BASE, run_dir), seams=SEAMS)
    problems = [problem.text for problem in found.problems]
    exit_code = found.exit_code
    for condition in question.conditions[1:] if not problems else ():
        resolved = resolve(recipe, live_sets(question, condition, run_dir), os.environ)
        refused = resolved.problems or switches.refusals(resolved.config)
        problems += [f"condition {condition}: {text}" for text in refused]
    for ranks in question.ranks if not problems else ():
        if ranks != found.config.actor.data_parallel:
            other = examine(recipe, [*live_sets(question, BASE, run_dir), f"actor.data_parallel={ranks}"], seams=SEAMS)
            problems += [f"--ranks {ranks}: {problem.text}" for problem in other.problems]
            exit_code = max(exit_code, other.exit_code)
    if problems and not exit_code:
        problems.append("leave these conditions out by --conditions, or change the recipe by --set")
    if problems:
        raise ConfigError(problems, exit_code=exit_code or 2)
    return found.config


def assemble(
    question: Question, config: Config, plan: Plan, done: Sequence[Done], cells: Cells, *, draw: bool
) -> Report:
    """Reads what the runs have left."""
    compared = tuple(
        Compared(
            comparison=pair,
            verdict=compare(
                pair.base.run_dir,
                pair.other.run_dir,
                pair.control.run_dir if pair.control else None,
                updates=pair.partitions,
            ),
        )
        for pair in plan.comparisons
    )
    live = [cell for cell in plan.cells if not cell.replay]
    base = read_manifest(live[0].run_dir)["sessions"][-1]
    why_not = no_reference(config)
    far = None
    if draw:
        runs = {cell.condition: cell.run_dir for cell in live}
        far = curves.draw(runs, question.out / "curves.png", f"{question.recipe}, live")
    return Report(
        question=question,
        plan=plan,
        facts=facts(base),
        done=tuple(done),
        compared=compared,
        engaged=tuple(each for cell in plan.cells for each in engaged(cell)),
        referenced=() if why_not else against_float64(question, plan, config, cells),
        reference_note=why_not,
        curves=far,
    )


def engaged(cell: Cell) -> list[Engaged]:
    """What the events of a run say of each switch that is on in it."""
    events = list(read_events(cell.run_dir / "events.jsonl"))
    if cell.replay:
        # All groups are put within milliseconds: whether a forward of S begins in between is chance. Without those
        # events it is asked to claim by chunk, and no more.
        events = [event for event in events if event.get("name") != "plane.put"]
    found = []
    for switch in switches.ALL:
        if switch.letter in cell.condition.split("+"):
            evidence = switch.engaged(events)
            found.append(
                Engaged(
                    cell=cell.name,
                    switch=switch.letter,
                    ok=evidence.ok,
                    opportunity=evidence.opportunity,
                    facts=evidence.facts,
                )
            )
    return found


def facts(session: Mapping[str, Any]) -> dict[str, str]:
    """What a reader wants to know of the baseline's run."""
    config, hardware = session["config"], session["hardware"]
    git = session["git"] or {}
    rollout = config["rollout"]
    packages = ("torch", "transformers", "ray", "stretto")
    return {
        "model": f"{config['model']['path'] or 'random'}, {config['model']['dtype']}, parameters "
        f"{session['model'].get('fingerprint')} before training",
        "rollout batch": f"{rollout['prompts_per_partition']} prompts x {rollout['n_samples_per_prompt']} samples",
        "staleness": f"{config['staleness']['mode']}, at most {config['staleness']['max']}",
        "determinism": config["run"]["determinism"],
        "machine": f"{hardware['cpu']}, {hardware['cores']} cores; GPUs: "
        f"{', '.join(str(gpu.get('name')) for gpu in hardware.get('gpus') or []) or 'none'}",
        "versions": ", ".join(f"{name} {session['versions'].get(name)}" for name in packages),
        "commit": f"{git.get('commit', 'not a checkout')}{' (with changes)' if git.get('dirty') else ''}",
    }


def no_reference(config: Config) -> str:
    """Why gradients of this model are not held against float64; empty where they are."""
    from stretto.models.loading import DTYPES, weight_bytes, without_weights
    from stretto.models.parts import has_dropout

    parameters = weight_bytes(config.model) // DTYPES[config.model.dtype].itemsize
    if parameters > REFERENCE_PARAMETERS:
        return f"Left out: of {parameters:,} parameters; over {REFERENCE_PARAMETERS:,} it takes longer than the rest."
    if config.lora.dropout > 0 or has_dropout(without_weights(config.model)):
        return "Left out: with dropout, every arithmetic draws other units."
    return ""


def against_float64(question: Question, plan: Plan, config: Config, cells: Cells) -> tuple[Referenced, ...]:
    """Gradients of the first partition of each B that was replayed, against float64; where that cannot be, why."""
    bases = [cell for cell in plan.cells if cell.replay and cell.condition == BASE]
    bound = BOUNDS[config.model.dtype]
    try:
        cells.made(question.reference, "stretto.parity.reference")
    except StrettoError as error:
        return tuple(unreferenced(cell, bases[0], bound, error) for cell in bases)
    reference = load_file(question.reference)
    return tuple(referenced(cell, bases[0], bound, reference) for cell in bases)


def referenced(cell: Cell, first: Cell, bound: float, reference: Mapping[str, np.ndarray]) -> Referenced:
    """Its gradients against the reference, and against those of ``first``."""
    from stretto.parity.reference import distance

    try:
        dump = read_dump(cell.run_dir, 0)
        far, from_first = distance(dump, reference), distance(dump, read_dump(first.run_dir, 0))
    except StrettoError as error:
        return unreferenced(cell, first, bound, error)
    return Referenced(
        ranks=cell.ranks,
        largest=far.tensor_max,
        relative=far.l2,
        tensor=far.tensor,
        bound=bound,
        first_ranks=first.ranks,
        from_first=from_first.l2,
    )


def unreferenced(cell: Cell, first: Cell, bound: float, error: StrettoError) -> Referenced:
    """A failure: nothing is known of these gradients, or they are no numbers."""
    return Referenced(
        ranks=cell.ranks,
        largest=math.nan,
        relative=math.nan,
        tensor="",
        bound=bound,
        first_ranks=first.ranks,
        from_first=math.nan,
        problem=" ".join(str(error).split()),
    )


def write(found: Report) -> None:
    """``report.md`` and ``report.json``, whole."""
    out = found.question.out
    write_atomically(
        out / "report.json", (json.dumps(table.strict(found.plain()), indent=1, allow_nan=False) + "\n").encode()
    )
    write_atomically(out / "report.md", report.markdown(found).encode())
