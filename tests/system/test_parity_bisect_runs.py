"""``stretto parity compare --bisect`` on real runs: each is run again from its manifest and repeats to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def run(folder: Path, chunks: int) -> Path:
    folder.mkdir()
    quiet = {"eval": {"every": 0}, "checkpoint": {"every": 0}, "run": {"dir": str(folder / "run"), "updates": 2}}
    running.train(running.recipe(folder, actor={"chunks_per_mini": chunks}, **quiet), limit_s=300)
    return folder / "run"


def test_runs_are_run_again_and_elements_named(tmp_path):
    """Two chunkings are two topologies: gradients of update 0 differ by rounding, and repeat."""
    a, b = run(tmp_path / "a", 2), run(tmp_path / "b", 4)
    command = [sys.executable, "-m", "stretto.cli", "parity", "compare", str(a), str(b), "--out", str(tmp_path / "out")]
    path = os.pathsep.join(filter(None, (str(running.HERE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, "--bisect"], capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/bisect.json").read_text())
    assert found["update"] == 0 and found["astray"] == []
    gradients = [tensor for tensor in found["tensors"] if tensor["kind"] == "gradients"]
    assert len(gradients) > 50 and all(0 < tensor["largest"] < 1e-6 for tensor in gradients)
    assert "gradients model.language_model.embed_tokens.weight" in done.stdout
    assert not list((tmp_path / "out/bisect").glob("*/checkpoints/*"))
