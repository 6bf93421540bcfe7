"""A whole campaign folder made by hand from known numbers, in the formats that real runs leave, for the tests of what
reads it. ``bench_breaks`` breaks one thing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto import switches
from stretto.bench.campaign import Note, file_hash, write_note
from stretto.bench.design import Cell, design
from stretto.bench.plan import Plan, condition_sets
from stretto.bench.plan_file import keep_plan, parse_plan
from stretto.config import Config

GROUPS, SAMPLES, PATCHES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 2, 8, 14, 6
"""Groups of a partition, samples of a group, patches of a group's image, tokens of a prompt and of a response."""
PIXEL_BYTES = PATCHES * 3 * 2 * 16 * 16 * 4 + 12
"""Of one group: its pixel values and its grid."""
MACHINE, BOOT = "machine-a", "boot-a"
GIB = 2**30
GPU = "GPU-0a1b"
ANALYSED = (
    "log.txt",
    "hardware.jsonl",
    *(f"run/{name}" for name in ("manifest.json", "metrics.jsonl", "events.jsonl", "fingerprints.jsonl", "alone.json")),
)

PLAN: dict[str, Any] = {
    "name": "by-hand",
    "recipe": "recipes/digits.toml",
    "recipe_sha256": "0" * 64,
    "conditions": ("B", "P", "P+R", "P+S"),
    "seeds": (0, 1),
    "updates": 6,
    "warmup": 2,
    "windows": ("2-5",),
    "primary": ("P+S", "B"),
    "pool_size": 2,
    "settings": {
        "rollout.prompts_per_partition": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "actor.chunks_per_mini": 2,
        "staleness.max": 1,
    },
}

Numbers = Mapping[str, Sequence[float | None]]
"""Metric -> one value an update."""

ALONE = {
    ("processor", "B"): 0.7,
    ("processor", "P"): 0.35,
    ("rollout", "B"): 0.5,
    ("training", "B"): 0.6,
    ("training", "R"): 0.4,
    ("training", "S"): 0.65,
}
"""Seconds an update of every stage alone, by stage and condition."""


def plan_of(**changes: Any) -> Plan:
    return parse_plan({**PLAN, **changes})


def alike(cell: Cell, updates: int, seconds: float = 1.0, tokens: int = 1000) -> dict[str, list[float]]:
    """Every update of every cell the same, but for a first one that is five times as long."""
    return {"step_s": [5 * seconds, *[seconds] * (updates - 1)], "tokens": [tokens] * updates}


def make_campaign(
    folder: Path,
    plan: Plan | None = None,
    numbers: Callable[[Cell], Numbers] | None = None,
    *,
    boots: Callable[[int], tuple[str, str]] = lambda block: (MACHINE, BOOT),
    gpu: bool = False,
    alone: Mapping[tuple[str, str], float] | None = None,
) -> Path:
    """``folder`` with every cell of the plan, finished. ``numbers`` replaces metrics by cell; ``step_s`` and ``tokens``
    also shape the spans. ``boots``: block -> machine and boot. ``alone``: (stage, condition) -> seconds an update.
    """
    plan = plan or plan_of()
    keep_plan(plan, folder)
    begun_s = 1000.0
    for cell in design(plan.conditions, plan.seeds, plan.repetitions, plan.order).cells:
        given = dict(numbers(cell)) if numbers else alike(cell, plan.updates)
        begun_s = make_cell(folder, plan, cell, given, begun_s, boots(cell.block), gpu=gpu)
    for (stage, condition), seconds in (alone or {}).items():
        make_alone(folder, plan, stage, condition, seconds)
    return folder


