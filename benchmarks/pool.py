"""What the processor pool is worth: prompts per second and the longest gap of the event loop, with 0, 1 and 2 workers.

    python benchmarks/pool.py [--repetitions 5] [--sizes 0 1 2] [--out results/pool-cpu]

Prompts have one image of 1024 x 1024, once as JPEG bytes that are decoded when they are asked for (as rows of files
are) and once as uint8 arrays; the last job is 32 prompts of four 1536 x 2170 arrays. The processor is that of the
recipe's model with ``max_pixels`` 1024 x 1024. All prompts of a job are asked for at once; a coroutine of the same loop
wakes every 10 ms, and the longest time between two of its turns is the gap. Runners are started once and take turns, in
one order and then in the other; ratios are within a repetition, the first of which is left out. CPU time is that of
this process and its workers, in ms a prompt. A pool's results must be those of size 0, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Load, measured_load, setting, spread, wait_until_quiet
from PIL import Image

from stretto.data.images import Images
from stretto.data.pool import ProcessorPool
from stretto.data.processor import InlineProcessor, ProcessorRunner
from stretto.models.loading import load_family
from stretto.observe.trace import Tracer
from stretto.settings import load
from stretto.types import ProcessedPrompt, Prompt

SIDE = 1024
BEAT_S = 0.01
ARRAYS = ("prompt_ids", "mm_token_type_ids", "pixel_values", "image_grid_thw")


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """Something between a photograph and noise, so that decoding it takes a usual time."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (48, 48, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)


def prompt(row: int, images: Any) -> Prompt:
    content: list[dict[str, str]] = [{"type": "image"} for _ in images]
    content.append({"type": "text", "text": "What is to be seen here? Answer in one sentence."})
    return Prompt(row_id=f"benchmark/{row}", messages=({"role": "user", "content": content},), images=images)


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def jobs(count: int) -> dict[str, list[Prompt]]:
    small = [picture(i, SIDE, SIDE) for i in range(8)]
    files = [jpeg(pixels) for pixels in small]
    large = tuple(picture(i, 2170, 1536) for i in range(4))
    return {
        f"1 JPEG of {SIDE} x {SIDE}": [prompt(i, Images([files[i % 8]], f"benchmark/{i}")) for i in range(count)],
        f"1 array of {SIDE} x {SIDE}": [prompt(i, (small[i % 8],)) for i in range(count)],
        "4 arrays of 1536 x 2170": [prompt(i, large) for i in range(32)],
    }


async def measure(runner: ProcessorRunner, prompts: list[Prompt]) -> dict[str, float]:
    """Prompts per second; the longest gap of the event loop in ms while they are processed; CPU time in ms a prompt, of
    this process and of all workers.
    """
    gaps: list[float] = []

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def one(prompt: Prompt) -> None:
        await runner.process(prompt)  # its result is dropped at once

    heart = asyncio.create_task(beat())
    before = spent(runner)
    begun = time.perf_counter()
    await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - begun
    await asyncio.sleep(2 * BEAT_S)  # a gap that is still open ends
    heart.cancel()
    here, there = (1e3 * (after - first) / len(prompts) for first, after in zip(before, spent(runner), strict=True))
    return {"rate": len(prompts) / seconds, "gap_ms": 1e3 * max(gaps), "cpu_ms": here, "worker_cpu_ms": there}


def spent(runner: ProcessorRunner) -> tuple[float, float]:
    """CPU seconds of this process, and of the workers."""
    pids = [int(pid) for pid in runner.facts()["workers"]] if isinstance(runner, ProcessorPool) else []
    own, *others = (psutil.Process(pid).cpu_times() for pid in (None, *pids))
    return own.user + own.system, sum(times.user + times.system for times in others)


class Idle:
    """What the loop's gaps are where there is nothing to do."""

    async def process(self, prompt: Prompt) -> ProcessedPrompt:
        await asyncio.sleep(3)
        return None  # type: ignore[return-value]

    def close(self) -> None: ...


