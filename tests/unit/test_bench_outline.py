"""What `stretto bench plan` says, of the shipped plans."""

from pathlib import Path

import pytest

from stretto.bench.outline import outline
from stretto.bench.plan import Guardrails
from stretto.bench.plan_file import load_plan

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes" / "bench").glob("*-*.toml"))


def told(name: str) -> str:
    return outline(load_plan(ROOT / "recipes" / "bench" / f"{name}.toml", ROOT))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_plan_is_one(path):
    assert path.stem == load_plan(path, ROOT).name
    assert "no claim" not in outline(load_plan(path, ROOT)).lower()


def test_the_ablation_is_four_whole_blocks_with_b_on_both_ends():
    text = told("cpu-ablation")
    assert "24 in 4 blocks" in text and "then 7 stages alone" in text
    assert "block 0, seed 0: B  P  B(c=1)  P+R  P+S  B" in text
    assert "incomplete" not in text
    assert "steady_state" in text


def test_the_full_set_says_that_its_square_is_incomplete():
    assert "an incomplete square: 10 blocks" in told("cpu-six")


def test_the_historical_design_is_abbaabba_and_promises_a_first_step():
    text = told("cpu-first-step")
    assert [line.split(": ")[1] for line in text.splitlines() if ", seed " in line] == [
        "B  P+S",
        "P+S  B",
        "B  P+S",
        "P+S  B",
    ]
    assert "fresh_process_first_step" in text


def test_what_it_detects_is_what_a_noncentral_t_says():
    """2.13 between-block deviations at 4 blocks: exp(2.13 * 0.02) - 1 = 4.3 %."""
    assert "4.3 % where blocks differ by 2 %" in told("cpu-ablation")


def test_bounds_that_are_looser_than_usual_are_named():
    assert "guardrails" not in told("cpu-ablation")
    plan = load_plan(ROOT / "recipes" / "bench" / "cpu-ablation.toml", ROOT)
    bounds = {"step_p95_ratio": 1.5, "peak_memory_gib": 0.5, "workload_percent": 2}
    text = outline(plan.model_copy(update={"guardrails": Guardrails(**bounds)}))
    assert "guardrails          step_p95_ratio = 1.5, looser than 1.05\n" in text
    assert "workload_percent = 2, looser than 1" in text and "peak_memory" not in text