def make_cell(
    folder: Path,
    plan: Plan,
    cell: Cell,
    numbers: Numbers,
    begun_s: float = 1000.0,
    boot: tuple[str, str] = (MACHINE, BOOT),
    *,
    attempt: int = 1,
    gpu: bool = False,
) -> float:
    """One finished attempt; returns the second of the clock after which the next may begin."""
    path = folder / "cells" / cell.name / f"attempt-{attempt}"
    run = path / "run"
    run.mkdir(parents=True)
    rows = [metrics_row(cell, update, numbers) for update in range(plan.updates)]
    starts = [begun_s + 2]
    for row in rows:
        starts.append(starts[-1] + float(row["step_s"] or 1.0))
    write_lines(run / "metrics.jsonl", [dict(sorted(row.items())) for row in rows])
    write_lines(run / "events.jsonl", events(cell, rows, starts, boot[1]))
    write_lines(run / "fingerprints.jsonl", [fingerprints(cell, update) for update in range(plan.updates)])
    (run / "manifest.json").write_text(json.dumps(manifest(plan, cell, boot, run), indent=1))
    write_lines(path / "hardware.jsonl", hardware(plan, starts, gpu))
    (path / "log.txt").write_text("trained\n")
    note(plan, cell, path, boot, attempt)
    return starts[-1] + 5


def note(plan: Plan, cell: Cell, path: Path, boot: tuple[str, str], attempt: int, stage: Any = "") -> None:
    write_note(
        path,
        Note(
            plan=plan.sha256,
            stage=stage,
            condition=cell.condition,
            seed=cell.seed,
            block=cell.block,
            position=cell.position,
            attempt=attempt,
            command=("python", "-m", "stretto.cli", "train", plan.recipe, "--set", f"run.seed={cell.seed}"),
            started="2026-11-30T12:00:00.000+00:00",
            ended="2026-11-30T12:01:00.000+00:00",
            wall_s=60.0,
            exit_code=0,
            status="finished",
            reason="",
            machine_id=boot[0],
            boot_id=boot[1],
            others_before=0.01,
            files={name: file_hash(path / name) for name in ANALYSED if (path / name).is_file()},
        ),
    )


def make_alone(folder: Path, plan: Plan, stage: str, condition: str, seconds: float) -> None:
    """A stage alone, 8 updates that all take as long."""
    path = folder / "alone" / f"{stage}-{condition}" / "attempt-1"
    (path / "run").mkdir(parents=True)
    found = {
        "stage": stage,
        "condition": condition,
        "updates": 8,
        "seconds": [seconds] * 8,
        "tokens": [1000] * 8,
    }
    (path / "run" / "alone.json").write_text(json.dumps(found))
    cell = Cell(block=-1, position=-1, condition=condition, seed=plan.seeds[0])
    note(plan, cell, path, (MACHINE, BOOT), 1, stage)


def attempt_of(folder: Path, name: str, number: int = 1) -> Path:
    """Of a cell; the folder of ``rollout-B`` alone is ``folder / "alone" / "rollout-B" / "attempt-1"``."""
    return folder / "cells" / name / f"attempt-{number}"


# Files of a run ------------------------------------------------------------------------------------------------------


def metrics_row(cell: Cell, update: int, numbers: Numbers) -> dict[str, Any]:
    """A line of ``metrics.jsonl``, with the names and kinds of a real one."""
    seconds = numbers["step_s"][update] or 1.0
    samples, responses = GROUPS * SAMPLES, GROUPS * SAMPLES * RESPONSE_TOKENS
    row: dict[str, Any] = {
        "update": update,
        "nonfinite": 0,
        "tokens": GROUPS * SAMPLES * PROMPT_TOKENS + responses,
        "response_tokens": responses,
        "response_length_mean": responses / samples,
        "samples": float(samples),
        "groups": float(GROUPS),
        "images": GROUPS,
        "patches": GROUPS * PATCHES,
        "put_bytes": GROUPS * (PIXEL_BYTES + 5 * PROMPT_TOKENS) + 8 * responses,
        "loss": 0.01 * (cell.seed + 1) / (update + 1),
        "reward_mean": 0.1 + 0.01 * update + 0.001 * cell.seed,
        "grad_norm": 0.3 + 0.01 * update,
        "ppo_kl_k1": 0.0,
        "ppo_kl_k3": 0.0,
        "truncated_fraction": 0.125,
        "staleness_max": min(1, update),
        "staleness_mean": float(min(1, update)),
        "policy_version": update + 1,
        "update_skipped": 0.0,
        "skipped_updates": 0.0,
        "failed_samples": 0.0,
        "microbatches": 4,
        "fill": 0.8,
        "step_s": seconds,
        "phase1_s": 0.38 * seconds,
        "phase2_s": 0.02 * seconds,
        "phase3_s": 0.42 * seconds,
        "publish_s": 0.02 * seconds,
        "exposed_wait_s": 0.2 * seconds,
        "forward_s": 0.0 if "R" in cell.condition else 0.16 * seconds,
    }
    return row | {name: values[update] for name, values in numbers.items()}


