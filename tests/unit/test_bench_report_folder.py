"""From the files of a campaign to its report: what the analyzer finds is what the report's CSV says."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

import pytest
from bench_breaks import edit_metrics, tree_hash
from bench_folder import PLAN, make_campaign, plan_of

from stretto.bench.analyze import analyze
from stretto.bench.arithmetic import percent
from stretto.bench.design import Cell
from stretto.bench.report import write_report
from stretto.bench.results import Analysis

GAINS = {"B": 1.0, "P": 1.03, "P+R": 1.2, "P+S": 1.1}
SEEDS = (0, 1)


def numbers(cell: Cell) -> dict[str, list[float]]:
    """First steps are long; tokens and seconds differ from update to update, so that no mean of rates is right."""
    speed = GAINS[cell.condition] * (1 + 0.01 * cell.block) * (1 + 0.002 * cell.position)
    tokens = [1000.0, 1000.0, *([1000.0, 4000.0] * 2)]
    seconds = [30.0, 30.0, *([1.0, 10.0] * 2)]
    return {"tokens": tokens, "step_s": [value / speed for value in seconds]}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Analysis, Path]:
    """Campaign, analysis, report; one cell of P+S has a step without a loss."""
    folder = tmp_path_factory.mktemp("campaign") / "campaign"
    plan = plan_of(seeds=SEEDS, targets_percent={"P+S": 5.0})
    alone = {("rollout", "B"): 1.5, ("training", "B"): 4.0, ("training", "P+S"): 4.0, ("processor", "P"): 1.0}
    make_campaign(folder, plan, numbers, alone=alone)
    edit_metrics(next(folder.glob("cells/01-*-P+S")) / "attempt-1", 4, loss=None)
    before = tree_hash(folder)
    analysis = analyze(folder)
    write_report(analysis, folder, folder.parent / "report")
    assert tree_hash(folder) == before
    return folder, analysis, folder.parent / "report"


def throughputs(out: Path) -> dict[tuple[int, str], list[float]]:
    """Of block and condition, with nothing but csv and sums."""
    totals: dict[tuple[int, str, str], list[float]] = {}
    for row in csv.DictReader((out / "steps.csv").open()):
        if row["status"] == "accepted" and row["measured"] == "1":
            total = totals.setdefault((int(row["block"]), row["condition"], row["cell"]), [0.0, 0.0])
            total[0] += float(row["tokens"])
            total[1] += float(row["step_s"])
    found: dict[tuple[int, str], list[float]] = {}
    for (block, condition, _), (tokens, seconds) in totals.items():
        found.setdefault((block, condition), []).append(tokens / seconds)
    return found


def test_throughput_and_effects_from_the_csv_are_those_of_the_analyzer(done: tuple[Path, Analysis, Path]) -> None:
    _, analysis, out = done
    found = throughputs(out)
    assert sorted(value for values in found.values() for value in values) == pytest.approx(
        sorted(cell.throughput.per_s for cell in analysis.cells if cell.throughput is not None)
    )
    for verdict in analysis.verdicts:
        each = []
        for block in (0, 1):
            pair = [found.get((block, name)) for name in (verdict.judgement.contrast.treated, "B")]
            if pair[0] and pair[1]:
                each.append(statistics.fmean(map(math.log, pair[0])) - statistics.fmean(map(math.log, pair[1])))
        assert verdict.judgement.estimate.mean == pytest.approx(statistics.fmean(each))


def test_throughput_by_hand(done: tuple[Path, Analysis, Path]) -> None:
    """(1000, 1) and (4000, 10), twice: 10,000 tokens in 22 s; the long first steps do not count."""
    assert throughputs(done[2])[0, "B"][0] == pytest.approx(10_000 / 22)


def test_the_report_has_what_the_folder_has(done: tuple[Path, Analysis, Path]) -> None:
    folder, analysis, out = done
    text = (out / "report.md").read_text()
    rejected = next(cell for cell in analysis.cells if cell.status == "rejected")
    assert rejected.condition == "P+S" and rejected.reasons[0] in text
    assert percent(analysis.verdicts[0].judgement.estimate.mean) == pytest.approx(10, abs=1)
    assert "What shows that the switches were at work" in text
    assert f"stretto bench report {folder}" in text and "not measured" in text
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert {row["machine_id"] for row in rows} == {"machine-a"} and {row["wall_s"] for row in rows} == {"60.0"}
    assert len(rows) == 10 and PLAN["recipe"] in rows[0]["command"]
