"""A report says what the analysis says, in the right order, and its CSV is enough to recompute what matters."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_analysis import analysis_of, plan_of

from stretto.bench.arithmetic import percent
from stretto.bench.campaign import Note, write_note
from stretto.bench.markup import VOID
from stretto.bench.report import write_report
from stretto.bench.report_record import recompute_program
from stretto.bench.report_text import LONGEST, WIDTH, summary
from stretto.bench.results import Analysis, Gpu
from stretto.bench.scope import decide
from stretto.types import StrettoError

SECTIONS = [
    "claim", "verdicts", "runs", "curves", "phases", "timeline", "hardware", "workload", "efficiency", "packing",
    "attribution", "guardrails", "rejected", "provenance", "repeat",
]  # fmt: skip


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analysis_of(plan_of(("B", "P", "R", "S", "P+R", "P+S")))


@pytest.fixture(scope="module")
def out(analysis: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(analysis, folder / "campaign", folder / "out")
    return folder / "out"


def written(analysis: Analysis, folder: Path) -> Path:
    write_report(analysis, folder / "campaign", folder / "out")
    return folder / "out"


# The numbers ---------------------------------------------------------------------------------------------------------


def recomputed(analysis: Analysis, out: Path) -> dict[str, tuple[float, ...]]:
    """What the program that the report shows prints, run on the report's CSV by a Python without any library."""
    assert recompute_program(analysis).strip() in (out / "report.md").read_text()
    command = [sys.executable, "-I", "-S", "-c", recompute_program(analysis)]
    printed = subprocess.run(command, cwd=out, check=True, capture_output=True, text=True).stdout
    lines = (line.partition(": ") for line in printed.splitlines())
    return {name: tuple(map(float, re.findall(r"[-+]?\d+\.\d+", told))) for name, _, told in lines}


def test_the_shown_program_recomputes_throughput_and_effects(analysis: Analysis, out: Path) -> None:
    found = recomputed(analysis, out)
    for cell in analysis.cells:
        if cell.status == "accepted":
            assert found[cell.name] == pytest.approx((cell.throughput.per_s,), abs=1e-4)
    for verdict in analysis.verdicts:
        told = verdict.judgement.estimate
        expected = [percent(value) for value in (told.mean, told.low, told.high)]
        assert found[str(verdict.judgement.contrast)] == pytest.approx(expected, abs=1e-3)


def test_the_published_example_from_the_csv(tmp_path: Path) -> None:
    """B 964.6778 / 1241.8265 and P+R 1475.1722 / 1568.9149 tokens/s: +39.00 %, from about -59 % to +368 %."""
    rates = {("B", 0): 964.6778, ("B", 1): 1241.8265, ("P+R", 0): 1475.1722, ("P+R", 1): 1568.9149}
    made = analysis_of(plan_of(("B", "P+R"), seeds=(0, 1), updates=5))
    cells = []
    for cell in made.cells:
        tokens = (1.0, 1.0, 1.0, rates[cell.condition, cell.block], 0.0)
        cells.append(replace(cell, steps={"tokens": tokens, "step_s": (9.0, 9.0, 9.0, 0.5, 0.5)}))
    changed = replace(made, cells=tuple(cells))
    mean, low, high = recomputed(changed, written(changed, tmp_path))["P+R over B"]
    assert mean == pytest.approx(39.00, abs=0.005)
    assert low == pytest.approx(-59, abs=1) and high == pytest.approx(368, abs=3)


def test_a_block_without_both_of_its_baseline_is_in_no_effect(analysis: Analysis, tmp_path: Path) -> None:
    cells = [
        replace(cell, status="rejected", reasons=("x",)) if cell.name == "00-0-B" else cell for cell in analysis.cells
    ]
    changed = replace(analysis, cells=tuple(cells))
    mean = recomputed(changed, written(changed, tmp_path))["P over B"][0]
    (each,) = (
        found.judgement.estimate.values for found in analysis.verdicts if str(found.judgement.contrast) == "P over B"
    )
    assert mean == pytest.approx(percent(math.fsum(each[1:]) / 3), abs=1e-3)


def test_steps_csv_has_every_update_of_every_attempt(analysis: Analysis, out: Path) -> None:
    rows = list(csv.DictReader((out / "steps.csv").open()))
    assert len(rows) == 4 * 7 * 43 + 43 + 12
    assert {row["update"] for row in rows if row["measured"] == "1"} == {str(update) for update in range(3, 43)}
    assert {row["update"] for row in rows if row["warmup"] == "1"} == {"0", "1", "2"}
    first = next(row for row in rows if row["cell"] == "00-0-B" and row["update"] == "7")
    cell = next(cell for cell in analysis.cells if cell.name == "00-0-B")
    assert float(first["loss"]) == cell.steps["loss"][7]  # all digits