def fingerprints(cell: Cell, update: int) -> dict[str, Any]:
    value = f"{1000 * cell.seed + update:016x}"
    return {"parameters": value, "gradients": value, "inputs.response_ids": value, "update": update}


def events(cell: Cell, rows: Sequence[Mapping[str, Any]], starts: Sequence[float], boot: str) -> list[dict[str, Any]]:
    """Spans of every update, at fixed shares of its step; a step begins where the one before ends."""
    letters = cell.condition.partition("(")[0].split("+")
    pool, reuse, chunked = ("P" in letters, "R" in letters, "S" in letters)
    one_chunk = "c=1" in cell.condition
    found: list[dict[str, Any]] = [
        {
            "type": "process",
            "name": "process.start",
            "process": process,
            "pid": 100 + index,
            "boot": boot,
            "time_ns": round(starts[0] * 1e9),
            "unix_ns": 1796055593316342318,
        }
        for index, process in enumerate(("driver", "rollout", "actor0"))
    ]

    for k, row in enumerate(rows):
        begun, length = starts[k], float(row["step_s"] or 1.0)

        def span(
            name: str, low: float, high: float, k: int = k, at: float = begun, of: float = length, **attrs: Any
        ) -> None:
            side = {"loop": "driver", "actor": "actor0"}.get(name.partition(".")[0], "rollout")
            times = {"start_ns": round((at + low * of) * 1e9), "end_ns": round((at + high * of) * 1e9)}
            found.append({"type": "span", "name": name, "thread": "MainThread", **times, "process": side, **attrs})

        chunks = 1 if one_chunk else 2
        span("loop.step", 0.0, 0.85, update=k)
        if chunked:
            span("loop.claim", 0.0, 0.02, partition=k, groups=2, chunk=0, chunks=2)
            span("loop.claim", 0.02, 0.2, partition=k, groups=2, chunk=1, chunks=2)
        else:
            span("loop.claim", 0.0, 0.2, partition=k, groups=GROUPS, chunk=0, chunks=chunks)
        span("actor.fetch", 0.2, 0.22, partition=k, chunk=0, groups=GROUPS, bytes=1000)
        if not reuse:
            first = (0.04, 0.12) if chunked else (0.22, 0.3)
            second = (0.22, 0.3) if chunked else (0.3, 0.38)
            for low, high in (first, second):
                span("actor.forward", low, high, partition=k, role="old", samples=4, inert=False)
        span("actor.advantages", 0.38, 0.4, samples=GROUPS * SAMPLES)
        for part in range(4):
            low = 0.4 + 0.1 * part
            reused = 2 if reuse else 0
            span("actor.train", low, low + 0.1, partition=k, mini=0, samples=2, inert=False, reused=reused)
        span("actor.optimizer", 0.8, 0.82, partition=k, mini=0, applied=True, reason="")
        span("actor.publish", 0.82, 0.84, version=k + 1)
        span("actor.evidence", 0.85, 0.88)
        # the second half of partition k arrives in its own step, the first half of the next one before
        _rollout(span, k, 1, 0.0, 0.17, 0.18, pool)
        if k == 0:
            _rollout(span, 0, 0, 0.0, 0.005, 0.01, pool)
        if k + 1 < len(rows):
            _rollout(span, k + 1, 0, 0.6, 0.95, 0.96, pool)
    return found


def _rollout(
    span: Callable[..., None], partition: int, batch: int, low: float, high: float, put: float, pool: bool
) -> None:
    middle = low + 0.4 * (high - low)
    for index in range(2):
        group = 2 * batch + index
        worker = {"worker": 900 + index} if pool else {}
        span("processor.process", low, middle, row_id=f"row-{group}", images=1, wait_s=0.001, **worker)
        span("reward.score", high, put, partition=partition, group=group)
        span("plane.put", high, put, partition=partition, group=group, bytes=1000, logical_bytes=2000)
    span("rollout.generate", middle, high, partition=partition, batch=batch, version=0, replica=0, groups=2, tokens=24)


