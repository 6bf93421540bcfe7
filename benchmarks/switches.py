"""What R and S are worth against the baseline, as ratios within one run of this script.

    python benchmarks/switches.py --model runs/digits-sft [--updates 40] [--repetitions 3] [--out results/switches-cpu]

Cells are fresh processes that train the same recipe: B, R, S at ``staleness.max`` = 1, then B and S at 0, where phase 1
can overlap generation. The order is mirrored from one repetition to the next. The first 5 updates are left out. A ratio
is that of the two cells of one repetition; over repetitions: median (least-greatest).

- phase 1 + 3: ``forward_s + phase3_s``, what the actor computes in a step
- after the last group: ``forward_s * (1 - overlap_fraction)``, what is left of phase 1 once the partition is complete
- step: ``step_s``; tokens are the same in every cell, since all train the same bits (the script checks that)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

from harness import setting, spread, train, wait_until_quiet

from stretto.observe.metrics import read_fingerprints, read_metrics

WARM_UP = 5
CELLS = {
    "B, s = 1": ("switches.chunk_overlap=false", "staleness.max=1"),
    "R, s = 1": ("switches.logprob_reuse=true", "staleness.max=1"),
    "S, s = 1": ("switches.chunk_overlap=true", "staleness.max=1"),
    "B, s = 0": ("switches.chunk_overlap=false", "staleness.max=0"),
    "R, s = 0": ("switches.logprob_reuse=true", "staleness.max=0"),
    "S, s = 0": ("switches.chunk_overlap=true", "staleness.max=0"),
}
FIGURES = {
    "phase 1 + 3": lambda row: row["forward_s"] + row["phase3_s"],
    "after the last group": lambda row: row["forward_s"] * (1 - row["overlap_fraction"]),
    "phase 1": lambda row: row["phase1_s"],
    "exposed wait": lambda row: row["exposed_wait_s"],
    "phase 3": lambda row: row["phase3_s"],
    "step": lambda row: row["step_s"],
    "overlap": lambda row: row["overlap_fraction"],
}


def run(recipe: Path, sets: list[str], folder: Path) -> None:
    load = train(recipe, sets, folder)
    (folder / "load.json").write_text(json.dumps(vars(load)))


def cell(name: str, repetition: int, args: argparse.Namespace) -> dict[str, Any]:
    wait_until_quiet(args.quiet)
    folder = args.runs / f"{name.replace(', s = ', '')}-{repetition}"
    sets = [f"model.path={args.model}", f"run.updates={args.updates}", "eval.every=0", "checkpoint.every=0"]
    sets += [f"rollout.groups_per_decode_batch={args.batch}", *args.set, *CELLS[name]]
    process = multiprocessing.get_context("spawn").Process(target=run, args=(args.recipe, sets, folder))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{name} ended with {process.exitcode}; see {folder / 'output.log'}")
    rows = read_metrics(folder)[WARM_UP:]
    found = {figure: sum(map(of, rows)) / len(rows) for figure, of in FIGURES.items()}
    found["others"] = json.loads((folder / "load.json").read_text())["others"]
    return found | {"parameters": [line["parameters"] for line in read_fingerprints(folder)]}


def table(cells: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| seconds an update | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    lines += [
        f"| {figure} | " + " | ".join(spread([r[figure] for r in found]) for found in cells.values()) + " |"
        for figure in FIGURES
    ]
    others = " | ".join(spread([r["others"] for r in found], 2) for found in cells.values())
    lines += [f"| load of others, cores | {others} |", "", "| ratio to B | R, s = 1 | S, s = 1 | R, s = 0 | S, s = 0 |"]
    lines += ["|---|---|---|---|---|"]
    for figure in ("phase 1 + 3", "after the last group", "phase 1", "step"):
        ratios = []
        for name in ("R, s = 1", "S, s = 1", "R, s = 0", "S, s = 0"):
            base = cells[f"B{name[1:]}"]
            ratios.append(spread([one[figure] / b[figure] for one, b in zip(cells[name], base, strict=True)]))
        lines.append(f"| {figure} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/digits.toml"))
    parser.add_argument("--model", type=Path, required=True, help="model folder, made by `stretto sft`")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="groups of a decode batch")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.0, metavar="S", help="seconds to wait for a quiet machine")
    parser.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE", help="change the recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark-switches"), help="new folder for the runs")
    parser.add_argument("--out", type=Path, help="write the figures to OUT.json and the table to OUT.md")
    args = parser.parse_args()
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in CELLS}
    for repetition in range(args.repetitions):
        for name in CELLS if repetition % 2 == 0 else reversed(CELLS):
            cells[name].append(cell(name, repetition, args))
            print(f"{repetition + 1}/{args.repetitions} {name}: step {cells[name][-1]['step']:.3f} s", flush=True)
        for name, found in cells.items():
            if found[-1]["parameters"] != cells[f"B{name[1:]}"][-1]["parameters"]:
                raise SystemExit(f"{name} trained other parameters than B: the figures would compare different work")
    text = table(cells)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"arguments": {k: str(v) for k, v in vars(args).items() if k not in ("out", "runs")}, "cells": cells}
        args.out.with_suffix(".json").write_text(json.dumps(record | {"setting": setting()}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
