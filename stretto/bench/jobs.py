"""What the processes of a campaign run: the cells of its plan, and one stage with the others idle. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stretto.bench.campaign import Stage
from stretto.bench.design import Cell
from stretto.bench.plan import BASE, Plan, condition_sets, toml_text

MEASURED = 8
"""Updates of a run of one stage alone, after its warm-up."""
WARMUP = 2
"""Of a plan without any."""
NOT_IN_PROCESSOR = ("actor.", "algorithm.", "plane.", "staleness.", "checkpoint.", "eval.", "reward.", "lora.")
"""Options that change nothing of how prompts are processed, by the beginnings of their names."""
NOT_IN_ROLLOUT = ("actor.", "algorithm.", "plane.", "staleness.", "checkpoint.", "eval.")
"""Options that change nothing of how responses are generated."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One fresh process.

    kind, name  of its folder in the campaign
    title       for a reader: ``block 1 P+S seed 2``
    before      words before ``--set``, in which ``{run_dir}`` stands for the folder of the run
    sets        options by dotted name, without run.dir
    lines       of metrics.jsonl when it is through; 0: it writes none
    """

    kind: Literal["cells", "alone"]
    name: str
    title: str
    stage: Stage | Literal[""]
    condition: str
    seed: int
    block: int = -1
    position: int = -1
    before: tuple[str, ...]
    sets: Mapping[str, Any] = field(default_factory=dict)
    lines: int

    @property
    def group(self) -> str:
        """Jobs of one group take about as long as one another."""
        return f"{self.kind} {self.stage} {self.condition}"

    def words(self, run_dir: Path) -> tuple[str, ...]:
        """The command line after ``stretto``."""
        before = [word.replace("{run_dir}", str(run_dir)) for word in self.before]
        sets = [f"{name}={toml_text(value)}" for name, value in self.sets.items()]
        return (*before, *(word for text in (*sets, f"run.dir={run_dir}") for word in ("--set", text)))


def cell_sets(plan: Plan, condition: str, seed: int) -> dict[str, Any]:
    """Every option of a cell that its recipe does not set, but run.dir: it evaluates nothing unless the plan asks."""
    own = {"run.seed": seed, "run.updates": plan.updates}
    return {"eval.every": 0} | plan.settings | condition_sets(plan, condition) | own


def writes_checkpoints(plan: Plan, condition: str) -> bool:
    """Whether the plan asks for them: they cost time and room that no measurement needs."""
    return any(name.startswith("checkpoint.") for name in cell_sets(plan, condition, 0))


def cell_job(plan: Plan, cell: Cell, updates_per_line: int = 1) -> Job:
    options = () if writes_checkpoints(plan, cell.condition) else ("--no-checkpoints",)
    return Job(
        kind="cells",
        name=cell.name,
        title=f"block {cell.block} {cell.condition} seed {cell.seed}",
        stage="",
        condition=cell.condition,
        seed=cell.seed,
        block=cell.block,
        position=cell.position,
        before=("train", plan.recipe, *options),
        sets=cell_sets(plan, cell.condition, cell.seed),
        lines=plan.updates // updates_per_line,
    )


def alone_condition(plan: Plan, stage: Stage, condition: str) -> str:
    """Under which name a stage of this condition is run alone: switches and variants that do not touch it are left out.

    The processor knows P alone, generation no switch, and training is measured without P, which is not part of it.
    """
    letters, bracket, label = condition.partition("(")
    own = {"processor": "P", "rollout": "", "training": "RS"}[stage]
    kept = "+".join(letter for letter in letters.split("+") if letter in own) or BASE
    ignored = {"processor": NOT_IN_PROCESSOR, "rollout": NOT_IN_ROLLOUT, "training": ()}[stage]
    touches = any(not name.startswith(tuple(ignored)) for name in plan.variants.get(condition, {}))
    return f"{kept}{bracket}{label}" if touches else kept


def alone_jobs(plan: Plan, updates_per_line: int = 1) -> tuple[Job, ...]:
    """Every stage of every condition once, with the first seed of the plan."""
    warmup, seed = plan.warmup or WARMUP, plan.seeds[0]
    stages: Sequence[Stage] = ("processor", "rollout", "training")
    jobs: dict[str, Job] = {}
    for stage in stages:
        for condition in plan.conditions:
            name = alone_condition(plan, stage, condition)
            letters = name.partition("(")[0].split("+")
            sets = cell_sets(plan, condition, seed) | {"run.updates": (warmup + MEASURED) * updates_per_line}
            sets |= {"switches.logprob_reuse": "R" in letters, "switches.chunk_overlap": "S" in letters}
            sets |= {"eval.every": 0} | ({} if "P" in letters else {"switches.processor_pool": 0})
            job = Job(
                kind="alone",
                name=f"{stage}-{name}",
                title=f"{stage} alone, {name}",
                stage=stage,
                condition=name,
                seed=seed,
                before=(
                    *("bench", "alone", stage, plan.recipe, "{run_dir}"),
                    *("--condition", name, "--warmup", str(warmup)),
                ),
                sets=sets,
                lines=warmup + MEASURED if stage == "training" else 0,
            )
            jobs.setdefault(job.name, job)
    return tuple(jobs.values())