def manifest(plan: Plan, cell: Cell, boot: tuple[str, str], run: Path) -> dict[str, Any]:
    session = {
        "status": "finished",
        "cause": None,
        "first_update": 0,
        "updates_done": plan.updates,
        "started": "2026-11-30T12:00:00.000+00:00",
        "ended": "2026-11-30T12:01:00.000+00:00",
        "wall_s": 60.0,
        "command": ["python", "-m", "stretto.cli", "train"],
        "directory": "/checkout",
        "config": config_of(plan, cell, run).model_dump(mode="json"),
        "sources": {},
        "seeds": {"run.seed": cell.seed},
        "model": {"path": "runs/model", "fingerprint": "b0fe3bfd6e00a26b", "parameters": "b0fe3bfd6e00a26b"},
        "data": {"rows": 64, "fingerprint": "854e1dcb"},
        "git": {"commit": "d1aad60f6816adc3d99eae24a7c729a2119dacf5", "dirty": False, "changed": []},
        "versions": {"python": "3.11.7", "stretto": "0.1.0", "torch": "2.13.0+cpu", "vllm": None},
        "platform": "Linux-6.18-x86_64-with-glibc2.36",
        "environment": {"OMP_NUM_THREADS": "1"},
        "hardware": {
            "cpu": "AMD EPYC",
            "cores": 16,
            "cores_usable": 16,
            "memory_bytes": 24 * GIB,
            "cgroup": {"cores": None, "memory_bytes": None},
            "gpus": [],
        },
        "machine_id": boot[0],
        "boot_id": boot[1],
        "determinism": {
            "mode": "exact",
            "actor": {"device": "cpu", "cores": [0], "torch_threads": 1, "no_grad_is_grad": True},
            "rollout": {"cores": [1], "torch_threads": 1},
        },
        "switches": {"condition": cell.condition.partition("(")[0]},
    }
    return {"format": 1, "sessions": [session]}


def config_of(plan: Plan, cell: Cell, run: Path) -> Config:
    """The config that a cell runs under, as its manifest holds it: with the seams that its switches set."""
    tables: dict[str, Any] = {}
    own = {"run.dir": str(run), "run.seed": cell.seed, "run.updates": plan.updates}
    for name, value in {**plan.settings, **condition_sets(plan, cell.condition), **own}.items():
        block, key = name.split(".")
        tables.setdefault(block, {})[key] = value
    return switches.applied(Config.model_validate(tables).with_seams(checkpoints=False))


def hardware(plan: Plan, starts: Sequence[float], gpu: bool) -> list[dict[str, Any]]:
    """A sample every 0.5 s. Inside the windows: 1.5 cores, 0.25 of others, 2 GiB, the GPU at 80 %, 10 GiB, 300 W;
    before and after, what would show if it were counted.
    """
    gpus = [{"uuid": GPU, "name": "H200"}] if gpu else []
    told = "" if gpu else "there is no GPU"
    lines: list[dict[str, Any]] = [{"type": "start", "interval_s": 0.5, "cores": 2, "gpus": gpus, "gpu_told": told}]
    at = starts[0] - 1
    while at < starts[-1] + 1:
        inside = any(starts[window.first] <= at <= starts[window.last + 1] for window in plan.measured)
        usage = {"utilisation_percent": 80.0, "memory_bytes": 10 * GIB, "power_w": 300.0}
        outside = {"utilisation_percent": 1.0, "memory_bytes": 90 * GIB, "power_w": 900.0}
        lines.append(
            {
                "type": "sample",
                "time_ns": round(at * 1e9),
                "own_cores": 1.5 if inside else 77.0,
                "other_cores": 0.25 if inside else 77.0,
                "steal_cores": 0.01 if inside else 77.0,
                "rss_bytes": 2 * GIB if inside else 77 * GIB,
                "gpus": [{"uuid": GPU, **(usage if inside else outside)}] if gpu else [],
            }
        )
        at += 0.5
    return lines


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
