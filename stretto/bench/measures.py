"""What is measured of the cells that were accepted: all over the windows of the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from stretto.bench.arithmetic import BlockValues, Estimate, estimate, paired, pipeline_efficiency, windowed
from stretto.bench.campaign import Stage
from stretto.bench.design import Block
from stretto.bench.guardrails import CellFacts
from stretto.bench.jobs import alone_condition
from stretto.bench.plan import BASE, Contrast, Plan, Window
from stretto.bench.read_cells import Read
from stretto.bench.resample import PairedSteps, Steps
from stretto.bench.results import Alone, Efficiency, Packing
from stretto.observe.metrics import Throughput

PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 4 + 1, 4 + 4
"""Of the payload of a group: ids and types of its prompt; ids and log-probs of its responses. The rest is images."""
STEP_PHASES = ("phase1_s", "phase2_s", "phase3_s", "publish_s", "exposed_wait_s")
"""Metrics of seconds that are compared beside the parts of ``stretto.bench.phases``."""
HOST = "host"
STAGES: tuple[Stage, ...] = ("processor", "rollout", "training")


def throughput(read: Read, windows: Sequence[Window]) -> Throughput:
    """Raises StrettoError where an update in the windows has no count of tokens, or no length."""
    tokens, seconds = (list(map(_or_nan, read.series(metric))) for metric in ("tokens", "step_s"))
    return windowed(tokens, seconds, windows)


def steps(read: Read, windows: Sequence[Window]) -> Steps:
    return Steps(tokens=np.array(read.measured("tokens", windows)), seconds=np.array(read.measured("step_s", windows)))


def workload(read: Read, windows: Sequence[Window]) -> dict[str, float]:
    """Sums over the updates of the windows; a count that a run has not is left out."""
    names = ("tokens", "response_tokens", "samples", "images", "patches")
    found = {name: math.fsum(values) for name in names if (values := read.measured(name, windows))}
    moved = multimodal_bytes(read, windows)
    return found | ({} if moved is None else {"multimodal_bytes": moved})


def multimodal_bytes(read: Read, windows: Sequence[Window]) -> float | None:
    """Of pixel values and grids that were put into the data plane: what is put, less the tokens. None: not measured.

    Every prompt has equally many samples, so that ``(tokens - response_tokens) / samples of a prompt`` are the tokens
    of prompts, each of which is put once.
    """
    names = ("put_bytes", "tokens", "response_tokens")
    put, tokens, responses = (read.measured(name, windows) for name in names)
    if read.config is None or not put or not len(put) == len(tokens) == len(responses):
        return None
    total = math.fsum(responses)
    prompts = (math.fsum(tokens) - total) / read.config.rollout.n_samples_per_prompt
    return math.fsum(put) - PROMPT_TOKEN_BYTES * prompts - RESPONSE_TOKEN_BYTES * total


def facts(read: Read, windows: Sequence[Window]) -> CellFacts:
    """What guardrails look at."""
    return CellFacts(
        steps=steps(read, windows),
        peak_memory_bytes=peak_memory(read),
        multimodal_bytes=multimodal_bytes(read, windows),
        reward=_or_nan(read.mean("reward_mean", windows)),
        truncated=_or_nan(read.mean("truncated_fraction", windows)),
    )


def peak_memory(read: Read) -> dict[str, float]:
    """Device -> bytes; empty where the machine was not sampled, or has GPUs of which one was not."""
    hardware = read.hardware
    if hardware is None:
        return {}
    gpus = {gpu.uuid: gpu.peak_memory_bytes for gpu in hardware.gpus if gpu.peak_memory_bytes is not None}
    known = (read.session.get("hardware") or {}).get("gpus") or []
    if len(gpus) < len(known):
        return {}
    return {HOST: hardware.peak_rss_bytes, **gpus}


# Blocks --------------------------------------------------------------------------------------------------------------


class Accepted:
    """The accepted cells of a campaign by block. A block in which one of the planned B is missing has no baseline: the
    baseline of a block is the geometric mean of its first and its last cell, and one alone would favour whatever ran
    nearer to it.
    """

    def __init__(self, blocks: Sequence[Block], reads: Mapping[str, Read]):
        self.blocks = blocks
        self.reads = reads

    def base(self, block: Block) -> tuple[Read, ...]:
        """Empty where not all planned ones were accepted."""
        planned = [cell.name for cell in block.cells if cell.condition == BASE]
        found = tuple(self.reads[name] for name in planned if name in self.reads)
        return found if len(found) == len(planned) else ()

    def one(self, block: Block, condition: str) -> Read | None:
        """The cell of another condition."""
        names = [cell.name for cell in block.cells if cell.condition == condition]
        return next((self.reads[name] for name in names if name in self.reads), None)

    def runs(self, block: Block, condition: str) -> tuple[Read, ...]:
        """All cells of a condition that count."""
        if condition == BASE:
            return self.base(block)
        found = self.one(block, condition)
        return () if found is None else (found,)

    def by_block(self) -> list[list[Read]]:
        """In the order in which they ran, those without a baseline too."""
        return [[self.reads[cell.name] for cell in block.cells if cell.name in self.reads] for block in self.blocks]

    def of(self, condition: str) -> tuple[Read, ...]:
        """Over all blocks."""
        return tuple(read for block in self.blocks for read in self.runs(block, condition))

    def values(self, of: Mapping[str, float], conditions: Iterable[str]) -> tuple[BlockValues, ...]:
        """``of``: cell -> its value. A cell without one above 0 is left out, and a B with the whole baseline."""
        others = [condition for condition in conditions if condition != BASE]
        rows = []
        for block in self.blocks:
            base = [of.get(read.name, 0.0) for read in self.base(block)]
            ran = {condition: self.one(block, condition) for condition in others}
            found = {condition: of.get(read.name, 0.0) for condition, read in ran.items() if read is not None}
            rows.append(
                BlockValues(
                    baseline=tuple(base) if all(value > 0 for value in base) else (),
                    others={condition: value for condition, value in found.items() if value > 0},
                )
            )
        return tuple(rows)

    def paired_steps(self, contrast: Contrast, windows: Sequence[Window]) -> list[PairedSteps]:
        """Of every block that has both."""
        found = []
        for block in self.blocks:
            treated, base = self.runs(block, contrast.treated), self.runs(block, contrast.base)
            if treated and base:
                runs = tuple(steps(read, windows) for read in base)
                found.append(PairedSteps(treated=steps(treated[0], windows), base=runs))
        return found


def phase_effects(
    accepted: Accepted, contrast: Contrast, windows: Sequence[Window], conditions: Sequence[str]
) -> dict[str, Estimate]:
    """Log-ratios of seconds an update, negative where the treated condition is faster; a part that is 0 in a run has
    none.
    """
    reads = {read.name: read for condition in conditions for read in accepted.of(condition)}
    names = dict.fromkeys(name for read in reads.values() for name in read.phases)
    found = {}
    for name in (*names, *STEP_PHASES):
        by_cell = {cell: _or_zero(_seconds(read, name, windows)) for cell, read in reads.items()}
        values = paired(accepted.values(by_cell, conditions), contrast)
        if values:
            found[name] = estimate(values)
    return found


def packing(accepted: Accepted, conditions: Sequence[str], windows: Sequence[Window]) -> tuple[Packing, ...]:
    found = []
    for condition in conditions:
        reads = [read for read in accepted.of(condition) if read.config is not None]
        counts = [value for read in reads for value in read.measured("microbatches", windows)]
        fills = [value for read in reads for value in read.measured("fill", windows)]
        if counts and fills and reads[0].config is not None:
            found.append(
                Packing(
                    condition=condition,
                    chunks_per_mini=reads[0].config.actor.chunks_per_mini,
                    microbatches=math.fsum(counts) / len(counts),
                    fill=math.fsum(fills) / len(fills),
                )
            )
    return tuple(found)


def mean_steps(accepted: Accepted, conditions: Sequence[str], windows: Sequence[Window]) -> dict[str, float]:
    """Condition -> mean seconds of a measured update, the geometric mean over its cells."""
    found = {}
    for condition in conditions:
        logs = [math.log(mean) for read in accepted.of(condition) if (mean := read.mean("step_s", windows))]
        if logs:
            found[condition] = math.exp(math.fsum(logs) / len(logs))
    return found


# The limits of the pipeline ------------------------------------------------------------------------------------------


def efficiency(condition: str, plan: Plan, alone: Sequence[Alone], step_s: float, staleness_max: int) -> Efficiency:
    """Of a condition, with each stage as ``stretto.bench.jobs.alone_condition`` names it."""
    seconds = {(each.stage, each.condition): each.seconds for each in alone}
    processor_s, rollout_s, training_s = (
        seconds.get((stage, alone_condition(plan, stage, condition))) for stage in STAGES
    )
    found = dict(zip(STAGES, (processor_s, rollout_s, training_s), strict=True))
    missing = [stage for stage in STAGES if found[stage] is None]
    value, told = None, ""
    if staleness_max == 0:
        told = "undefined: at staleness.max = 0 the stages wait for one another"
    elif processor_s is None or rollout_s is None or training_s is None:
        told = f"not measured alone: {', '.join(missing)}"
    else:
        value = pipeline_efficiency(processor_s, rollout_s, training_s, step_s, staleness_max)
        limit = max(processor_s, rollout_s, training_s)
        told = f"the limit is {next(stage for stage in STAGES if found[stage] == limit)}, {limit:.3g} s"
    return Efficiency(
        condition=condition,
        processor_s=processor_s,
        rollout_s=rollout_s,
        training_s=training_s,
        step_s=step_s,
        efficiency=value,
        told=told,
    )


def _seconds(read: Read, name: str, windows: Sequence[Window]) -> float | None:
    return read.phases[name] if name in read.phases else read.mean(name, windows)


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