def test_runs_csv_has_what_the_note_says(analysis: Analysis, tmp_path: Path) -> None:
    note = Note(
        plan=analysis.plan_sha256, stage="", condition="B", seed=0, block=0, position=0, attempt=1,
        command=("python", "-m", "stretto.cli", "train", "a recipe.toml"), started="s", ended="e", wall_s=60.0,
        exit_code=0, status="finished", reason="", machine_id="m", boot_id="b", others_before=0.04,
        files={"run/manifest.json": "aa", "run/metrics.jsonl": "bb", "run/events.jsonl": "cc", "log.txt": "dd"},
    )  # fmt: skip
    path = tmp_path / "campaign" / "cells" / "00-0-B" / "attempt-1"
    path.mkdir(parents=True)
    write_note(path, note)
    out = written(analysis, tmp_path)
    rows = list(csv.DictReader((out / "runs.csv").open()))
    assert len(rows) == len(analysis.cells)
    assert rows[0]["command"] == "python -m stretto.cli train 'a recipe.toml'"
    assert rows[0]["machine_id"] == "m" and rows[1]["machine_id"] == ""
    assert [rows[0][f"{name}_sha256"] for name in ("manifest", "metrics", "events")] == ["aa", "bb", "cc"]
    assert rows[1]["metrics_sha256"] == ""
    assert float(rows[0]["tokens_per_s"]) == analysis.cells[0].throughput.per_s
    rejected = [row for row in rows if row["status"] == "rejected"]
    assert [row["tokens_per_s"] for row in rejected] == [""]
    assert rejected[0]["reasons"] == "loss: update 17 is null; git.dirty: true, in the first cell false"
    assert "train 'a recipe.toml'" in (out / "report.html").read_text()


def test_alone_csv_has_every_update_of_a_stage(analysis: Analysis, out: Path) -> None:
    rows = list(csv.DictReader((out / "alone.csv").open()))
    found = [(row["update"], float(row["seconds"])) for row in rows if row["stage"] == "processor"]
    assert found == [("0", 0.7), ("1", 0.9)]
    # where single updates are not on record, their mean is, and no update is named
    assert [(row["condition"], row["update"], row["seconds"]) for row in rows[2:]] == [
        (each.condition, "", str(each.seconds)) for each in analysis.alone[1:]
    ]
    assert "`alone.csv`" in (out / "report.md").read_text()


# The files -----------------------------------------------------------------------------------------------------------


