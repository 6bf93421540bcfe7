"""Faults planted in live runs (``faults/sitecustomize.py``): each is found, and named where it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import running

from stretto.parity.compare import compare
from stretto.parity.verdict import Verdict

FAULTS = Path(__file__).parent / "faults"
sys.path.insert(0, str(FAULTS))

from sitecustomize import GROUP, PARTITION, SAMPLE, TENSOR  # noqa: E402

GROUPS, N = 8, 4
"""Of a partition, and samples of a group."""
OF_GROUP = range(GROUP * N, GROUP * N + N)
INPUTS = ("prompt tokens", "multimodal tensors", "response tokens", "response lengths", "raw rewards", "truncation")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def run(folder: Path) -> Path:
    folder.mkdir()
    quiet = {"eval": {"every": 0}, "checkpoint": {"every": 0}}
    running.train(
        running.recipe(folder, run={"dir": str(folder / "run"), "updates": 3}, data={"layout": "many-images"}, **quiet),
        limit_s=280,
    )
    return folder / "run"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> tuple[Path, Path]:
    """A run without a fault, and a second one."""
    folder = tmp_path_factory.mktemp("clean")
    return run(folder / "one"), run(folder / "again")


@pytest.fixture
def with_fault(clean, tmp_path, monkeypatch) -> Callable[[str], Verdict]:
    """Compares the clean run with one that has a fault."""

    def compared(fault: str) -> Verdict:
        spans = [event for event in running.jsonl(clean[0], "events.jsonl") if event["name"] == "processor.process"]
        row = sorted(spans, key=lambda span: span["start_ns"])[PARTITION * GROUPS + GROUP]["row_id"]
        monkeypatch.setenv("TEST_FAULT", fault)
        monkeypatch.setenv("TEST_FAULT_ROW", row)
        monkeypatch.setenv("PYTHONPATH", str(FAULTS), prepend=":")
        return compare(clean[0], run(tmp_path / fault), clean[1])

    return compared


def differing(verdict: Verdict) -> set[str]:
    return {row.quantity for row in verdict.rows if row.status == "differs"}


def test_two_clean_runs_are_the_same(clean):
    verdict = compare(clean[0], clean[1], clean[1])
    assert verdict.exit_code == 0 and {row.status for row in verdict.rows} == {"exact"}


@pytest.mark.parametrize(
    ("fault", "quantity", "update", "samples"),
    [
        ("swapped_images", "multimodal tensors", PARTITION, OF_GROUP),
        ("shifted_mask", "loss masks", PARTITION, [0]),
        ("reward_off", "raw rewards", PARTITION, OF_GROUP),
        ("schedule_off_by_one", "microbatch schedule", PARTITION, range(GROUPS * N // 2)),
        ("stale_weight", "rollout log-probs", 2, [0]),  # version 1 makes partition 2
        ("dropped_token", "response tokens", PARTITION, [GROUP * N + SAMPLE]),
    ],
)
def test_a_fault_is_found_and_its_sample_is_named(
    with_fault, fault: str, quantity: str, update: int, samples: Collection[int]
):
    verdict = with_fault(fault)
    assert verdict.exit_code == 1
    row = verdict[quantity]
    assert row.status == "differs" and row.first is not None
    assert row.first.update == update and row.first.sample in samples
    assert verdict.first is row, "what differs first is the cause, not what follows from it"
    if fault == "reward_off":
        assert row.first.magnitude == pytest.approx(1e-6, rel=1e-6)
        assert row.distance.differing == N
    if fault == "schedule_off_by_one":
        assert not differing(verdict) & {*INPUTS, "advantages", "loss masks"}
        assert str(row.first.a).startswith("chunk 0, rank 0, microbatch 0")
        assert row.first.b == "chunk 0, rank 0, microbatch 1, row 0"
    if fault == "shifted_mask":
        assert row.first.token == 0
        assert not differing(verdict) & {*INPUTS, "advantages", "microbatch schedule"}
        assert verdict["old-policy log-probs"].first.update == 2  # under the weights that came of it
    if fault == "dropped_token":
        assert row.first.b is None and row.distance.differing == 1  # the first run has the token
        assert verdict["response lengths"].first.sample == row.first.sample
    if fault == "stale_weight":
        assert not differing(verdict) & {"prompt tokens", "multimodal tensors", "policy versions"}


def test_one_flipped_bit_of_a_parameter_is_found_and_its_tensor_is_named(with_fault):
    verdict = with_fault("flipped_bit")
    row = verdict["parameters"]
    assert verdict.exit_code == 1 and verdict.first is row
    assert (row.first.update, row.first.parameter) == (PARTITION, TENSOR)
    assert not differing(verdict) & {*INPUTS, "advantages", "loss masks"}  # two updates later, rollouts would differ
