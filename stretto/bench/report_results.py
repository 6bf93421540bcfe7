"""The first half of a report: what may be claimed, the verdicts, and the runs that they come from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from stretto.bench import plots
from stretto.bench.arithmetic import percent
from stretto.bench.design import design
from stretto.bench.document import Block, Bullets, Figure, Gallery, Legend, Paragraph, Section, Table
from stretto.bench.phrases import effect, interval, judged, listed, number, plural, ratio
from stretto.bench.plan import BASE, toml_text
from stretto.bench.results import NOT_MEASURED, Analysis, CellResult, Verdict
from stretto.bench.svg import colour

SCOPES = {
    "fresh_process_first_step": "first step of a fresh process",
    "steady_state": "steady state",
    "transient": "transient (exploratory)",
}
PANELS = (
    ("tokens_per_s", "throughput (tokens/s)"),
    ("loss", "loss"),
    ("reward_mean", "reward, mean"),
    ("grad_norm", "gradient norm"),
    ("ppo_kl_k1", "PPO-KL (k1, nats)"),
    ("response_length_mean", "response length, mean (tokens)"),
    ("staleness_mean", "staleness, mean (versions)"),
)
"""Metrics of the curves, and what their panels are called. ``tokens_per_s`` of an update is tokens / step_s."""


def accepted(analysis: Analysis, condition: str | None = None) -> list[CellResult]:
    """Of one condition, or all."""
    return [cell for cell in analysis.cells if cell.status == "accepted" and condition in (None, cell.condition)]


def measured_conditions(analysis: Analysis) -> list[str]:
    """Those with an accepted cell, in the order of the plan."""
    return [name for name in analysis.plan.conditions if accepted(analysis, name)]


def index_of(analysis: Analysis, condition: str) -> int:
    """Which colour a condition has."""
    return analysis.plan.conditions.index(condition)


def missing_cells(analysis: Analysis) -> list[str]:
    """Planned ones of which no attempt was accepted."""
    plan = analysis.plan
    planned = design(plan.conditions, plan.seeds, plan.repetitions, plan.order).cells
    done = {cell.name for cell in accepted(analysis)}
    return [cell.name for cell in planned if cell.name not in done]


# What may be claimed --------------------------------------------------------------------------------------------------


def claim(analysis: Analysis) -> Section:
    """What a reader who stops after ten lines must know."""
    scope = analysis.scope
    blocks: list[Block] = [Paragraph(scope.limit, "lead")]
    blocks.append(
        Paragraph(f"Scope: **{SCOPES[scope.name]}** (`{scope.name}`), computed from what was run; nobody chooses it.")
    )
    if not scope.claim:
        unclaimed = "Verdicts and figures below describe these runs and carry no claim."
        blocks.append(Paragraph(unclaimed, "warning"))
    elif scope.reasons:
        blocks.append(Bullets([f"no steady state: {reason}" for reason in scope.reasons]))
    told = [headline(verdict, scope.claim) for verdict in analysis.verdicts]
    blocks.append(Bullets([*told, *_counts(analysis)]))
    if len(analysis.warnings) > 1:
        blocks.append(Bullets(analysis.warnings, "warning"))
    else:
        blocks += [Paragraph(warning, "warning") for warning in analysis.warnings]
    return Section("claim", "What may be claimed", blocks)


def headline(verdict: Verdict, claim: bool) -> str:
    """``P+S over B (primary): **supported**, +4.2 % (+3.1 % to +5.3 %) over 4 blocks``. ``claim``: of the scope."""
    found = verdict.judgement
    name = f"{found.contrast} (primary)" if found.primary else str(found.contrast)
    over = "" if found.estimate is None else f", {effect(found.estimate)} over {plural(found.estimate.blocks, 'block')}"
    return f"{name}: **{judged(found.finding, claim)}**{over}"


def _counts(analysis: Analysis) -> Iterator[str]:
    by_status = {
        status: sum(cell.status == status for cell in analysis.cells) for status in ("accepted", "rejected", "excluded")
    }
    told = listed([f"{count} {status}" for status, count in by_status.items()])
    yield f"attempts: {told}; {plural(analysis.blocks_planned, 'block')} planned"
    if analysis.removed:
        yield f"not as the journal has them: **{plural(len(analysis.removed), 'attempt')}**, gone or changed since"
    if missing := missing_cells(analysis):
        yield f"planned cells without an accepted attempt: {', '.join(missing)}"
    if analysis.square_complete:
        yield "the order of conditions is a complete square: each stands equally often at each place"
    else:
        yield "the order of conditions is **no complete square**, or not all of it was accepted"


# Verdicts -------------------------------------------------------------------------------------------------------------


def verdicts(analysis: Analysis) -> Section:
    if not analysis.verdicts:
        return Section("verdicts", "Verdicts", [Paragraph("There is no contrast to judge: no cell was accepted.")])
    rows = [
        (
            f"{verdict.judgement.contrast}{' (primary)' if verdict.judgement.primary else ''}",
            judged(verdict.judgement.finding, analysis.scope.claim),
            NOT_MEASURED if verdict.judgement.estimate is None else ratio(verdict.judgement.estimate.mean),
            _interval(verdict),
            _each_block(verdict),
            "; ".join(verdict.judgement.reasons) or "nothing",
        )
        for verdict in analysis.verdicts
    ]
    main = Table(
        caption="Gains in tokens per second, paired within blocks",
        head=("contrast", "verdict", "gain", "95 % interval", "each block", "what is missing for an effect"),
        rows=rows,
        words=frozenset({1, 4, 5}),
        cards=True,
    )
    largest = max((abs(value) for value in analysis.aa), default=None)
    drawn = [
        plots.Effect(
            label=str(verdict.judgement.contrast),
            told=f"{ratio(found.mean)}, {judged(verdict.judgement.finding, analysis.scope.claim)}",
            colour=index_of(analysis, verdict.judgement.contrast.treated),
            values=found.values,
            mean=found.mean,
            low=found.low,
            high=found.high,
        )
        for verdict in analysis.verdicts
        if (found := verdict.judgement.estimate) is not None
    ]
    blocks: list[Block] = [main, *_variants(analysis)]
    if drawn:
        picture = plots.effects("Gains in throughput", drawn, largest)
        caption = (
            "Gain of each contrast: mean and 95 % t interval over blocks, a ring for each block, an arrow where an "
            "interval goes on."
        )
        if largest:
            caption += " An effect inside the shade is no larger than the difference between two runs of B."
        blocks.append(Figure(name="effects", svg=picture, caption=caption))
    return Section("verdicts", "Verdicts", [*blocks, _rules(analysis), *_reading(analysis)])


def _variants(analysis: Analysis) -> Iterator[Block]:
    """What a condition is whose name is not made of switches alone."""
    found = [
        f"`{name}` is `{name.partition('(')[0]}` with "
        + listed([f"`{option} = {toml_text(value)}`" for option, value in sorted(options.items())])
        for name, options in analysis.plan.variants.items()
        if name in analysis.plan.conditions
    ]
    if found:
        yield Bullets(found, "note")


def _interval(verdict: Verdict) -> str:
    found = verdict.judgement.estimate
    return NOT_MEASURED if found is None else interval(found.low, found.high)


def _each_block(verdict: Verdict) -> str:
    found = verdict.judgement.estimate
    return "none" if found is None else ", ".join(number(percent(v), signed=True) for v in found.values) + " %"


def _rules(analysis: Analysis) -> Table:
    """What the rules looked at, and what decides nothing."""
    rows = []
    for verdict in analysis.verdicts:
        found = verdict.judgement
        signs = "none" if found.estimate is None else "{} up, {} down".format(*found.estimate.signs)
        within = NOT_MEASURED if verdict.within_runs is None else interval(*verdict.within_runs)
        target, reached = verdict.target if verdict.target is not None else (None, "none")
        aimed = "none" if target is None else f"{number(target, signed=True)} %"
        rows.append(
            (
                str(found.contrast),
                signs,
                f"{number(found.p_adjusted)}{'' if found.primary else ' (Holm)'}",
                "no A/A pair" if found.largest_aa is None else f"{number(percent(found.largest_aa))} %",
                "cannot be said" if verdict.detectable is None else ratio(verdict.detectable),
                f"{aimed}{'' if target is None else f': {judged(reached, analysis.scope.claim)}'}",
                within,
            )
        )
    return Table(
        caption="What the rules looked at. The last column decides nothing",
        head=("contrast", "signs of blocks", "p", "largest A/A", "detectable (80 %)", "target", "within runs"),
        rows=rows,
        cards=True,
    )


def _reading(analysis: Analysis) -> list[Block]:
    return [
        Paragraph(
            "`supported`: the 95 % interval lies above 0 (contrasts other than the primary one: Holm's p is at most "
            "5 %), with fewer than 6 blocks every block has that sign, and the effect is larger than the largest "
            "difference of two runs of B in one block. `negative` is its mirror. A guardrail that either condition of "
            "a contrast failed replaces the verdict, and a switch that had nothing to do leaves it at `inconclusive`. "
            "A target is `reached` where the interval lies at or above it and the verdict is `supported`, `missed` "
            "where it lies below, else `open`. `detectable` is the smallest effect that this design would have found "
            "with 80 % power: `inconclusive` says nothing about effects below it. `within runs` is a bootstrap of "
            "steps: it knows nothing of how runs differ.",
            "note",
        )
    ]


# Runs -----------------------------------------------------------------------------------------------------------------


def runs(analysis: Analysis) -> Section:
    """Every value that a verdict comes from."""
    found = measured_conditions(analysis)
    windows = ", ".join(map(str, analysis.plan.measured))
    told = Paragraph(
        f"Tokens per second of every accepted run over updates {windows}: all tokens over all seconds of the windows, "
        "never a mean of rates; prompt and response tokens, no padding."
    )
    if not found:
        return Section("runs", "Every run", [Paragraph("No run was accepted, so that there is no throughput.")])
    strips = [
        plots.Strip(
            label=name,
            colour=index_of(analysis, name),
            values=tuple(
                (cell.throughput.per_s, f"{cell.name}, seed {cell.seed}: {number(cell.throughput.per_s)} tokens/s")
                for cell in accepted(analysis, name)
                if cell.throughput is not None
            ),
        )
        for name in found
    ]
    figure = Figure(
        name="runs",
        svg=plots.strips("Throughput of every run", [strip for strip in strips if strip.values], "tokens/s"),
        caption="Throughput of every accepted run, and the range of each condition.",
    )
    return Section("runs", "Every run", [told, _by_block(analysis), _ranges(analysis, found), figure])


def _by_block(analysis: Analysis) -> Table:
    """Blocks down, cells across; B twice where the design has pairs of it."""
    places = _places(analysis)
    rows = []
    for block in sorted({cell.block for cell in analysis.cells}):
        mine = [cell for cell in analysis.cells if cell.block == block]
        seeds = sorted({cell.seed for cell in mine})
        cells = [_told(mine, condition, at) for _, condition, at in places]
        base = [cell.throughput.per_s for cell in _in_order(mine, BASE) if cell.throughput is not None]
        aa = ratio(math.log(base[-1] / base[0])) if len(base) > 1 else "no pair"
        rows.append((f"{block}, seed {', '.join(map(str, seeds))}", *cells, aa))
    return Table(
        caption="Tokens per second by block",
        head=("block", *(label for label, _, _ in places), "A/A"),
        rows=rows,
    )


def _places(analysis: Analysis) -> list[tuple[str, str, int]]:
    """Columns: label, condition, which of its cells in a block."""
    others = [(name, name, 0) for name in analysis.plan.conditions if name != BASE]
    if analysis.plan.order == "pairs":
        return [(BASE, BASE, 0), *others]
    return [("B, first", BASE, 0), *others, ("B, last", BASE, -1)]


def _in_order(cells: Sequence[CellResult], condition: str) -> list[CellResult]:
    found = [cell for cell in cells if cell.condition == condition and cell.status == "accepted"]
    return sorted(found, key=lambda cell: cell.position)


def _told(cells: Sequence[CellResult], condition: str, at: int) -> str:
    """The throughput of a place, or what became of its attempts."""
    positions = sorted({cell.position for cell in cells if cell.condition == condition})
    if not positions or (at == -1 and len(positions) < 2):
        return "not run"
    here = [cell for cell in cells if cell.condition == condition and cell.position == positions[at]]
    done = [cell.throughput.per_s for cell in here if cell.status == "accepted" and cell.throughput is not None]
    return number(done[0]) if done else max(here, key=lambda cell: cell.attempt).status


def _ranges(analysis: Analysis, conditions: Sequence[str]) -> Table:
    rows = []
    for name in conditions:
        values = [cell.throughput.per_s for cell in accepted(analysis, name) if cell.throughput is not None]
        if values:
            middle = math.exp(math.fsum(map(math.log, values)) / len(values))
            apart = f"{number(100 * (max(values) / min(values) - 1))} %"
            step = analysis.step_s.get(name)
            rows.append(
                (name, str(len(values)), number(middle), number(min(values)), number(max(values)), apart, number(step))
            )
    return Table(
        caption="Tokens per second by condition, and mean seconds of a measured update",
        head=("condition", "runs", "geometric mean", "lowest", "highest", "range", "step (s)"),
        rows=rows,
    )


# Curves ---------------------------------------------------------------------------------------------------------------


def curves(analysis: Analysis) -> Section:
    """Every metric of a sceptic's first question, of every run, warm-up included."""
    names = list(analysis.plan.conditions)
    figures = []
    for metric, label in PANELS:
        cells = sorted(accepted(analysis), key=lambda cell: names.index(cell.condition))
        lines = [plots.Line(group=names.index(cell.condition), values=series(cell, metric)) for cell in cells]
        lines = [line for line in lines if any(value is not None for value in line.values)]
        if lines:
            drawn = plots.curves(label, names, lines, analysis.plan.warmup, analysis.plan.measured)
            figures.append(
                Figure(name=metric.replace("_", "-"), svg=drawn, caption=f"**{label}**{_apart(analysis, metric)}")
            )
    if not figures:
        return Section("curves", "Step by step", [Paragraph("No accepted run has metrics to draw.")])
    told = Paragraph(
        "Thin: each run. Thick: the mean of a condition's runs, thinner from condition to condition, so that lines "
        "that lie on one another all show. Shaded: warm-up, drawn at the frame's edge where it lies far outside. The "
        "bar below marks the windows.",
        "note",
    )
    legend = Legend([(colour(index), name) for index, name in enumerate(names)], toggles=True)
    missing = [label for metric, label in PANELS if all(label not in figure.caption for figure in figures)]
    absent = [Paragraph(f"Not measured in any run: {listed(missing)}.", "note")] if missing else []
    return Section("curves", "Step by step", [told, legend, Gallery(figures), *absent])


