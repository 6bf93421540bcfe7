"""B, P, P+R and P+S live: the same bits at every update, and each shows that it engaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import running
from safetensors.numpy import save_file

from stretto import switches
from stretto.observe.manifest import read_manifest
from stretto.observe.raw import raw_path, read_raw

pytestmark = pytest.mark.timeout(300)
CONDITIONS = {
    "B": {},
    "P": {"processor_pool": 2},
    "P+R": {"processor_pool": 2, "logprob_reuse": True},
    "P+S": {"processor_pool": 2, "chunk_overlap": True},
}
P, R, S = switches.ALL


def run(folder: Path, condition: str, limit_s: float = 200, **tables: dict[str, Any]) -> Path:
    folder.mkdir()
    recipe = running.recipe(folder, switches=CONDITIONS[condition], **tables)
    output = running.train(recipe, limit_s=limit_s)
    assert f"condition {condition}: P " in output
    return folder / "run"


def numbers(run: Path) -> list[dict[str, Any]]:
    return running.numbers(run)


def assert_same(one: Path, other: Path, updates: int) -> None:
    prints = running.jsonl(one, "fingerprints.jsonl")
    assert len(prints) == updates and len({p["parameters"] for p in prints}) == updates
    assert prints == running.jsonl(other, "fingerprints.jsonl")
    assert numbers(one) == numbers(other)  # losses, rewards and gradient norms among them
    for update in range(updates):
        raw, again = read_raw(one, update), read_raw(other, update)
        assert raw.keys() == again.keys()
        assert all(raw[name].tobytes() == again[name].tobytes() for name in raw)


def assert_engaged(run: Path, condition: str) -> None:
    """The switches that are on engaged, and R and S did not where they are off."""
    events = running.jsonl(run, "events.jsonl")
    for switch in switches.ALL:
        evidence = switch.engaged(events)
        assert evidence.ok == (switch.letter in condition.split("+")), (condition, switch.name, evidence)
    manifest = read_manifest(run)["sessions"][-1]
    exact = {name: {"numerics": "exact"} for name in CONDITIONS[condition]}
    assert manifest["switches"] == {"condition": condition} | exact
    assert manifest["determinism"]["actor"]["no_grad_is_grad"] is True
    assert all(row["ratio_deviation_max"] == 0.0 for row in running.jsonl(run, "metrics.jsonl"))


@pytest.mark.timeout(900)
def test_a_check_finds_every_condition_the_same_and_one_number_that_is_not(tmp_path):
    """`stretto parity check`: P is on in P+R and P+S. Replays have fewer updates than live runs."""
    recipe = running.recipe(
        tmp_path, reward={"function": "rewards:late", "workers": 2}, rollout={"groups_per_decode_batch": 1}
    )
    out = tmp_path / "out"
    words = ["parity", "check", str(recipe), "--out", str(out), "--conditions", "P+R,P+S", "--updates", "3"]
    words += ["--record-partitions", "1"]

    def checked(code: int) -> tuple[str, dict[str, Any]]:
        process = running.stretto(*words)
        output = running.finish(process, 800)
        assert process.returncode == code, output
        return output, json.loads((out / "report.json").read_text())

    output, report = checked(0)
    assert "parity passed" in output.splitlines()[-3]
    rows = [row for pair in report["comparisons"] for row in pair["rows"]]
    assert len(report["comparisons"]) == 7 and {row["status"] for row in rows} == {"exact"}
    assert [run["kept"] for run in report["runs"]] == [False] * 8
    # A float32 gradient is not the float64 one, and near it.
    (reference,) = report["reference"]
    assert 1e-9 < reference["relative"] < 1e-5
    assert set(report["curves"].values()) == {0.0} and (out / "curves.png").stat().st_size > 10_000

    live = {name: out / "live" / name for name in ("B", "B-again", "P+R", "P+S")}
    for name, folder in live.items():
        assert_same(live["B"], folder, 3)
        assert_engaged(folder, name.removesuffix("-again"))
    lines = {name: running.jsonl(folder, "metrics.jsonl") for name, folder in live.items()}
    # S forwards the first chunk while later groups are still being scored; B and R have nothing to do by then.
    assert max(row["overlap_fraction"] for row in lines["P+S"]) > 0.2
    assert max(row["overlap_fraction"] for row in lines["B"]) == 0.0
    assert sum(row["processor_s"] for row in lines["P+R"]) > 0

    # Runs are kept, and held against one another anew.
    columns = read_raw(live["P+S"], 2)
    columns["raw_rewards"][5] += 1e-6
    save_file(columns, raw_path(live["P+S"], 2))
    output, report = checked(1)
    assert [run["kept"] for run in report["runs"]] == [True] * 8
    wrong = [(pair["group"], pair["column"], row) for pair in report["comparisons"] for row in pair["rows"]
             if row["status"] != "exact"]  # fmt: skip
    assert [(group, column, row["quantity"]) for group, column, row in wrong] == [("live", "P+S", "raw rewards")]
    assert (wrong[0][2]["first"]["update"], wrong[0][2]["first"]["sample"]) == (2, 5)
    assert "live, P+S: raw rewards: update 2, inputs, sample 5 (group 1)" in " ".join(output.split())


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"actor": {"data_parallel": 2}},
        {"actor": {"max_tokens_per_microbatch": 256}},
        {"lora": {"rank": 8}, "actor": {"lr": 4e-3}},
        {"lora": {"rank": 8, "publish": "adapter"}},
        {"staleness": {"max": 0}},
        {"algorithm": {"importance_correction": "mis"}, "actor": {"gradient_checkpointing": True}},
    ],
    ids=json.dumps,
)
def test_twenty_updates_of_the_demo_are_the_same_in_every_condition(tables, demo_model, tmp_path):
    demo = {
        "run": {"updates": 20},
        "model": {"path": str(demo_model)},
        "data": {"source": "digits"},
        "rollout": {
            "prompts_per_partition": 64,
            "n_samples_per_prompt": 8,
            "max_response_tokens": 8,
            "groups_per_decode_batch": 16,
        },
        "reward": {"function": "exact_match"},
        "actor": {"lr": 4e-4, "warmup_updates": 5, "max_tokens_per_microbatch": 8192},
        "eval": {"every": 0},
    }
    merged = {name: demo.get(name, {}) | tables.get(name, {}) for name in demo | tables}
    runs = {name: run(tmp_path / name, name, limit_s=600, **merged) for name in CONDITIONS}
    for name, folder in runs.items():
        assert_same(runs["B"], folder, 20)
        if "S" not in name and "data_parallel" not in json.dumps(tables):
            assert_engaged(folder, name)


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory) -> Path:
    """The warm-started model of the demo, seed 0."""
    folder = tmp_path_factory.mktemp("demo") / "sft"
    root = Path(__file__).parents[2]
    process = running.start(root / "recipes" / "digits-sft.toml", str(folder), command="sft")
    output = running.finish(process, 300)
    assert process.returncode == 0, output
    return folder


@pytest.mark.long
def test_a_run_that_began_without_switches_goes_on_under_them(tmp_path):
    """Stopped after update 2 as B, resumed as P+S: the bits of a run that was B throughout."""
    options = {"eval": {"every": 0}, "run": {"updates": 4}}
    straight = tmp_path / "straight"
    straight.mkdir()
    options["run"]["dir"] = str(straight / "run")
    running.train(running.recipe(straight, **options))
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    options["run"] = {"updates": 4, "dir": str(stopped / "run")}
    recipe = running.recipe(stopped, **options)
    process = running.start(recipe)
    running.wait_for(process, "update 2/4")
    process.terminate()
    output = running.finish(process)
    assert process.returncode == 143, output
    recipe = running.recipe(stopped, **options, switches=CONDITIONS["P+S"])
    running.train(recipe, "--resume")
    assert_same(straight / "run", stopped / "run", 4)