def test_checksums_cover_every_file(out: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    assert set(sums) == set(files) - {"SHA256SUMS"}
    assert all(hashlib.sha256(files[name].read_bytes()).hexdigest() == value for name, value in sums.items())


def test_json_is_strict_and_the_plan_has_its_name(analysis: Analysis, out: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    data = json.loads((out / "report.json").read_text(), parse_constant=refuse)
    assert data["scope"]["name"] == "steady_state" and data["format"] == 1
    (plan,) = out.glob("*.plan.toml")
    assert hashlib.sha256(plan.read_bytes()).hexdigest() == analysis.plan.sha256 == plan.name.partition(".")[0]


def test_a_second_report_leaves_nothing_of_the_first(analysis: Analysis, tmp_path: Path) -> None:
    out = written(analysis, tmp_path)
    assert (out / "figures" / "timeline-1.svg").exists()
    written(replace(analysis, timelines=()), tmp_path)
    assert not (out / "figures" / "timeline-1.svg").exists()


def test_a_report_never_lies_in_a_campaign(analysis: Analysis, tmp_path: Path) -> None:
    campaign, other = tmp_path / "campaign", tmp_path / "other"
    for folder in (campaign, other):
        folder.mkdir()
        (folder / f"{'c' * 64}.plan.toml").write_text("")
    for out in (campaign, campaign / "cells" / "00-0-B", other):
        with pytest.raises(StrettoError, match="folder of its own"):
            write_report(analysis, campaign, out)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [f"{'c' * 64}.plan.toml"] * 2


def test_the_plan_of_an_earlier_report_is_replaced(analysis: Analysis, tmp_path: Path) -> None:
    written(analysis, tmp_path)
    plan = analysis.plan.model_copy(update={"name": "another"})
    out = written(replace(analysis, plan=plan, plan_sha256=plan.sha256), tmp_path)
    assert [path.name for path in out.glob("*.plan.toml")] == [f"{plan.sha256}.plan.toml"]


RECIPE = "# Twenty digits.\n#   stretto sft a b\n\n[run]\ndir = 'x' # no comment of the recipe's\n"


def test_a_recipe_says_how_its_model_and_data_are_made(analysis: Analysis, tmp_path: Path) -> None:
    path = tmp_path / analysis.plan.recipe
    path.parent.mkdir(parents=True)
    path.write_text(RECIPE)
    told = "What it says of itself, its model and its data:\n\n```text\nTwenty digits.\n  stretto sft a b\n```"
    named = f"The recipe is `{analysis.plan.recipe}`, SHA-256 `"
    plan = analysis.plan.model_copy(update={"recipe_sha256": hashlib.sha256(RECIPE.encode()).hexdigest()})
    text = (written(replace(analysis, plan=plan, plan_sha256=plan.sha256), tmp_path) / "report.md").read_text()
    assert f"{named}{plan.recipe_sha256}`. {told}" in text
    # one that was edited since is not the one that was run
    text = (written(analysis, tmp_path) / "report.md").read_text()
    assert f"{named}{'a' * 64}`. It was not at hand" in text and "Twenty digits" not in text


@pytest.mark.parametrize("name", ["report.html", "report.md", "steps.csv", "runs.csv", "alone.csv"])
def test_no_page_says_nan_or_none_of_python(out: Path, name: str) -> None:
    text = (out / name).read_text().replace("math.inf", "")  # of the program that it shows
    assert not re.search(r"\b(nan|NaN|None|inf|np\.float64)\b", text)


# The page ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Fails on what is not closed; keeps elements, ids, and words by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def test_page_is_whole_and_needs_nothing_else(out: Path) -> None:
    text = (out / "report.html").read_text()
    page = Page(text)
    assert not [tag for tag in ("script", "link", "img", "iframe") if page.all(tag)]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in page.all("a")]
    assert all(link and link.startswith("#") and link[1:] in ids for link in links)


def test_sections_stand_in_order_and_the_claim_above_everything(analysis: Analysis, out: Path) -> None:
    text = (out / "report.html").read_text()
    sections = [attributes["id"] for attributes in Page(text).all("section")]
    assert sections == SECTIONS
    assert text.index(analysis.scope.limit) < text.index("<nav") < text.index('id="verdicts"')
    lines = (out / "report.md").read_text().splitlines()
    assert f"**{analysis.scope.limit}**" in lines[:8]


def test_drawings_are_valid_and_have_words(out: Path) -> None:
    pictures = sorted((out / "figures").glob("*.svg"))
    assert len(pictures) == 15
    space = "{http://www.w3.org/2000/svg}"
    for path in pictures:
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{space}svg" and root.get("role") == "img"
        assert root.find(f"{space}title").text and root.find(f"{space}desc").text
        width, height = map(float, root.get("viewBox").split()[2:])
        for rect in root.iter(f"{space}rect"):
            x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + w <= width + 0.02 and y + h <= height
        for text in root.iter(f"{space}text"):
            assert 0 <= float(text.get("x")) <= width and 0 < float(text.get("y")) <= height
        assert f"(figures/{path.name})" in (out / "report.md").read_text()


def test_markdown_tables_have_one_width_each(out: Path) -> None:
    widths: list[int] = []
    for line in [*(out / "report.md").read_text().splitlines(), ""]:
        if line.startswith("|"):
            widths.append(len(re.findall(r"(?<!\\)\|", line)))
        else:
            assert len(set(widths)) <= 1
            widths = []


@pytest.mark.parametrize("finding", ["negative", "inconclusive", "guardrail failed"])
def test_other_verdicts_are_printed_like_supported(analysis: Analysis, tmp_path: Path, finding: str) -> None:
    primary, *others = analysis.verdicts
    changed = replace(primary.judgement, finding=finding, reasons=("told why",))
    other = replace(analysis, verdicts=(replace(primary, judgement=changed), *others))
    out = written(other, tmp_path)
    claim = (out / "report.md").read_text().partition("## Verdicts")[0]
    assert f"P+S over B (primary): **{finding}**" in claim
    assert (out / "report.html").read_text().count("told why") == 1
    assert f"P+S over B (primary): {finding}" in summary(other)


def test_outside_a_claim_no_verdict_stands_alone(analysis: Analysis, tmp_path: Path) -> None:
    """Nothing green, nowhere a bare `supported`: not in the claim, the table, the drawing or the terminal."""
    scope = decide(analysis.plan.measured, analysis.plan.warmup, [], declared=True, conditions=analysis.plan.conditions)
    assert not scope.claim
    out = written(replace(analysis, scope=scope), tmp_path)
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    claim, _, rest = text.partition("## Verdicts")
    assert "P+S over B (primary): **supported (no claim)**, +" in claim and "**supported**" not in claim
    assert "| P+S over B (primary) | supported (no claim) | +" in rest and "| supported |" not in rest
    assert "+12.0 %: reached (no claim)" in rest
    assert "supported (no claim)" in (out / "figures" / "effects.svg").read_text()
    assert '<span class="state open">supported (no claim)</span>' in page
    assert not re.search(r'class="state good">(supported|reached)', page)
    lines = [line for line in summary(replace(analysis, scope=scope)).splitlines() if " over " in line]
    assert len(lines) == len(analysis.verdicts) and all("(no claim)" in line for line in lines)


def test_every_warning_stands_with_the_claim(analysis: Analysis, tmp_path: Path) -> None:
    out = written(replace(analysis, warnings=("one", "and two")), tmp_path)
    assert "\n\n> - one\n> - and two\n" in (out / "report.md").read_text().partition("## Verdicts")[0]
    assert '<ul class="warning"><li>one</li><li>and two</li></ul>' in (out / "report.html").read_text()
    out = written(replace(analysis, warnings=("one",)), tmp_path)
    assert "\n\n> one\n" in (out / "report.md").read_text().partition("## Verdicts")[0]


def test_a_variant_says_what_it_changes(tmp_path: Path) -> None:
    changed = analysis_of(plan_of(("B", "P", "B(c=1)")))
    verdicts = (written(changed, tmp_path) / "report.md").read_text().partition("## Verdicts")[2].partition("\n## ")[0]
    assert "- `B(c=1)` is `B` with `actor.chunks_per_mini = 1`\n" in verdicts


def test_removed_attempts_stand_first_among_the_rejected(analysis: Analysis, tmp_path: Path) -> None:
    gone = "cells/03-5-B, attempt 1: its folder is gone"
    text = (written(replace(analysis, removed=(gone,)), tmp_path) / "report.md").read_text()
    assert "- not as the journal has them: **1 attempt**, gone or changed since" in text.partition("## Verdicts")[0]
    section = text.partition("## Rejected and excluded attempts")[2].partition("\n## ")[0]
    assert 0 < section.index(f"- {gone}") < section.index("| attempt | status | reasons |")
    kept = tuple(cell for cell in analysis.cells if cell.status == "accepted")
    text = (written(replace(analysis, cells=kept, removed=(gone,)), tmp_path) / "report.md").read_text()
    assert f"- {gone}\n\nNone that is there: all {len(kept)} attempts were accepted." in text


def test_what_was_not_measured_says_so(analysis: Analysis, tmp_path: Path) -> None:
    text = (written(analysis, tmp_path) / "report.md").read_text()
    assert "GPU utilisation, memory and power: **not measured** (there is no GPU). That is not 0." in text
    gpu = Gpu(uuid="GPU-1", name="H200", utilisation_percent=81.5, peak_memory_bytes=2**33, power_w=None, samples=40)
    cells = [
        replace(cell, hardware=cell.hardware and replace(cell.hardware, gpus=(gpu,), gpu_told=""))
        for cell in analysis.cells
    ]
    text = (written(replace(analysis, cells=tuple(cells)), tmp_path) / "report.md").read_text()
    assert "| P | H200 GPU-1 | 81.5 | 8.00 GiB | not measured | 160 |" in text
    cells = [replace(cell, hardware=None) for cell in analysis.cells]
    text = (written(replace(analysis, cells=tuple(cells)), tmp_path) / "report.md").read_text()
    assert "| P | not measured | not measured | not measured | not measured | 0 |" in text


def test_an_efficiency_without_its_stages_is_not_measured(analysis: Analysis, tmp_path: Path) -> None:
    """Undefined is only what has no value at all."""
    first, second, *_ = analysis.efficiency
    told = "undefined: at staleness.max = 0 the stages wait for one another"
    rows = (
        replace(first, rollout_s=None, efficiency=None, told="not measured alone: rollout"),
        replace(second, processor_s=None, rollout_s=None, training_s=None, efficiency=None, told=told),
    )
    text = (written(replace(analysis, efficiency=rows), tmp_path) / "report.md").read_text()
    step = r"\| [\d.]+ "
    assert re.search(rf"\| B \| 0.800 \| not measured \| 1.60 {step}\| not measured \| not measured \| not m", text)
    assert re.search(rf"\| P (\| not measured ){{3}}{step}\| undefined \| undefined \| undefined: at", text)


def test_words_of_others_are_no_markup(analysis: Analysis, tmp_path: Path) -> None:
    cells = [
        replace(cell, reasons=("<script>alert(1)</script> a|b",)) if cell.reasons else cell for cell in analysis.cells
    ]
    out = written(replace(analysis, cells=tuple(cells)), tmp_path)
    assert not Page((out / "report.html").read_text()).all("script")
    assert "&lt;script>alert(1)&lt;/script> a\\|b" in (out / "report.md").read_text()


def test_nothing_accepted(analysis: Analysis, tmp_path: Path) -> None:
    cells = [
        replace(cell, status="rejected", reasons=("git.dirty",), throughput=None, phases={}, busy={}, hardware=None)
        for cell in analysis.cells
    ]
    bare = replace(
        analysis,
        cells=tuple(cells),
        scope=decide(analysis.plan.measured, 3, [], conditions=analysis.plan.conditions, declared=True),
        verdicts=tuple(
            replace(
                verdict,
                judgement=replace(verdict.judgement, estimate=None, largest_aa=None, finding="inconclusive"),
                within_runs=None,
                detectable=None,
                target=None,
            )
            for verdict in analysis.verdicts
        ),
        aa=(), step_s={}, phase_effects={}, guardrails={}, factorials=(), increments=(), efficiency=(), packing=(),
        alone=(), timelines=(), equality=(), provenance={},
    )  # fmt: skip
    out = written(bare, tmp_path)
    text = (out / "report.md").read_text()
    assert "**No claim, exploratory: no run was accepted" in text
    assert "> Verdicts and figures below describe these runs and carry no claim." in text
    assert [attributes["id"] for attributes in Page((out / "report.html").read_text()).all("section")] == SECTIONS


def test_one_block_and_one_update(tmp_path: Path) -> None:
    """A first-step plan of pairs: no baseline pairs, no curves to speak of, no interval from one block."""
    plan = plan_of(("B", "S"), seeds=(0,), updates=5).model_copy(
        update={"order": "pairs", "updates": 1, "warmup": 0, "windows": ("0-0",)}
    )
    text = (written(analysis_of(plan), tmp_path) / "report.md").read_text()
    assert "fresh_process_first_step" in text
    assert "none: one block" in text and "no A/A pair" in text and "NaN" not in text


# The terminal --------------------------------------------------------------------------------------------------------


def test_summary_is_short(analysis: Analysis) -> None:
    long = [replace(analysis.cells[0], status="rejected", reasons=("why " * 60,)) for _ in range(90)]
    crowded = replace(analysis, cells=(*analysis.cells, *long), warnings=("a warning of many words " * 12,) * 9)
    for found in (analysis, crowded):
        lines = summary(found, Path("out/report.html")).splitlines()
        assert len(lines) <= LONGEST and max(map(len, lines)) <= WIDTH
        assert lines[0].startswith("scope    steady state") and lines[-1] == "report   out/report.html"
        assert any(line.startswith("P+S over B (primary): supported, +") for line in lines)


# A real browser ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [500, 1280])  # Chromium's windows are no narrower than 500
def test_a_browser_shows_all_of_it_within_its_width(out: Path, tmp_path: Path, width: int) -> None:
    """Only tables may be wider than the window, and scroll for themselves. The probe is the page's one script."""
    probe = """<script>
    const out = [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, svg')
      && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.tagName);
    document.getElementById('show-0').checked = false;
    const lines = [...document.querySelectorAll('.cond-0, .cond-1')];
    const hidden = lines.map(e => [e.classList.contains('cond-0'), getComputedStyle(e).display === 'none']);
    document.title = JSON.stringify({out, hidden, width: document.documentElement.scrollWidth, window: innerWidth,
      drawn: [...document.querySelectorAll('svg.chart')].filter(e => e.getBoundingClientRect().height > 50).length});
    </script></body>"""
    page = tmp_path / "page.html"
    page.write_text((out / "report.html").read_text().replace("</body>", probe))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    dom = subprocess.run([*command, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True).stdout
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", dom)[1])
    assert found["out"] == [] and found["width"] <= found["window"]
    assert found["drawn"] == 15
    assert len(found["hidden"]) == 14 and all(first == gone for first, gone in found["hidden"])  # seven panels
