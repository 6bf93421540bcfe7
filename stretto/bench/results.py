"""What an analysis finds, as records: ``analyze`` makes them, ``report`` and ``compare`` print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stretto.bench.arithmetic import Estimate, Judgement
from stretto.bench.attribution import Factorial, Increment
from stretto.bench.campaign import Stage, plain
from stretto.bench.guardrails import Guardrail
from stretto.bench.plan import Plan
from stretto.bench.scope import Scope
from stretto.observe.metrics import Throughput

NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Of one GPU, over the samples inside the measured windows. None: the GPU does not tell it."""

    uuid: str
    name: str
    utilisation_percent: float | None
    peak_memory_bytes: float | None
    power_w: float | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Of one cell, over the samples inside the measured windows. Cores are means of cores in use; 1.0 is one core busy.

    peak_rss_bytes  of all processes of the run together; pages that they share count once for each
    gpus            empty: there is none, or none was sampled; ``gpu_told`` says which
    """

    own_cores: float
    other_cores: float
    steal_cores: float
    peak_rss_bytes: float
    samples: int
    gpus: tuple[Gpu, ...]
    gpu_told: str


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """One attempt, and what became of it.

    status      accepted; rejected, by a rule, with every field that broke one (an exit code is such a field), whether
                or not a later attempt stands in its place; excluded: it was interrupted, or it is not the last attempt
    reasons     why it is not accepted
    steps       metric -> one value an update, warm-up included, None where a line has none; of a cell that was not
                accepted what could be read of it
    throughput  over the windows; None: not accepted
    phases      span or phase -> seconds an update inside the windows, parts of a step that add up to ``step``
                (``stretto.bench.phases`` names and orders them)
    busy        processor, rollout, actor -> seconds an update that it worked; a step less that is idle
    workload    tokens, response_tokens, samples, images, multimodal_bytes of all updates in the windows
    hardware    None: it was not sampled
    engaged     what shows that each switch was at work
    """

    name: str
    condition: str
    seed: int
    block: int
    position: int
    attempt: int
    folder: str
    status: Literal["accepted", "rejected", "excluded"]
    reasons: tuple[str, ...]
    steps: Mapping[str, tuple[float | None, ...]]
    throughput: Throughput | None
    phases: Mapping[str, float]
    busy: Mapping[str, float]
    workload: Mapping[str, float]
    hardware: Hardware | None
    engaged: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One stage with the others idle, in seconds an update: what a pipeline can at best hide behind the others.

    per_update  the seconds of each update, of which ``seconds`` is the mean
    """

    stage: Stage
    condition: str
    seconds: float
    updates: int
    per_update: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Of a condition: the slowest stage alone over the measured step. None: undefined, ``told`` says why."""

    condition: str
    processor_s: float | None
    rollout_s: float | None
    training_s: float | None
    step_s: float
    efficiency: float | None
    told: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One contrast. ``within_runs``: the bootstrap of steps within runs, in logs; it decides nothing.

    detectable  the smallest effect, in logs, that this design finds with 80 % power; None: it cannot be said
    target      what the plan aims at, in percent, and whether that was reached
    """

    judgement: Judgement
    within_runs: tuple[float, float] | None
    detectable: float | None
    target: tuple[float, Literal["reached", "missed", "open"]] | None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Of a condition, in the windows: what laying out by chunks costs. Means over cells and updates."""

    condition: str
    chunks_per_mini: int
    microbatches: float
    fill: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """A bar of a timeline, in seconds since the step began.

    lane  driver, processor, rollout, reward, plane or actor
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    partition: int | None


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of one cell, the median of its windows by length; spans that reach into it are cut at its ends."""

    condition: str
    cell: str
    update: int
    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Everything a report says.

    provenance  commit, versions, hardware, machine and boot of every block, model and data fingerprints, determinism
    aa          natural log of last over first B, one a block
    phase_effects  contrast -> phase or step metric -> its log-ratio of seconds (negative is faster); decides nothing
    step_s      condition -> mean seconds of a measured update, the geometric mean over its cells
    equality    lines on what was the same in all cells that are compared: tokens, samples, losses, parameters
    warnings    what a reader should know: an incomplete square, load of others, blocks on several machines
    removed     attempts that the campaign's journal knows, and that are gone or not as they were
    """

    plan: Plan
    plan_sha256: str
    scope: Scope
    square_complete: bool
    blocks_planned: int
    cells: tuple[CellResult, ...]
    alone: tuple[Alone, ...]
    verdicts: tuple[Verdict, ...]
    aa: tuple[float, ...]
    step_s: Mapping[str, float]
    phase_effects: Mapping[str, Mapping[str, Estimate]]
    guardrails: Mapping[str, tuple[Guardrail, ...]]
    factorials: tuple[Factorial, ...]
    increments: tuple[Increment, ...]
    efficiency: tuple[Efficiency, ...]
    packing: tuple[Packing, ...]
    timelines: tuple[Timeline, ...]
    equality: tuple[str, ...]
    provenance: Mapping[str, Any]
    warnings: tuple[str, ...]
    removed: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data; per-step series are left to the CSV."""
        cells = [{k: v for k, v in asdict(cell).items() if k != "steps"} for cell in self.cells]
        fields = {key: value for key, value in self.__dict__.items() if key not in ("plan", "cells")}
        plain_fields = {key: _plain(value) for key, value in fields.items()}
        return plain({"plan": self.plan.model_dump(), "cells": cells} | plain_fields)


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
