"""How well rollout and training overlap: each alone, both together, and what the framework adds.

    python benchmarks/pipeline.py --model runs/digits-sft [--updates 30] [--repetitions 3] [--out results/pipeline-cpu]

Every cell is a fresh process that trains by ``stretto.loop.train``; the order of cells is mirrored from one repetition
to the next. The cells:

- ``alone``  staleness.max = updates, so that the first weights generate every partition, and a phase 1 that waits for
             all of them before it claims the first: rollout runs with the actor idle, then the actor with rollout idle.
- ``s0`` …   both together at staleness.max = 0, 1, 2, as the recipe has it.

A cell beside which other processes used more than 0.1 cores is run again, up to --attempts times; its quietest attempt
counts, chosen by that load alone, and the figures of all attempts are in the JSON. --quiet makes a cell wait for a
quiet machine before it starts. Checkpoints and evaluations are off (``--set`` turns them on). The first 5 and the last
3 updates are left out of all figures: the first warm up, in the last there is no next partition left to generate.
Seconds are means over the measured updates of a cell; over repetitions: median (least-greatest).

Framework overhead of the actor's side: the step (from one ``loop.step`` to the next) less the union of
``actor.forward``, ``actor.train``, ``actor.optimizer`` and of waiting, which is ``loop.claim`` up to the last
``plane.put`` of the partition. So fetch, advantages, publishing, evidence, the claim itself, calls between processes,
the driver and its files all count as overhead; the layout of microbatches, in the spans of forward and training, does
not. Of the rollout's side: its time for a partition (``rollout_s + rollout_load_s``) less the union of
``processor.process`` and ``rollout.generate``: rewards and puts that nothing hides, weights, calls. Evidence is
``actor.evidence``: fingerprints and the gathering of the raw values.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from itertools import chain
from pathlib import Path
from typing import Any

from harness import setting, spread, train, wait_until_quiet

from stretto.bench.alone import GenerateFirst
from stretto.controller import Run
from stretto.observe.metrics import read_metrics
from stretto.observe.spans import intersection, intervals, seconds
from stretto.observe.trace import read_events

WARM_UP, WIND_DOWN = 5, 3
QUIET = 0.1
"""Cores in use by others, on average over a cell, above which its figures are not trusted."""
ACTOR_WORK = ("actor.forward", "actor.train", "actor.optimizer")
ROLLOUT_WORK = ("processor.process", "rollout.generate")
ACTOR_OTHER = ("actor.fetch", "actor.advantages", "actor.publish", "actor.evidence")


def cell(name: str, args: argparse.Namespace, run_dir: Path) -> None:
    """One run, in a process of its own; writes ``load.json`` beside what the run leaves."""
    staleness = args.updates if name == "alone" else int(name[1:])
    sets = [f"model.path={args.model}", f"run.updates={args.updates}", "checkpoint.every=0", "eval.every=0"]
    sets += [f"staleness.max={staleness}", *args.set]

    def prepare(run: Run) -> None:
        if name == "alone":
            run.phase1 = GenerateFirst(run)

    load = train(args.recipe, sets, run_dir, prepare)
    (run_dir / "load.json").write_text(json.dumps(vars(load)))


def measure(name: str, repetition: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The attempts at one cell, the last of which was quiet where any was."""
    attempts: list[dict[str, Any]] = []
    while len(attempts) < args.attempts and not (attempts and attempts[-1]["load_others"] < QUIET):
        wait_until_quiet(args.quiet)
        run_dir = args.runs / f"{repetition}-{name}-{len(attempts)}"
        process = multiprocessing.get_context("spawn").Process(target=cell, args=(name, args, run_dir))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"cell {name} of repetition {repetition} failed, see {run_dir}")
        found = analyse(name, run_dir)
        print(f"{run_dir.name}: step {found['step']:.3f} s; others used {found['load_others']:.2f} cores", flush=True)
        attempts.append(found)
    return attempts


def analyse(name: str, run_dir: Path) -> dict[str, Any]:
    """Seconds per update of one cell, by the spans of its processes."""
    events, rows = read_events(run_dir / "events.jsonl"), read_metrics(run_dir)
    first, last = WARM_UP, len(rows) - WIND_DOWN
    rows, count = rows[first:last], last - first
    begins = sorted(start for start, _ in intervals(events, "loop.step"))
    put = {k: max(end for _, end in intervals(events, "plane.put", partition=k)) for k in range(first - 1, last)}
    found: dict[str, Any] = {
        "step": sum(row["step_s"] for row in rows) / count,
        "tokens": sum(row["tokens"] for row in rows) / count,
        **{"load_" + key: value for key, value in json.loads((run_dir / "load.json").read_text()).items()},
    }
    if name == "alone":
        found["rollout"] = (put[last - 1] - put[first - 1]) / 1e9 / count

    # The actor's side: a step lasts from its loop.step to the next one's; claiming is waiting until the last put.
    window = (begins[first], begins[last])
    claims = [(k, span) for k in range(first, last) for span in intervals(events, "loop.claim", partition=k)]
    waits = [(start, min(end, put[k])) for k, (start, end) in claims if put[k] > start]
    work = list(chain.from_iterable(intervals(events, span) for span in ACTOR_WORK))
    found |= {span: seconds(intervals(events, span), window) / count for span in (*ACTOR_WORK, *ACTOR_OTHER)}
    found["wait"] = seconds(waits, window) / count
    found["claim after the last put"] = sum(end - max(start, put[k]) for k, (start, end) in claims) / 1e9 / count
    found["actor_overhead"] = (window[1] - window[0]) / 1e9 / count - seconds(work + waits, window) / count
    named = sum(found[span] for span in ACTOR_OTHER) + found["claim after the last put"]
    found["driver and calls"] = found["actor_overhead"] - named

    # The rollout's side, from its own reports, and the time in which neither side worked.
    span = (put[first - 1], put[last - 1])
    generated = list(chain.from_iterable(intervals(events, name) for name in ROLLOUT_WORK))
    found |= {name: seconds(intervals(events, name), span) / count for name in ROLLOUT_WORK}
    busy = sum(row["rollout_s"] + row["rollout_load_s"] for row in rows) / count
    found["rollout_overhead"] = busy - seconds(generated, span) / count
    found["rollout_wait"] = sum(row["rollout_waited_s"] for row in rows) / count
    found["neither"] = ((window[1] - window[0]) / 1e9 - seconds(work + generated, window)) / count
    found["both"] = seconds(intersection(work, generated), window) / count
    return found