async def started(size: int, process: Callable[[Prompt], ProcessedPrompt]) -> tuple[ProcessorRunner, float]:
    """The runner of ``size`` processes, and the seconds that it took to start."""
    quiet = Tracer(None, "benchmark")
    if not size:
        return InlineProcessor(process, quiet), 0.0
    begun = time.perf_counter()
    pool = ProcessorPool(process, size, quiet)
    await pool.start()
    return pool, time.perf_counter() - begun


async def check(runners: dict[int, ProcessorRunner], prompts: list[Prompt]) -> None:
    for one in prompts:
        results = [await runner.process(one) for runner in runners.values()]
        for name in ARRAYS:
            first, *others = (getattr(result, name) for result in results)
            assert all(a.dtype == first.dtype and np.array_equal(a, first) for a in others), (one.row_id, name)


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    config, _ = load(args.recipe, [f"model.max_pixels={SIDE * SIDE}"])
    process = load_family(config.model).process
    runners, starts = {}, {}
    for size in args.sizes:
        runners[size], starts[size] = await started(size, process)
    cells: dict[str, dict[int, list[dict[str, float]]]] = {}
    used = Load()
    try:
        with measured_load(used):
            for name, prompts in jobs(args.prompts).items():
                await check(runners, prompts[:2])
                cells[name] = {size: [] for size in runners}
                for repetition in range(args.repetitions + 1):
                    for size in list(runners)[:: 1 if repetition % 2 else -1]:
                        cell = await measure(runners[size], prompts)
                        if repetition:
                            cells[name][size].append(cell)
        idle = [await measure(Idle(), [prompt(0, ())]) for _ in range(args.repetitions)]
        facts = {size: runner.facts() for size, runner in runners.items() if isinstance(runner, ProcessorPool)}
        memory = [psutil.Process(int(pid)).memory_full_info().uss for f in facts.values() for pid in f["workers"]]
    finally:
        for runner in runners.values():
            runner.close()
    return {
        "cells": cells,
        "start_s": starts,
        "idle_gap_ms": [cell["gap_ms"] for cell in idle],
        "pools": facts,
        "worker_memory_mib": [bytes_ / 2**20 for bytes_ in memory],
        "load": vars(used),
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        "| prompts | workers | prompts/s | ratio to the first | longest gap, ms | CPU here, ms | CPU of workers, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in found["cells"].items():
        base = next(iter(sizes.values()))
        for size, cells in sizes.items():
            ratios = [cell["rate"] / first["rate"] for cell, first in zip(cells, base, strict=True)]
            figures = [spread([c[key] for c in cells], 0) for key in ("gap_ms", "cpu_ms", "worker_cpu_ms")]
            rate = spread([c["rate"] for c in cells], 2)
            lines.append(f"| {name} | {size} | {rate} | {spread(ratios, 2)} | {' | '.join(figures)} |")
    starts = ", ".join(f"{size}: {seconds:.1f} s" for size, seconds in found["start_s"].items() if size)
    load = found["load"]
    return "\n".join(
        [
            *lines,
            "",
            f"Start of the pools, by workers: {starts}. Longest gap of an idle loop: {spread(found['idle_gap_ms'], 0)} "
            f"ms. Memory that a worker shares with none: {spread(found['worker_memory_mib'], 0)} MiB. Cores in use on "
            f"average: {load['own']:.2f} by this, {load['others']:.2f} by others.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/digits-sft.toml"), help="whose model reads them")
    parser.add_argument("--repetitions", type=int, default=5, help="after one that is left out")
    parser.add_argument("--prompts", type=int, default=48, help="of each job with one image")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1, 2], help="workers; 0 is the inline processor")
    parser.add_argument("--out", type=Path, help="write the figures to OUT.json and the table to OUT.md")
    args = parser.parse_args()
    wait_until_quiet()
    found = asyncio.run(compare(args))
    text = table(found)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        arguments = {name: value for name, value in vars(args).items() if name != "out"}
        record = {"arguments": arguments, "setting": setting(), **found}
        args.out.with_suffix(".json").write_text(json.dumps(record, indent=1, default=str) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
