"""An analysis made by hand of known numbers, for the tests of a report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from stretto.bench.arithmetic import BlockValues, Judgement, aa_values, against_target, estimate, judge, windowed
from stretto.bench.attribution import factorials, increments
from stretto.bench.design import Cell, design
from stretto.bench.guardrails import Guardrail
from stretto.bench.plan import BASE, Plan
from stretto.bench.results import (
    Alone,
    Analysis,
    CellResult,
    Efficiency,
    Hardware,
    Packing,
    Span,
    Timeline,
    Verdict,
)
from stretto.bench.scope import Process, decide

GAINS = {"B": 0.0, "P": 0.05, "R": 0.08, "S": 0.10, "P+R": 0.14, "P+S": 0.17, "B(c=1)": 0.02}
"""Planted log-ratios over B; cells scatter by 1 %."""


def plan_of(
    conditions: tuple[str, ...] = ("B", "P", "P+R", "P+S"), seeds: tuple[int, ...] = (0, 1, 2, 3), updates: int = 43
) -> Plan:
    return Plan(
        name="digits-cpu",
        recipe="recipes/bench/digits.toml",
        recipe_sha256="a" * 64,
        conditions=conditions,
        variants={name: {"actor.chunks_per_mini": 1} for name in conditions if "(" in name},
        seeds=seeds,
        updates=updates,
        warmup=3,
        windows=(f"3-{updates - 1}",),
        primary=(conditions[-1] if "(" not in conditions[-1] else conditions[-2], "B"),
        targets_percent={"P+S": 12.0} if "P+S" in conditions else {},
    )


def analysis_of(plan: Plan | None = None, seed: int = 0) -> Analysis:
    """Every cell accepted; one more attempt was interrupted, and one rejected with a later one in its place."""
    plan = plan or plan_of()
    rng = np.random.default_rng(seed)
    planned = design(plan.conditions, plan.seeds, plan.repetitions, plan.order)
    cells = [_cell(rng, plan, cell) for cell in planned.cells]
    blocks = [
        BlockValues(
            baseline=tuple(c.throughput.per_s for c in cells if (c.block, c.condition) == (block.index, BASE)),
            others={c.condition: c.throughput.per_s for c in cells if c.block == block.index and c.condition != BASE},
        )
        for block in planned.blocks
    ]
    judged = judge(blocks, plan.primary_contrast, plan.other_contrasts, {})
    verdicts = tuple(
        Verdict(
            judgement=found,
            within_runs=(found.estimate.mean - 0.004, found.estimate.mean + 0.004) if found.estimate else None,
            detectable=2.6 * found.estimate.deviation if found.estimate and found.estimate.blocks > 1 else None,
            target=_target(plan, found),
        )
        for found in judged
    )
    step_s = {
        name: math.exp(np.mean([math.log(c.phases["step"]) for c in cells if c.condition == name]))
        for name in plan.conditions
    }
    broken = replace(
        cells[1],
        attempt=1,
        status="rejected",
        throughput=None,
        reasons=("loss: update 17 is null", "git.dirty: true, in the first cell false"),
    )
    cells[1] = replace(cells[1], attempt=2)
    stopped = replace(
        cells[-1],
        attempt=1,
        status="excluded",
        throughput=None,
        reasons=("interrupted: SIGINT at update 12",),
        steps={name: values[:12] for name, values in cells[-1].steps.items()},
        phases={},
        busy={},
        hardware=None,
    )
    cells[-1] = replace(cells[-1], attempt=2)
    processes = [Process(c.condition, c.block, c.seed, plan.updates) for c in cells]
    return Analysis(
        plan=plan,
        plan_sha256=plan.sha256,
        scope=decide(plan.measured, plan.warmup, processes, conditions=plan.conditions, declared=True),
        square_complete=planned.complete,
        blocks_planned=len(planned.blocks),
        cells=(*cells, broken, stopped),
        alone=(
            Alone(stage="processor", condition="P", seconds=0.8, updates=2, per_update=(0.7, 0.9)),
            Alone(stage="rollout", condition="B", seconds=1.1, updates=8),
            Alone(stage="training", condition="B", seconds=1.6, updates=8),
            Alone(stage="training", condition="S", seconds=1.6, updates=8),
        ),
        verdicts=verdicts,
        aa=aa_values(blocks),
        step_s=step_s,
        phase_effects={
            str(found.contrast): {
                "exposed wait": estimate([-0.5 + 0.02 * rng.standard_normal() for _ in blocks]),
                "train": estimate([0.002 * rng.standard_normal() for _ in blocks]),
            }
            for found in judged
        },
        guardrails={name: _guardrails() for name in plan.conditions if name != BASE},
        factorials=factorials(blocks),
        increments=increments(blocks),
        efficiency=tuple(
            Efficiency(
                condition=name,
                processor_s=0.8,
                rollout_s=1.1,
                training_s=1.6,
                step_s=step,
                efficiency=1.6 / step,
                told="",
            )
            for name, step in step_s.items()
        ),
        packing=tuple(
            Packing(condition=name, chunks_per_mini=1 if "(" in name else 2, microbatches=4.0, fill=0.8289)
            for name in plan.conditions
        ),
        timelines=(_timeline("B"), _timeline("P+S")),
        equality=(
            "losses, gradient norms and parameter fingerprints: equal bits in all runs of a block, at every update",
            "tokens and samples: equal in all runs of a block",
        ),
        removed=(),
        provenance={
            "git": {"commit": "d1aad60f6816adc3d99eae24a7c729a2119dacf5", "dirty": False},
            "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "vllm": None},
            "hardware": {"cpu": "AMD EPYC", "cores": 2, "gpus": []},
            "blocks": [{"block": 0, "machine_id": "3d12", "boot_id": "42e6"}],
        },
        warnings=("block 2: other processes used 0.41 cores just before `02-1-P`",),
    )


def _target(plan: Plan, found: Judgement) -> tuple[float, Literal["reached", "missed", "open"]] | None:
    aimed = plan.targets_percent.get(found.contrast.treated)
    if aimed is None or found.estimate is None or found.contrast.base != BASE:
        return None
    return aimed, against_target(found.estimate, aimed)


def _cell(rng: np.random.Generator, plan: Plan, cell: Cell) -> CellResult:
    """Losses and their like depend on the seed alone, as those of exact switches do."""
    shared = np.random.default_rng(100 + cell.seed)
    at = np.arange(plan.updates)
    noise = shared.standard_normal((6, plan.updates))
    speed = 1.03**cell.block * math.exp(GAINS[cell.condition] + 0.01 * rng.standard_normal())
    tokens = np.round(39000 + 300 * noise[0])
    step_s = 2.4 / speed * np.exp(0.04 * rng.standard_normal(plan.updates)) * np.where(at == 0, 2.2, 1)
    steps = {
        "tokens": tokens,
        "step_s": step_s,
        "loss": 0.004 * noise[1] * np.exp(-at / 30),
        "reward_mean": 0.1 + 0.7 * (1 - np.exp(-at / 18)) + 0.01 * noise[2],
        "grad_norm": 0.33 * np.exp(-at / 40) * np.exp(0.08 * noise[3]),
        "ppo_kl_k1": 1e-4 * np.abs(noise[4]),
        "response_length_mean": 6.5 + 0.2 * noise[5],
        "staleness_mean": np.minimum(at, 1).astype(float),
    }
    step = float(np.mean(step_s[plan.warmup :]))
    wait = (0.35 if cell.condition.startswith("B") else 0.1) * step
    rest = step - wait
    phases = {
        "exposed wait": wait, "fetch": 0.02 * rest, "old policy": 0.2 * rest, "advantages": 0.001 * rest,
        "train": 0.729 * rest, "publish": 0.02 * rest, "other": 0.03 * rest, "step": step,
    }  # fmt: skip
    series = {name: tuple(map(float, values)) for name, values in steps.items()}
    return CellResult(
        name=cell.name,
        condition=cell.condition,
        seed=cell.seed,
        block=cell.block,
        position=cell.position,
        attempt=1,
        folder=f"cells/{cell.name}/attempt-1",
        status="accepted",
        reasons=(),
        steps=series,
        throughput=windowed(series["tokens"], series["step_s"], plan.measured),
        phases=phases,
        busy={"processor": 0.7, "rollout": 1.2, "actor": rest},
        workload={"tokens": float(tokens[3:].sum()), "samples": 1920.0 * 40, "images": 96.0 * 40},
        hardware=Hardware(
            own_cores=1.7 + 0.02 * rng.standard_normal(),
            other_cores=0.04,
            steal_cores=0.001,
            peak_rss_bytes=2.9e9,
            samples=180,
            gpus=(),
            gpu_told="there is no GPU",
        ),
        engaged=("processor_pool: 1152 prompts in 1 process",) if "P" in cell.condition else (),
    )


def _guardrails() -> tuple[Guardrail, ...]:
    no_difference = "mean difference +0; fails outside the largest A/A difference, 0"
    told = {
        "step p95": "ratio 0.86, lower bound 0.84; fails above 1.05",
        "peak memory": "host: 2.701 GiB against 2.700; fails above 1.000 GiB more",
        "tokens": "largest difference in a block 0 % (A/A 0 %); fails above 1 %",
        "reward": no_difference,
        "truncation": no_difference,
    }
    rows = [Guardrail(name=name, status="passed", told=words) for name, words in told.items()]
    return (*rows, Guardrail(name="multimodal bytes", status="not measured", told="a run has no count of them"))


def _timeline(condition: str) -> Timeline:
    ahead = 6 if condition != "B" else 5
    spans = [
        Span(lane="rollout", name="generate", start_s=0.1 + 0.3 * i, end_s=0.35 + 0.3 * i, partition=ahead)
        for i in range(4)
    ]
    start = 1.4 if condition == "B" else 0.0
    spans += [
        Span(lane="actor", name="forward", start_s=start + 0.02, end_s=start + 0.4, partition=5),
        Span(lane="actor", name="train", start_s=start + 0.4, end_s=start + 1.5, partition=5),
        Span(lane="driver", name="step", start_s=0.0, end_s=start + 1.52, partition=None),
    ]
    cell = "00-0-B" if condition == "B" else "00-3-P+S"
    return Timeline(condition=condition, cell=cell, update=5, seconds=start + 1.52, spans=tuple(spans))