def derive(repetition: dict[str, dict[str, Any]]) -> None:
    """Adds to each cell of a repetition what relates it to the ``alone`` cell of the same repetition."""
    rollout, training = repetition["alone"]["rollout"], repetition["alone"]["step"]
    limit, total = max(rollout, training), rollout + training
    for name, found in repetition.items():
        found["overhead_share"] = found["actor_overhead"] / found["step"]
        found["rollout_overhead_share"] = found["rollout_overhead"] / found["step"]
        found["evidence_share"] = found["actor.evidence"] / found["step"]
        if name != "alone":
            found["position"] = (found["step"] - limit) / (total - limit)
        if name not in ("alone", "s0"):
            found["efficiency"] = limit / found["step"]


def table(cells: dict[str, list[dict[str, Any]]]) -> str:
    def column(name: str, key: str, scale: float = 1.0, digits: int = 3) -> str:
        values = [found[key] * scale for found in cells[name] if key in found]
        return spread(values, digits) if values else ""

    lines = ["| | seconds per update | efficiency | place between max (0) and sum (1) | load of others, cores |"]
    lines += ["|---|---|---|---|---|"]
    for name in cells:
        label = {"alone": "train alone"}.get(name, f"both, s = {name[1:]}")
        if name == "alone":
            lines.append(f"| rollout alone | {column(name, 'rollout')} | | | {column(name, 'load_others', 1, 2)} |")
        middle = [column(name, key) for key in ("step", "efficiency", "position")]
        lines.append(f"| {label} | {' | '.join(middle)} | {column(name, 'load_others', 1, 2)} |")
    shares = {
        "framework overhead, actor's side, % of step": ("overhead_share", 100.0, 1),
        "framework overhead, rollout's side, % of step": ("rollout_overhead_share", 100.0, 1),
        "evidence in the actor, % of step": ("evidence_share", 100.0, 2),
        "actor waits for groups, ms": ("wait", 1e3, 1),
        "rollout waits for weights, ms": ("rollout_wait", 1e3, 1),
        "both work, ms": ("both", 1e3, 1),
        "neither works, ms": ("neither", 1e3, 1),
        **{f"{key}, ms": (key, 1e3, 1) for key in (*ACTOR_WORK, *ROLLOUT_WORK)},
        **{
            f"overhead: {key}, ms": (key, 1e3, 1)
            for key in (*ACTOR_OTHER, "claim after the last put", "driver and calls")
        },
        "tokens per update": ("tokens", 1.0, 0),
    }
    lines += ["", "| | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for label, (key, scale, digits) in shares.items():
        lines.append(f"| {label} | " + " | ".join(column(name, key, scale, digits) for name in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/digits.toml"))
    parser.add_argument("--model", type=Path, required=True, help="model folder, made by `stretto sft`")
    parser.add_argument("--updates", type=int, default=30, help="updates of each cell")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--attempts", type=int, default=1, help="runs of a cell while others disturb it")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="S", help="seconds to wait for a quiet machine")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2], help="bounds of the cells together")
    parser.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE", help="change the recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="new folder for the runs")
    parser.add_argument("--out", type=Path, help="write the figures to OUT.json and the table to OUT.md")
    args = parser.parse_args()
    if args.updates <= WARM_UP + WIND_DOWN:
        parser.error(f"--updates must be above {WARM_UP + WIND_DOWN}, the updates that are left out")
    names = ["alone", *(f"s{bound}" for bound in args.staleness)]
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    tried: list[dict[str, Any]] = []
    for repetition in range(args.repetitions):
        found = {}
        for name in names if repetition % 2 == 0 else reversed(names):
            attempts = measure(name, repetition, args)
            found[name] = min(attempts, key=lambda attempt: attempt["load_others"])
            tried += ({"cell": name, "repetition": repetition, **attempt} for attempt in attempts)
        derive(found)
        for name in names:
            cells[name].append(found[name])
    text = table(cells)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        chosen = {key: value for key, value in vars(args).items() if key not in ("out", "runs")}
        record = {"arguments": chosen, "warm_up": WARM_UP, "wind_down": WIND_DOWN, "setting": setting()}
        record |= {"cells": cells, "attempts": tried}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
