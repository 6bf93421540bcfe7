"""Parity on a CUDA device: replays on one GPU, and the float64 reference there."""

from __future__ import annotations

import actor_case
import pytest
import ranks_case
import running
import torch

from stretto.observe.manifest import read_manifest
from stretto.parity.reference import distance, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device can be seen here"),
    pytest.mark.timeout(300),
]


def run(*words: object) -> str:
    process = running.stretto(*map(str, words))
    output = running.finish(process, 240)
    assert process.returncode == 0, output
    return output


def test_what_the_cpu_recorded_replays_on_one_gpu_to_the_same_bits_twice(tmp_path):
    """The engine of a replay needs no GPU. Against the CPU rows are distances, by the comparison's own account."""
    recipe = running.recipe(tmp_path, model={"dtype": "bfloat16"}, cluster={"device": "cpu"}, eval={"every": 0})
    recording = tmp_path / "recording"
    run("parity", "record", recipe, recording, "--partitions", 1)
    for name, *options in (("one",), ("other", "--timing", "recorded", "--set", "switches.logprob_reuse=true")):
        run("parity", "replay", recording, tmp_path / name, "--set", "cluster.device=cuda", *options)
        assert read_manifest(tmp_path / name)["sessions"][-1]["determinism"]["actor"]["device"] == "cuda"
    assert "distance" not in run("parity", "compare", tmp_path / "one", tmp_path / "other")
    assert "distance" in run("parity", "compare", recording / "run", tmp_path / "one", "--updates", 1)


def test_float64_gradients_are_those_of_the_cpu():
    cfg = ranks_case.config({})
    records, payloads = actor_case.partition()
    groups = [(record, payloads[record.group]) for record in records]
    ours, theirs = (
        {f"gradients.{name}": grad for name, grad in gradients(cfg, groups, device).items()}
        for device in ("cuda", "cpu")
    )
    assert distance(ours, theirs).l2 < 1e-12