def series(cell: CellResult, metric: str) -> tuple[float | None, ...]:
    """One value an update; None where there is none."""
    if metric != "tokens_per_s":
        return tuple(cell.steps.get(metric, ()))
    pairs = zip(cell.steps.get("tokens", ()), cell.steps.get("step_s", ()), strict=False)
    return tuple(tokens / seconds if tokens is not None and seconds else None for tokens, seconds in pairs)


def _apart(analysis: Analysis, metric: str) -> str:
    """How far the runs of a block are apart: they have one seed, so that exact switches leave them equal."""
    if metric == "tokens_per_s":
        return ""
    blocks: dict[int, list[tuple[float | None, ...]]] = {}
    for cell in accepted(analysis):
        blocks.setdefault(cell.block, []).append(series(cell, metric))
    compared = [lines for lines in blocks.values() if len(lines) > 1]
    if not compared:
        return ""
    if all(first == second for lines in compared for first, second in pairwise(lines)):
        return ": all runs of a block the same at every update"
    return f": runs of a block up to {number(max(_largest(lines) for lines in compared))} apart"


def _largest(lines: Sequence[Sequence[float | None]]) -> float:
    """Over the updates that all of them have."""
    columns = [[value for value in column if value is not None] for column in zip(*lines, strict=False)]
    return max((max(column) - min(column) for column in columns if column), default=0.0)


def means(cells: Sequence[CellResult], of: str) -> Mapping[str, float]:
    """``phases``, ``busy`` or ``workload``, the mean over cells, in the order of the first."""
    names = dict.fromkeys(name for cell in cells for name in getattr(cell, of))
    found = {name: [getattr(cell, of)[name] for cell in cells if name in getattr(cell, of)] for name in names}
    return {name: math.fsum(values) / len(values) for name, values in found.items()}
