"""The same job under Stretto (condition B, s = 1, one thread a side) and under TRL's GRPOTrainer (one process).

    python benchmarks/against_trl.py --model runs/digits-sft --trl-python TRLVENV/bin/python --out results/trl-cpu

TRL lives in an environment of its own (``pip install trl torch transformers datasets pillow``). Both start from the
same model, on the same rows: 64 prompts x 8 samples of at most 8 tokens, float32, one AdamW update a step, token mean,
no KL; a constant learning rate for TRL, the recipe's schedule for Stretto. TRL gets its images as its users give them,
PIL images in a column of ``datasets``. Cells alternate, mirrored from one repetition to the next. Samples per second
are over the steps after the warm-up: their samples by their seconds, from the end of one step to the end of the next,
Stretto's evidence (fingerprints, raw values) included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from harness import Load, measured_load, setting, spread, train, wait_until_quiet
from PIL import Image

from stretto.data.source import open_source
from stretto.observe.metrics import read_metrics
from stretto.settings import load

PROMPTS, N, TOKENS = 64, 8, 8


def write_rows(args: argparse.Namespace) -> Path:
    """The prompts that the measured steps show, as images and text for TRL."""
    config, _ = load(args.recipe, [f"model.path={args.model}"])
    source = open_source(config.data, "train")
    folder = args.runs / "rows"
    folder.mkdir(parents=True)
    rows = []
    for index in range(min(len(source), args.steps * PROMPTS)):
        prompt = source[index]
        path = folder / f"{index}.png"
        Image.fromarray(prompt.images[0]).save(path)
        question = next(part["text"] for part in prompt.messages[0]["content"] if part["type"] == "text")
        rows.append({"question": question, "image": str(path), "answer": prompt.answer})
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def stretto_cell(args: argparse.Namespace, run_dir: Path) -> None:
    sets = [f"model.path={args.model}", f"run.updates={args.steps}", "checkpoint.every=0", "eval.every=0"]
    sets += [f"rollout.prompts_per_partition={PROMPTS}", f"rollout.n_samples_per_prompt={N}"]
    sets += [f"rollout.max_response_tokens={TOKENS}", "staleness.max=1", *args.set]
    used = train(args.recipe, sets, run_dir)
    (run_dir / "load.json").write_text(json.dumps(vars(used)))


def run_stretto(args: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    process = multiprocessing.get_context("spawn").Process(target=stretto_cell, args=(args, run_dir))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{run_dir} failed, see its output.log")
    rows = read_metrics(run_dir)
    steps = [{"step_s": row["step_s"], "reward": row["reward_mean"]} for row in rows]
    phases = {key: statistics.mean(row[key] for row in rows[args.warm_up :]) for key in rows[0] if key.endswith("_s")}
    return {"steps": steps, "phases": phases, **json.loads((run_dir / "load.json").read_text())}


def run_trl(args: argparse.Namespace, run_dir: Path, rows: Path, threads: int) -> dict[str, Any]:
    run_dir.mkdir(parents=True)
    times = run_dir / "times.jsonl"
    given = {
        "model": str(args.model),
        "rows": str(rows),
        "output": str(run_dir / "out"),
        "times": str(times),
        "threads": threads,
        "prompts": PROMPTS,
        "n": N,
        "max_tokens": TOKENS,
        "microbatch": args.trl_microbatch,
        "steps": args.steps,
        "lr": args.lr,
        "seed": 0,
    }
    (run_dir / "settings.json").write_text(json.dumps(given))
    used = Load()
    with measured_load(used), (run_dir / "output.log").open("w") as log:
        command = [args.trl_python, str(Path(__file__).with_name("trl_side.py")), str(run_dir / "settings.json")]
        environ = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    rewards = {line["logged"]: line["reward"] for line in lines if "logged" in line}
    steps = [{"step_s": line["step_s"], "reward": rewards.get(line["step"])} for line in lines if "step" in line]
    return {"steps": steps, **vars(used)}


def samples_per_s(cell: dict[str, Any], warm_up: int) -> float:
    measured = cell["steps"][warm_up:]
    return PROMPTS * N * len(measured) / sum(step["step_s"] for step in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/digits.toml"))
    parser.add_argument("--model", type=Path, required=True, help="model folder, made by `stretto sft`")
    parser.add_argument("--trl-python", required=True, help="Python of an environment that has trl")
    parser.add_argument("--trl-microbatch", type=int, default=128, help="per_device_train_batch_size")
    parser.add_argument("--steps", type=int, default=25, help="steps of each cell")
    parser.add_argument("--warm-up", type=int, default=5, help="first steps left out")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--lr", type=float, default=4e-4, help="TRL's learning rate")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1], help="TRL's threads, a cell each")
    parser.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE", help="change the recipe")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="S", help="seconds to wait for a quiet machine")
    parser.add_argument("--runs", type=Path, default=Path("runs/against-trl"), help="new folder for the runs")
    parser.add_argument("--out", type=Path, help="write OUT.json")
    args = parser.parse_args()
    args.runs = args.runs.absolute()
    rows = write_rows(args)
    names = ["stretto", *(f"trl-{threads}" for threads in args.threads)]
    cells: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repetition in range(args.repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            wait_until_quiet(args.quiet)
            run_dir = args.runs / f"{repetition}-{name}"
            threads = name.removeprefix("trl-")
            cell = run_stretto(args, run_dir) if name == "stretto" else run_trl(args, run_dir, rows, int(threads))
            cells[name].append(cell)
            print(f"{run_dir.name}: {samples_per_s(cell, args.warm_up):.0f} samples/s", flush=True)
    rates = {name: [samples_per_s(cell, args.warm_up) for cell in found] for name, found in cells.items()}
    for name, values in rates.items():
        ratios = [own / other for own, other in zip(rates["stretto"], values, strict=True)]
        print(f"{name:8} {spread(values, 0)} samples/s; stretto is {spread(ratios, 2)} times as fast")
    if args.out:
        chosen = {
            key: str(value) for key, value in vars(args).items() if key not in ("out", "runs", "model", "trl_python")
        }
        record = {"arguments": chosen, "setting": setting(), "samples_per_s": rates, "cells": cells}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
