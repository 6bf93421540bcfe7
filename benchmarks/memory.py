"""Whether memory stays flat: what every process of a run holds, update by update.

    python benchmarks/memory.py --model runs/digits-sft [--updates 200] [--out results/memory-cpu]

Trains the recipe as ``stretto train`` does, in this process, and samples after each update: private memory (resident
less shared pages) of driver, actor, rollout, ledger, reward worker and Ray's daemons, bytes and objects in Ray's
object store, /dev/shm of the machine, groups and bytes that the data plane holds. Prints the value at update 40 (the
first ones fill caches and pools), at the end, and the slope in MiB per 100 updates (least squares) between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from harness import processes, setting, train, wait_until_quiet
from ray._private.internal_api import memory_summary  # no public call tells what the object store holds

from stretto.controller import Run

MIB = 2**20
SETTLED = 40
ROLES = {  # in the command line, or the title that Ray gives a process
    r"ray::ActorProcess": "actor",
    r"ray::RolloutProcess": "rollout",
    r"ray::Ledger": "ledger",
    r"stretto\.rollout\.reward_worker|reward_worker": "reward worker",
    r"raylet/raylet": "raylet",
    r"gcs_server": "gcs server",
}


def role(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    title = " ".join(process.cmdline())
    return next((name for pattern, name in ROLES.items() if re.search(pattern, title)), "other Ray processes")


def sample(driver: int) -> dict[str, float]:
    """MiB by process role, of the object store and of /dev/shm."""
    held: dict[str, float] = {}
    for process in processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            name, memory = role(process, driver), process.memory_info()
            held[name] = held.get(name, 0.0) + (memory.rss - memory.shared) / MIB
            held[f"{name}, shared pages"] = held.get(f"{name}, shared pages", 0.0) + memory.shared / MIB
    held["all processes"] = sum(value for name, value in held.items() if "shared" not in name)
    summary = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    stored = re.search(r"Plasma memory usage (\d+) MiB, (\d+) objects", summary)
    if stored:
        held["object store"], held["object store, objects"] = float(stored[1]), float(stored[2])
    held["/dev/shm"] = shutil.disk_usage("/dev/shm").used / MIB
    return held


class Sampler:
    """Samples on a thread of its own, once after each update."""

    def __init__(self, every: int):
        self.every = every
        self.rows: list[dict[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)

    def __call__(self, run: Run) -> None:
        self.run, self.driver = run, psutil.Process().pid
        self._thread.start()

    def _work(self) -> None:
        seen = 0
        while not self._ended.wait(0.05):
            done = self.run.done
            if done == seen or done % self.every:
                continue
            seen = done
            if done < self.run.last:  # at the end the processes are about to go
                self.rows.append({"update": done, **sample(self.driver)})

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def trend(rows: list[dict[str, float]], name: str) -> dict[str, float]:
    """Of the rows after update ``SETTLED``: first and last value, growth, slope per 100 updates."""
    kept = [(row["update"], row[name]) for row in rows if row["update"] >= SETTLED and name in row]
    updates, values = (np.array(column) for column in zip(*kept, strict=True))
    slope = float(np.polyfit(updates, values, 1)[0]) * 100
    return {"first": values[0], "last": values[-1], "peak": max(values), "slope_per_100_updates": slope}


def table(trends: dict[str, dict[str, float]]) -> str:
    lines = [
        f"| MiB | at update {SETTLED} | at the end | peak | growth | slope per 100 updates |",
        "|---|---|---|---|---|---|",
    ]
    for name, t in trends.items():
        growth = t["last"] - t["first"]
        lines.append(
            f"| {name} | {t['first']:.1f} | {t['last']:.1f} | {t['peak']:.1f} | {growth:+.1f} "
            f"| {t['slope_per_100_updates']:+.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/digits.toml"))
    parser.add_argument("--model", type=Path, required=True, help="model folder, made by `stretto sft`")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=2, help="updates between samples")
    parser.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE", help="change the recipe")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/benchmark-memory"), help="new folder for the run")
    parser.add_argument("--out", type=Path, help="write the figures to OUT.json and the table to OUT.md")
    args = parser.parse_args()
    if args.updates <= SETTLED + 4 * args.every:
        parser.error(f"--updates must be well above {SETTLED}, from where growth is measured")
    wait_until_quiet()
    sampler = Sampler(args.every)
    begun = time.monotonic()
    sets = [f"model.path={args.model}", f"run.updates={args.updates}", *args.set]
    try:
        load = train(args.recipe, sets, args.run_dir, sampler)
    finally:
        sampler.stop()
    names = [name for name in sampler.rows[-1] if name != "update"]
    trends = {name: trend(sampler.rows, name) for name in names}
    text = table(trends)
    print(text)
    print(f"{args.updates} updates in {time.monotonic() - begun:.0f} s; others used {load.others:.2f} cores")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        chosen = {key: value for key, value in vars(args).items() if key not in ("out", "run_dir")}
        record: dict[str, Any] = {"arguments": chosen, "load": vars(load), "setting": setting(), "trends": trends}
        args.out.with_suffix(".json").write_text(json.dumps({**record, "rows": sampler.rows}, default=str) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
