"""The second half of a report: where the time went, what was equal, what was rejected, and how to repeat it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stretto.bench import plots
from stretto.bench.arithmetic import Estimate
from stretto.bench.document import Block, Bullets, Details, Figure, Gallery, Paragraph, Section, Table
from stretto.bench.phases import PHASES
from stretto.bench.phrases import effect, listed, number, plural, ratio, share, size, spread
from stretto.bench.report_results import accepted, index_of, means, measured_conditions
from stretto.bench.results import NOT_MEASURED, Analysis, Hardware

STEP = "step"
"""Key of ``CellResult.phases`` that the others add up to."""

# Time -----------------------------------------------------------------------------------------------------------------


def phases(analysis: Analysis) -> Section:
    title = "Where a step goes"
    rows = {name: means(accepted(analysis, name), "phases") for name in measured_conditions(analysis)}
    parts = {name: {key: value for key, value in found.items() if key != STEP} for name, found in rows.items()}
    every = list(dict.fromkeys(key for found in parts.values() for key in found))
    names = [key for key in every if any(found.get(key) for found in parts.values())]
    parts = {name: {key: found[key] for key in names if key in found} for name, found in parts.items() if found}
    if not names:
        return Section("phases", title, [Paragraph(f"Phases: {NOT_MEASURED}.")])
    idle = [key for key in every if key not in names]
    meant = Bullets([f"`{key}`: {PHASES[key]}" for key in names if key in PHASES], "note")
    without = [Paragraph(f"No run spent time on: {listed(idle)}.", "note")] if idle else []
    table = Table(
        caption="Seconds an update inside the windows, mean over runs",
        head=("condition", *names, "step"),
        rows=[
            (name, *(number(found.get(key)) for key in names), number(rows[name].get(STEP, math.fsum(found.values()))))
            for name, found in parts.items()
        ],
    )
    figure = Figure(
        name="phases",
        svg=plots.stacked("Phases of a step", parts),
        caption="Seconds of a measured update by what the step waits for or does, mean over accepted runs.",
    )
    blocks: list[Block] = [figure, table, meant, *without, *_busy(analysis, rows), *_phase_effects(analysis)]
    return Section("phases", title, blocks)


def _busy(analysis: Analysis, phases_of: Mapping[str, Mapping[str, float]]) -> Iterator[Block]:
    busy = {name: means(accepted(analysis, name), "busy") for name in measured_conditions(analysis)}
    names = list(dict.fromkeys(key for found in busy.values() for key in found))
    if not names:
        return
    rows = []
    for name, found in busy.items():
        step = phases_of[name].get(STEP, analysis.step_s.get(name, math.nan))
        cells = []
        for key in names:
            seconds = found.get(key)
            idle = NOT_MEASURED if seconds is None else f"{number(seconds)} s, idle {share(1 - seconds / step)}"
            cells.append(idle)
        rows.append((name, *cells))
    caption = "Seconds an update that each resource worked, and the share of the step that it was idle"
    yield Table(caption=caption, head=("condition", *names), rows=rows)


def _phase_effects(analysis: Analysis) -> Iterator[Block]:
    found = {name: each for name, each in analysis.phase_effects.items() if each}
    if not found:
        return
    names = list(dict.fromkeys(key for each in found.values() for key in each))
    told = Table(
        caption="Seconds of a phase against the contrast's base, negative is faster: 95 % interval over blocks, "
        "without adjustment for how many there are. No ratio: one of the two spends no time on it. It decides nothing",
        head=("phase", *found),
        rows=[(name, *(_ratio(each.get(name)) for each in found.values())) for name in names],
    )
    yield Details("Every phase of each contrast against its base", [told])


def _ratio(found: Estimate | None) -> str:
    return "no ratio" if found is None else effect(found).replace(" (", "\n(")


def timelines(analysis: Analysis) -> Section:
    """The step of median length of a B and of another cell, on one scale."""
    found = analysis.timelines
    if not found:
        return Section("timeline", "One step, side by side", [Paragraph(f"Spans: {NOT_MEASURED}.")])
    # the axis is the step itself
    found = tuple(replace(step, spans=tuple(span for span in step.spans if span.name != "loop.step")) for step in found)
    longest = 1.02 * max(step.seconds for step in found)
    totals: dict[str, float] = {}
    for span in (span for step in found for span in step.spans):
        totals[span.name] = totals.get(span.name, 0.0) + span.end_s - span.start_s
    names = sorted(totals, key=lambda name: -totals[name])
    figures = [
        Figure(
            name=f"timeline-{number_}",
            svg=plots.timeline(f"Update {step.update} of {step.condition}", step, longest, names),
            caption=f"**{step.condition}**: update {step.update} of `{step.cell}`, {number(step.seconds)} s, the "
            "median of its windows",
        )
        for number_, step in enumerate(found)
    ]
    told = Paragraph(
        "Both on one scale. Numbers in bars are partitions (rollout batches); what belongs to a later one than the "
        "step trains is paler. Where pale work lies above the actor's, the rollout runs ahead of training.",
        "note",
    )
    return Section("timeline", "One step, side by side", [told, Gallery(figures)])


# Hardware and workload ------------------------------------------------------------------------------------------------


def hardware(analysis: Analysis) -> Section:
    """Only samples inside the windows count; what was not sampled says so."""
    rows, gpu_rows, told = [], [], set()
    for name in measured_conditions(analysis):
        cells = accepted(analysis, name)
        found = [cell.hardware for cell in cells]
        rows.append((name, *_cpu(found)))
        uuids = dict.fromkeys((gpu.uuid, gpu.name) for one in found if one is not None for gpu in one.gpus)
        for uuid, model in uuids:
            gpu_rows.append((name, f"{model} {uuid}", *_gpu(found, uuid)))
        told |= {one.gpu_told for one in found if one is not None and one.gpu_told}
    blocks: list[Block] = [
        Table(
            caption="CPU inside the measured windows: mean of runs, and the range between them",
            head=("condition", "own cores", "cores of others", "stolen cores", "peak resident memory", "samples"),
            rows=rows,
        )
        if rows
        else Paragraph(f"CPU: {NOT_MEASURED}.")
    ]
    if gpu_rows:
        head = ("condition", "GPU", "utilisation (%)", "peak memory", "power (W)", "samples")
        caption = "GPUs inside the measured windows, by UUID"
        blocks.append(Table(caption=caption, head=head, rows=gpu_rows, words=frozenset({1})))
    else:
        why = f" ({'; '.join(sorted(told))})" if told else ""
        blocks.append(Paragraph(f"GPU utilisation, memory and power: **{NOT_MEASURED}**{why}. That is not 0."))
    return Section("hardware", "Hardware inside the windows", blocks)


def _cpu(found: Sequence[Hardware | None]) -> tuple[str, ...]:
    def of(key: str) -> list[float | None]:
        return [None if one is None else getattr(one, key) for one in found]

    peaks = [one.peak_rss_bytes for one in found if one is not None]
    samples = sum(one.samples for one in found if one is not None)
    memory = size(max(peaks)) if peaks else NOT_MEASURED
    return (spread(of("own_cores")), spread(of("other_cores")), spread(of("steal_cores")), memory, f"{samples:,}")


def _gpu(found: Sequence[Hardware | None], uuid: str) -> tuple[str, ...]:
    gpus = [next((gpu for gpu in one.gpus if gpu.uuid == uuid), None) if one is not None else None for one in found]
    there = [gpu for gpu in gpus if gpu is not None]
    return (
        spread([None if gpu is None else gpu.utilisation_percent for gpu in gpus]),
        size(max((gpu.peak_memory_bytes for gpu in there if gpu.peak_memory_bytes is not None), default=None)),
        spread([None if gpu is None else gpu.power_w for gpu in gpus]),
        f"{sum(gpu.samples for gpu in there):,}",
    )


def workload(analysis: Analysis) -> Section:
    """Whether the runs that are compared did the same work."""
    names = measured_conditions(analysis)
    keys = list(dict.fromkeys(key for cell in accepted(analysis) for key in cell.workload))
    blocks: list[Block] = [Bullets(analysis.equality)] if analysis.equality else []
    if keys:
        rows = [
            (name, *(spread([cell.workload.get(key) for cell in accepted(analysis, name)]) for key in keys))
            for name in names
        ]
        words = [key.replace("_", " ") for key in keys]
        caption = "Work of a run inside the windows: mean, and the range between runs"
        blocks.append(Table(caption=caption, head=("condition", *words), rows=rows))
    engaged = [f"`{cell.name}`: {line}" for cell in accepted(analysis) for line in cell.engaged]
    if engaged:
        blocks.append(Details("What shows that the switches were at work", [Bullets(engaged)]))
    return Section("workload", "Equal work", blocks or [Paragraph(f"Work of runs: {NOT_MEASURED}.")])


# Limits and shares ----------------------------------------------------------------------------------------------------


def efficiency(analysis: Analysis) -> Section:
    """The roofline: no overlap makes a step shorter than its slowest stage alone."""
    title = "How far from the pipeline's limit"
    if not analysis.efficiency:
        return Section("efficiency", title, [Paragraph(f"Stages alone: {NOT_MEASURED}.")])
    rows, told_any = [], any(each.told for each in analysis.efficiency)
    for each in analysis.efficiency:
        reached, gap = share(each.efficiency), share(None if each.efficiency is None else 1 - each.efficiency)
        if each.told.startswith("undefined"):  # nothing that could have been measured
            reached = gap = "undefined"
        stages = map(number, (each.processor_s, each.rollout_s, each.training_s))
        rows.append(
            (each.condition, *stages, number(each.step_s), reached, gap, *([each.told or "none"] if told_any else []))
        )
    table = Table(
        caption="Seconds an update: each stage with the others idle, and the measured step",
        head=("condition", "processor", "rollout", "training", "step", "efficiency", "distance", "remark")[
            : len(rows[0])
        ],
        rows=rows,
        words=frozenset({7}),
        cards=True,
    )
    told = Paragraph(
        "Efficiency is the slowest stage alone over the measured step: at 100 % nothing is left to gain by overlap. "
        "Stages alone run once, under one seed and on early partitions; generation alone has the initial weights. "
        "Where later responses are shorter, or a machine drifts, a condition can exceed 100 %: then the limit that "
        "was measured is not that of its windows. Every update of theirs is in `alone.csv`.",
        "note",
    )
    drawn = [
        plots.Limit(
            label=each.condition,
            stages={"processor": each.processor_s, "rollout": each.rollout_s, "training": each.training_s},
            step_s=each.step_s,
        )
        for each in analysis.efficiency
    ]
    caption = "Stages alone as bars, the measured step as a mark: the longest bar is the limit of the pipeline."
    figure = Figure(name="limits", svg=plots.limits("Limits of the pipeline", drawn), caption=caption)
    alone = [(each.stage, each.condition, number(each.seconds), str(each.updates)) for each in analysis.alone]
    raw = Table(caption="Stages alone", head=("stage", "condition", "seconds an update", "updates"), rows=alone)
    return Section(
        "efficiency", title, [told, figure, table, *([Details("Every stage alone", [raw])] if alone else [])]
    )


def packing(analysis: Analysis) -> Section:
    rows = [
        (each.condition, str(each.chunks_per_mini), number(each.microbatches), share(each.fill))
        for each in analysis.packing
    ]
    if not rows:
        return Section("packing", "Packing", [Paragraph(f"Microbatches and their fill: {NOT_MEASURED}.")])
    table = Table(
        caption="What laying out microbatches by chunks costs: means over runs and updates in the windows",
        head=("condition", "chunks per mini", "microbatches", "fill (real of laid-out tokens)"),
        rows=rows,
    )
    return Section("packing", "Packing", [table])


def attribution(analysis: Analysis) -> Section:
    """Shares where the cells allow them, and else increments, called sequential."""
    blocks: list[Block] = []
    for found in analysis.factorials:
        first, second = found.names
        quantities = (
            (f"{first}, main effect (share)", found.first),
            (f"{second}, main effect (share)", found.second),
            (f"total: {first}+{second} over B", found.total),
            ("interaction", found.interaction),
        )
        rows = [(name, ratio(each.mean), effect_range(each), f"{each.mean:+.5f}") for name, each in quantities]
        blocks.append(
            Table(
                caption=f"{{{first} off, on}} x {{{second} off, on}} over {plural(found.total.blocks, 'block')}",
                head=("quantity", "gain", "95 % interval", "in logs"),
                rows=rows,
            )
        )
        drawn = [
            plots.Effect(
                label=name,
                told=ratio(each.mean),
                colour=0 if name == "interaction" else index_of(analysis, color),
                values=each.values,
                mean=each.mean,
                low=each.low,
                high=each.high,
            )
            for (name, each), color in zip(quantities, (first, second, f"{first}+{second}", "B"), strict=True)
        ]
        caption = f"Shares of {first} and {second}, their total, and what both bring beyond the sum of each alone."
        name = f"shares-{first}-{second}".lower()
        blocks.append(
            Figure(name=name, svg=plots.effects(f"Shares of {first} and {second}", drawn, None), caption=caption)
        )
    if analysis.factorials:
        told = (
            "Main effects are Shapley shares: in logs they add up to the total, in every block. Intervals are of each "
            "quantity alone; none of them is a verdict. No share is told across R and S, which are never on together."
        )
        blocks.append(Paragraph(told, "note"))
    if analysis.increments:
        blocks.append(
            Table(
                caption="Increments, which depend on the order in which switches are added and are no shares",
                head=("increment", "contrast", "gain (95 % interval)"),
                rows=[(each.name, str(each.contrast), effect(each.estimate)) for each in analysis.increments],
            )
        )
    return Section(
        "attribution",
        "How much is whose",
        blocks or [Paragraph("These conditions allow neither shares nor increments of switches.")],
    )


def effect_range(found: Estimate) -> str:
    return effect(found).partition(" (")[2].removesuffix(")")
